"""A damaged or foreign wheel (s4): a CubinError that names the file, before the driver sees anything."""

from __future__ import annotations

import hashlib
import json
from types import SimpleNamespace

import pytest

from fused_logp_hub import CubinError, KernelUnavailableError, __version__, _manifest
from fused_logp_hub._manifest import load_manifest

IMAGE = b"\x7fELF" + bytes(range(256)) * 8
KERNEL = {
    "op": "logp_forward",
    "name": "online",
    "dtype": "float32",
    "symbol": "logp_forward_online_f32",
    "module": "generic",
    "alignment": 1,
    "threads": 512,
    "shared_memory": 0,
    "priority": 3,
    "blocks_per_row": 1,
}


def contents() -> dict:
    return {
        "format": 1,
        "package_version": __version__,
        "source_commit": "abc",
        "dirty": False,
        "compiler": {"name": "nvrtc", "version": "12.9.86", "flags": []},
        "cubins": [
            {
                "file": "generic.sm_90.cubin",
                "module": "generic",
                "arch": "sm_90",
                "match": "minor",
                "capability": [9, 0],
                "family": [],
                "sha256": hashlib.sha256(IMAGE).hexdigest(),
                "size": len(IMAGE),
                "elf_osabi": 0x33,
                "elf_abi": 7,
                "min_driver": "525",
                "min_cuda": 12000,
                "symbols": {"logp_forward_online_f32": {"registers": 32, "shared": 0}},
            }
        ],
        "kernels": [{**KERNEL}, {**KERNEL, "name": "first", "priority": 0}],
    }


@pytest.fixture
def folder(tmp_path):
    """A good installation, for each test to damage."""
    (tmp_path / "generic.sm_90.cubin").write_bytes(IMAGE)
    write(tmp_path, contents())
    return tmp_path


def write(folder, raw) -> None:
    text = raw if isinstance(raw, str) else json.dumps(raw)
    (folder / "manifest.json").write_text(text, encoding="utf-8")


def test_good(folder):
    manifest = load_manifest(folder)
    (cubin,) = manifest.cubins
    assert cubin.capability == (9, 0)
    assert manifest.read_cubin(cubin) == IMAGE
    assert [k.priority for k in manifest.kernels] == [0, 3]
    assert manifest.kernels[0].auto is None
    assert manifest.architectures() == "sm_90"


@pytest.mark.parametrize(
    ("capability", "tried"),
    [
        ((8, 9), ["sm_89", "sm_86", "sm_80"]),
        ((8, 6), ["sm_86", "sm_80"]),
        ((10, 0), ["sm_100f"]),
        ((10, 3), ["sm_103a", "sm_103f", "sm_103", "sm_100f"]),
    ],
)
def test_closest_cubin_first(folder, capability, tried):
    """Whatever the order in the table: an architecture that is added is used on the GPUs it was added for."""
    rules = {"": "minor", "a": "exact", "f": "family"}
    raw = contents()
    raw["cubins"] = [
        {
            **raw["cubins"][0],
            "arch": arch,
            "capability": [int(arch[3:-1]), int(arch[-1])] if arch[-1].isdigit() else [int(arch[3:-2]), int(arch[-2])],
            "match": rules[arch[-1] if arch[-1] in rules else ""],
            "family": {"sm_100f": [[10, 0], [10, 3]], "sm_103f": [[10, 3]]}.get(arch, []),
        }
        for arch in ("sm_80", "sm_86", "sm_89", "sm_100f", "sm_103", "sm_103a", "sm_103f")
    ]
    write(folder, raw)
    manifest = load_manifest(folder)
    assert [c.arch for c in manifest.cubins if c.runs_on(capability, 13000)] == tried
    assert manifest.closest("generic", capability, 13000).arch == tried[0]
    assert manifest.closest("generic", (7, 5), 13000) is None


# ---- The cubin.


def truncate(path):
    path.write_bytes(IMAGE[:-1])


def flip_a_bit(path):
    path.write_bytes(IMAGE[:1000] + bytes([IMAGE[1000] ^ 4]) + IMAGE[1001:])


def append(path):
    path.write_bytes(IMAGE + b"\0")


def remove(path):
    path.unlink()


def replace_by_folder(path):
    path.unlink()
    path.mkdir()


DAMAGE = [
    (truncate, f"expected {len(IMAGE)} bytes, got {len(IMAGE) - 1}"),
    (append, f"expected {len(IMAGE)} bytes, got {len(IMAGE) + 1}"),
    (flip_a_bit, "expected sha256"),
    (remove, "expected a cubin, got No such file or directory"),
    (replace_by_folder, "expected a cubin, got Is a directory"),
]


@pytest.mark.parametrize(("damage", "text"), DAMAGE, ids=lambda d: getattr(d, "__name__", ""))
def test_s4_damaged_cubin(folder, damage, text):
    path = folder / "generic.sm_90.cubin"
    damage(path)
    manifest = load_manifest(folder)
    with pytest.raises(CubinError) as error:
        manifest.read_cubin(manifest.cubins[0])
    assert str(error.value).startswith(f"{path}: {text}")
    assert str(error.value).endswith("Reinstall fused-logp-hub.")


@pytest.fixture
def fake_driver(monkeypatch):
    """A driver that accepts everything and says what it was given."""
    from fused_logp_hub import _driver

    calls = []
    success = _driver.cuda.CUresult.CUDA_SUCCESS

    def call(name, value):
        return lambda *args: calls.append((name, args)) or (success, value)

    fake = SimpleNamespace(
        CUresult=_driver.cuda.CUresult,
        cuLibraryLoadData=call("cuLibraryLoadData", "library"),
        cuLibraryGetKernel=call("cuLibraryGetKernel", 1),
        cuKernelGetFunction=call("cuKernelGetFunction", 2),
    )
    monkeypatch.setattr(_driver, "cuda", fake)
    monkeypatch.setattr(_driver, "_libraries", {})
    device = object.__new__(_driver.Device)
    device.ordinal, device._functions, device.context = 0, {}, None
    monkeypatch.setattr(_driver.Device, "__enter__", lambda self: self)
    monkeypatch.setattr(_driver.Device, "__exit__", lambda self, *error: None)
    return device, calls


def test_the_fake_driver_sees_good_cubins(folder, fake_driver):
    """So that the next test proves something; and one load serves two calls."""
    device, calls = fake_driver
    manifest = load_manifest(folder)
    found = [device.function(manifest, manifest.kernels[0], manifest.cubins[0]) for _ in range(2)]
    assert found[0] is found[1]
    assert [name for name, _ in calls] == [
        "cuLibraryLoadData",
        "cuLibraryGetKernel",
        "cuKernelGetFunction",
    ]
    assert calls[0][1][0] == IMAGE
    assert calls[1][1][1] == b"logp_forward_online_f32"


@pytest.mark.parametrize("damage", [d for d, _ in DAMAGE], ids=lambda d: d.__name__)
def test_s4_driver_sees_no_damaged_cubin(folder, fake_driver, damage):
    device, calls = fake_driver
    damage(folder / "generic.sm_90.cubin")
    manifest = load_manifest(folder)
    for _ in range(2):  # the failure is not remembered as a success
        with pytest.raises(CubinError, match=r"generic\.sm_90\.cubin"):
            device.function(manifest, manifest.kernels[0], manifest.cubins[0])
    assert not calls


# ---- The manifest.


def without(*path):
    def change(raw):
        for key in path[:-1]:
            raw = raw[key]
        del raw[path[-1]]

    return change


def with_value(value, *path):
    def change(raw):
        for key in path[:-1]:
            raw = raw[key]
        raw[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            with_value("0.0.1", "package_version"),
            f"expected kernels of version {__version__}, got 0.0.1",
        ),
        (without("package_version"), f"expected kernels of version {__version__}, got None"),
        (with_value(2, "format"), "expected manifest format 1, got 2"),
        (without("format"), "expected manifest format 1, got None"),
        (without("cubins"), "expected a complete manifest, got KeyError('cubins')"),
        (without("kernels"), "expected a complete manifest, got KeyError('kernels')"),
        (without("cubins", 0, "sha256"), "expected a complete manifest, got KeyError('sha256')"),
        (without("kernels", 0, "symbol"), "expected a complete manifest, got TypeError("),
        (with_value(1, "kernels", 0, "unheard_of"), "expected a complete manifest, got TypeError("),
        (
            with_value(None, "cubins", 0, "capability"),
            "expected a complete manifest, got TypeError(",
        ),
        (with_value(None, "kernels"), "expected a complete manifest, got TypeError("),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # the same in every process
)
def test_s4_foreign_or_incomplete_manifest(folder, change, text):
    raw = contents()
    change(raw)
    write(folder, raw)
    with pytest.raises(CubinError) as error:
        load_manifest(folder)
    assert str(error.value).startswith(f"{folder / 'manifest.json'}: {text}")
    assert str(error.value).endswith("Reinstall fused-logp-hub.")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '{"format": 1', "\ufeff{}"], ids=repr)
def test_s4_broken_json(folder, text):
    write(folder, text)
    with pytest.raises(CubinError, match=r"manifest\.json: expected (JSON|manifest format 1), got"):
        load_manifest(folder)


def test_s4_not_utf8(folder):
    (folder / "manifest.json").write_bytes(b'{"format": "\xff\xfe"}')
    with pytest.raises(CubinError, match=r"manifest\.json: expected JSON, got"):
        load_manifest(folder)


def test_s4_missing_manifest(tmp_path):
    with pytest.raises(CubinError) as error:
        load_manifest(tmp_path / "nowhere")
    assert str(error.value).startswith(f"{tmp_path / 'nowhere' / 'manifest.json'}: expected the kernel manifest, got")
    assert isinstance(error.value, KernelUnavailableError)


def test_installed_wheel_is_whole():
    """Every cubin of the wheel under test has its checksum, and every kernel its symbol in some cubin."""
    if not (_manifest.CUBIN_DIR / "manifest.json").exists():
        pytest.skip("no manifest beside the package: it was not built")
    manifest = load_manifest(_manifest.CUBIN_DIR)
    for cubin in manifest.cubins:
        assert manifest.read_cubin(cubin)[:4] == b"\x7fELF"
    for cubin in manifest.cubins:
        kernels = [kernel for kernel in manifest.kernels if kernel.module == cubin.module]
        symbols = [symbol for kernel in kernels for symbol in (kernel.symbol, kernel.usual_symbol) if symbol]
        assert sorted(symbols) == sorted(cubin.symbols)
    assert all(manifest.cubins_of(kernel.module) for kernel in manifest.kernels)
