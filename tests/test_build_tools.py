"""The kernel table, the two compilers, and the manifest they write."""

import dataclasses
import hashlib
import shutil

import pytest

pytest.importorskip("build_tools", reason="the build tools are not part of the wheel")

from build_project import build_project, compiler_or_skip, contents, make_project, table_text

from build_tools import __main__ as command
from build_tools import errors, manifest
from build_tools.build import build
from build_tools.compilers import ENVIRONMENT_VARIABLE, select_compiler
from build_tools.kernel_table import ROOT, Architecture, load_table
from fused_logp_hub import __version__
from fused_logp_hub._manifest import load_manifest
from fused_logp_hub._selection import Facts, select_or_raise


@pytest.fixture
def project(tmp_path):
    return make_project(tmp_path / "project")


def test_table_expands_rows_by_dtype():
    table = load_table()
    symbols = [(kernel.module, symbol) for kernel in table.kernels for symbol in kernel.symbols]
    assert len(set(symbols)) == len(symbols) > len(table.kernels)
    assert not [k for k in table.kernels if "{" in k.symbols[0] or "dtypes" in k.row]
    for module in table.modules:
        assert table.symbols(module.name), f"{module.name} has no kernel"
        for architecture in module.architectures:
            table.elf_rule(table.compilers["nvrtc"].version, architecture)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"sm_90a"', '"sm90a"', "architecture: expected sm_XY"),
        ('["float32"]', '["float31"]', r"kernels\[0\]\.dtypes: expected one of"),
        ("_{dtype}", "", r"kernels\[0\]\.symbol: expected {dtype} in it"),
        ('symbol = "mark"', 'symbol = "mark_{dtype}"', r"kernels\[1\]\.symbol: expected {dtype}"),
        ("lanes = 4", 'usual_symbol = "usual"', r"kernels\[0\]\.usual_symbol: expected {dtype} in it"),
        ("lanes = 4", 'usual_symbol = "scale_fast_{dtype}"', r"kernels\[0\]\.symbol: expected a new one"),
        ('module = "plain"', 'module = "plane"', r"kernels\[1\]\.module: expected one of"),
        ("threads = 32", "threads = '32'", r"kernels\[1\]\.threads: expected int"),
        ("items_per_block = 64", "", r"kernels\[0\]: expected the keys of one kind of grid, got none"),
        ("items_per_block = 64", "tile_bytes = 64", r"kernels\[0\]: expected .* grid, got tile_bytes"),
        ("lanes = 4", "blocks_per_row = 1", r"kernels\[0\]: expected .* got blocks_per_row, items_per_block"),
        ("lanes = 4", "priority = 4", r"kernels\[0\]\.priority: expected absent"),
        ("lanes = 4", "auto = 512", r"kernels\[0\]\.auto: expected tables of integers"),
        ("lanes = 4", "auto = [{ max_row = 512 }]", r"kernels\[0\]\.auto: expected tables of integers"),
        ("lanes = 4", "auto = [{ max_rows = '512' }]", r"kernels\[0\]\.auto: expected tables of integers"),
        ("lanes = 4", "meant_for = [{ rows = 512 }]", r"kernels\[0\]\.meant_for: expected tables of integers"),
        ('["float32"]', '["float32", "float32"]', "expected a new one"),
        ('source = "plain.cu"', 'sources = "plain.cu"', "expected known keys"),
        ("[[modules]]", "[[module]]", "expected a key 'modules'"),
        ("lanes = 4", "lanes = ", "expected TOML"),
    ],
)
def test_table_errors_name_the_row(tmp_path, old, new, message):
    path = tmp_path / "kernels.toml"
    assert old in table_text()
    path.write_text(table_text().replace(old, new), encoding="utf-8")
    with pytest.raises(errors.TableError, match=message):
        load_table(path)


def test_match_rule_follows_the_architecture_name():
    rules = {name: Architecture.parse(name) for name in ("sm_80", "sm_90a", "sm_100f")}
    assert {name: (a.capability, a.match) for name, a in rules.items()} == {
        "sm_80": ((8, 0), "minor"),
        "sm_90a": ((9, 0), "exact"),
        "sm_100f": ((10, 0), "family"),
    }


@pytest.mark.parametrize(
    ("release", "architecture", "abi"),
    [("12.9.86", "sm_89", 7), ("12.9.86", "sm_103f", 8), ("12.4.127", "sm_90a", 7), ("13.0.88", "sm_80", 8)],
)
def test_rule_for_an_architecture_that_is_not_named(release, architecture, abi):
    assert load_table().elf_rule(release, architecture).abi == abi


def test_family_is_data():
    """As listed; an architecture without a row runs on its own capability alone."""
    table = dataclasses.replace(load_table(), families={"sm_100f": ("10.0", "10.3")})
    assert table.architecture("sm_100f").family == ((10, 0), (10, 3))
    assert table.architecture("sm_103f").family == ((10, 3),)
    assert table.architecture("sm_90a").family == ()


def test_new_architecture_is_a_word_in_the_table(project, tmp_path):
    """docs/adding-a-kernel.md: compiled, gated, and selected where it is the closest, with nothing else touched."""
    path = project / "build_tools" / "kernels.toml"
    text = path.read_text(encoding="utf-8")
    assert '"sm_103f"' not in text
    path.write_text(text.replace('"sm_80", "sm_100f"]', '"sm_80", "sm_100f", "sm_103f"]'), encoding="utf-8")
    written = build_project(project, tmp_path / "out")
    written["package_version"] = __version__
    for row in written["kernels"]:
        row.pop("lanes", None)  # a key that only this small project knows
    (tmp_path / "out" / "manifest.json").write_text(manifest.manifest_text(written), encoding="utf-8")
    shipped = load_manifest(tmp_path / "out")
    arch = {}
    for capability in ((8, 9), (10, 0), (10, 3)):
        facts = Facts(capability, 13000, "any", 16, 0, 0)
        arch[capability] = select_or_raise(shipped, "mark", "auto", facts).cubin.arch
    assert arch == {(8, 9): "sm_80", (10, 0): "sm_100f", (10, 3): "sm_103f"}


def test_release_without_a_rule():
    with pytest.raises(errors.TableError, match=r"expected one that covers CUDA 12\.8\.1 and sm_120"):
        load_table().elf_rule("12.8.1", "sm_120")


@pytest.mark.parametrize("choice", ["clang", "/no/such/nvcc"])
def test_unknown_compiler(monkeypatch, choice):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, choice)
    with pytest.raises(errors.CompilerError, match=f"{ENVIRONMENT_VARIABLE}: expected .*{choice}"):
        select_compiler(load_table())


def test_compiler_of_another_version():
    table = load_table()
    compiler_or_skip(table, "nvrtc")
    pin = dataclasses.replace(table.compilers["nvrtc"], version="12.9.1")
    with pytest.raises(errors.CompilerError, match=r"nvrtc: expected version 12\.9\.1"):
        select_compiler(dataclasses.replace(table, compilers={"nvrtc": pin}), "nvrtc")


def test_pins_are_those_of_pyproject():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    pin = load_table().compilers["nvrtc"]
    assert text.count(f'"{pin.distribution}=={pin.version}"') == 2  # build-system and group `nvrtc`
    for name in pin.header_distributions:
        assert text.count(f'"{name}==12.9.*"') == 2


def test_manifest(project, tmp_path):
    written = build_project(project, tmp_path / "out")
    files = contents(tmp_path / "out")
    assert files.pop("manifest.json").decode() == manifest.manifest_text(written)
    assert {key: written[key] for key in ("format", "package_version", "source_commit", "dirty")} == {
        "format": 1,
        "package_version": "1.2.3",
        "source_commit": "unknown",
        "dirty": False,
    }
    assert written["compiler"]["name"] == "nvrtc"
    assert "-fmad=false" in written["compiler"]["flags"]
    assert {row["file"]: row["sha256"] for row in written["cubins"]} == {
        name: hashlib.sha256(data).hexdigest() for name, data in files.items()
    }
    by_file = {row["file"]: row for row in written["cubins"]}
    abi = {name: (r["elf_osabi"], r["elf_abi"], r["min_cuda"]) for name, r in by_file.items()}
    assert abi == {
        "plain.sm_80.cubin": (0x33, 7, 12000),
        "plain.sm_100f.cubin": (0x41, 8, 12090),
        "special.sm_90a.cubin": (0x33, 7, 12000),
    }
    special = by_file["special.sm_90a.cubin"]
    assert (special["capability"], special["match"]) == ([9, 0], "exact")
    assert special["symbols"]["scale_fast_f32"]["registers"] > 0
    assert written["kernels"][0] == {
        "op": "scale",
        "name": "fast",
        "module": "special",
        "symbol": "scale_fast_f32",
        "dtype": "float32",
        "alignment": 16,
        "threads": 64,
        "shared_memory": 0,
        "items_per_block": 64,
        "lanes": 4,
        "priority": 0,
    }
    assert written["kernels"][1]["dtype"] == "any"
    assert written["kernels"][1]["priority"] == 1


def test_shipped_kernels_of_one_architecture_pass_the_gate(tmp_path):
    table = load_table()
    written = build(table, compiler_or_skip(table, "nvrtc"), tmp_path, architectures=["sm_90a"])
    symbols = {symbol for row in written["cubins"] for symbol in row["symbols"]}
    assert symbols == {row["symbol"] for row in written["kernels"]} != set()


def test_two_builds_give_the_same_bytes(project, tmp_path):
    build_project(project, tmp_path / "first")
    moved = project.rename(tmp_path / "elsewhere")
    build_project(moved, tmp_path / "second")
    assert contents(tmp_path / "first") == contents(tmp_path / "second")


def test_failed_build_leaves_the_last_one(project, tmp_path):
    build_project(project, tmp_path / "out")
    before = contents(tmp_path / "out")
    (project / "kernels_src" / "special.cu").write_text('extern "C" __global__ void other() {}')
    with pytest.raises(errors.MissingSymbolError, match=r"special\.sm_90a\.cubin: kernels: expected"):
        build_project(project, tmp_path / "out")
    (project / "kernels_src" / "special.cu").write_text("no C++")
    with pytest.raises(errors.CompilerError, match=r"special\.cu: expected it to compile for sm_90a"):
        build_project(project, tmp_path / "out")
    (project / "kernels_src" / "special.cu").unlink()
    with pytest.raises(errors.TableError, match=r"special\.source: expected a file"):
        build_project(project, tmp_path / "out")
    assert contents(tmp_path / "out") == before


def test_build_for_one_architecture(project, tmp_path):
    build_project(project, tmp_path / "out")
    written = build_project(project, tmp_path / "out", architectures=["sm_90a"])
    assert sorted(contents(tmp_path / "out")) == ["manifest.json", "special.sm_90a.cubin"]
    assert [row["symbol"] for row in written["kernels"]] == ["scale_fast_f32"]
    with pytest.raises(errors.TableError, match="arch: expected some of sm_100f, sm_80, sm_90a"):
        build_project(project, tmp_path / "out", architectures=["sm_75"])


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")
def test_nvcc_passes_the_same_gate(project, tmp_path):
    written = build_project(project, tmp_path / "out", "nvcc", architectures=["sm_90a"])
    again = build_project(project, tmp_path / "again", shutil.which("nvcc"), architectures=["sm_90a"])
    assert written == again
    assert written["compiler"]["name"] == "nvcc"
    assert written["cubins"][0]["symbols"]["scale_fast_f32"]["registers"] > 0
    (project / "kernels_src" / "special.cu").write_text("no C++")
    with pytest.raises(errors.CompilerError, match=r"(?s)nvcc: expected exit status 0.*error"):
        build_project(project, tmp_path / "out", "nvcc", architectures=["sm_90a"])


def test_command(project, tmp_path, capsys):
    compiler_or_skip(load_table(), "nvrtc")
    arguments = ["--compiler", "nvrtc", "--out", str(tmp_path / "out")]
    arguments += ["--table", str(project / "build_tools" / "kernels.toml")]
    arguments += ["--sources", str(project / "kernels_src")]
    assert command.main([*arguments, "--arch", "sm_80", "--arch", "sm_90a"]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].split()[:3] == ["arch", "symbol", "registers"]
    assert "2 cubins by nvrtc" in printed
    assert command.main([*arguments, "--arch", "sm_75"]) == 1
    assert capsys.readouterr().err.startswith("TableError: arch: expected some of")
