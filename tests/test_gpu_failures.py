"""The failures of test_failures.py that a real GPU can show: the driver's own answers, not a simulation's."""

from __future__ import annotations

import re
import shutil
import subprocess
import zipfile

import pytest
import torch
from support.process import PACKAGE, run_python

from fused_logp_hub import DriverError, _driver, _manifest

pytestmark = pytest.mark.gpu

SETUP = """
import torch, fused_logp_hub
from fused_logp_hub import _driver, fused_logp

def inputs(device="cuda"):
    torch.manual_seed(0)
    return torch.randn(8, 1000, device=device), torch.randint(1000, (8,), device=device)

def check(x, ids, logp):
    assert (logp - torch.log_softmax(x.double(), -1).gather(-1, ids[:, None])[:, 0]).abs().max() < 1e-5
"""


def test_fork_after_use(tmp_path):
    """PyTorch's error where it allocates, this package's where it does not; the parent goes on."""
    out = run_python(
        SETUP
        + """
import os, signal, sys
x, ids = inputs()
out = torch.empty(8, device="cuda")
fused_logp_hub.fused_logp_out(x, ids, out=out)
torch.cuda.synchronize()
child = os.fork()
if child == 0:
    signal.alarm(60)
    try:
        for call in (
            lambda: fused_logp(x, ids),
            lambda: fused_logp_hub.fused_logp_out(x, ids, out=out),
            lambda: fused_logp_hub.preload(0),
        ):
            try:
                call()
            except RuntimeError as error:
                print(type(error).__name__, str(error).splitlines()[0])
        sys.stdout.flush()
    finally:
        os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
check(x, ids, fused_logp(x, ids))
""",
        tmp_path,
    )
    allocating, *others = out.splitlines()
    refusals = ("Cannot re-initialize CUDA in forked subprocess", "initialization error", "does not survive a fork")
    assert any(text in allocating for text in refusals), allocating
    for line in others:
        assert line.startswith("DriverError cuInit: expected success, got CUDA_ERROR_NOT_INITIALIZED (3): ")
        assert line.endswith("CUDA does not survive a fork: start processes by spawn, or use CUDA in them only.")
    assert len(others) == 2


def test_spawn_after_use(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        SETUP
        + """
import multiprocessing

def work():
    x, ids = inputs()
    check(x, ids, fused_logp(x, ids))

if __name__ == "__main__":
    work()
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start()
    process.join(100)
    assert process.exitcode == 0, process.exitcode
    work()
"""
    )
    run_python("import runpy; runpy.run_path('program.py', run_name='__main__')", tmp_path, 150)


def test_foreign_cubin():
    """Machine code for another GPU, with the right checksum: what the selector prevents, refused by the driver."""
    manifest = _manifest.shipped()
    on = _driver.device(0)
    kernel, cubin = next(
        (k, c) for k in manifest.kernels for c in manifest.cubins_of(k.module) if c.mismatch(on.capability)
    )
    with pytest.raises(DriverError) as error:
        on.function(manifest, kernel, cubin)
    assert re.fullmatch(
        r"cu(LibraryLoadData|LibraryGetKernel|KernelGetFunction) for \S+ on device 0: expected success, got "
        r"CUDA_ERROR_(NO_BINARY_FOR_GPU \(209\)|INVALID_IMAGE \(200\)): .*\. "
        r"Reinstall fused-logp-hub; if it stays, report this as a bug\.",
        str(error.value),
    )
    torch.zeros(1, device="cuda").add_(1).item()  # the context is as good as before


@pytest.fixture
def copy(tmp_path):
    """A copy of the whole package, in a folder to put on the path."""
    site = tmp_path / "site"
    shutil.copytree(PACKAGE, site / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    return site


@pytest.mark.parametrize("damage", ["truncated", "one bit", "missing"])
def test_damaged_cubin(copy, tmp_path, damage):
    """Each call says which file; nothing runs in its place, and CPU tensors still work."""
    for path in (copy / PACKAGE.name / "cubins").glob("*.cubin"):
        data = path.read_bytes()
        if damage == "missing":
            path.unlink()
        else:
            path.write_bytes(
                data[:-1] if damage == "truncated" else data[:1000] + bytes([data[1000] ^ 4]) + data[1001:]
            )
    out = run_python(
        SETUP
        + """
x, ids = inputs()
for _ in range(2):
    try:
        fused_logp(x, ids)
    except fused_logp_hub.CubinError as error:
        print(error)
x, ids = inputs("cpu")
check(x, ids, fused_logp(x, ids))
""",
        tmp_path,
        package=copy,
    )
    first, second = out.splitlines()
    assert first == second
    text = {"truncated": r"expected \d+ bytes, got", "one bit": "expected sha256", "missing": "expected a cubin, got"}
    assert re.fullmatch(rf"{re.escape(str(copy))}\S+\.cubin: {text[damage]}.*\. Reinstall fused-logp-hub\.", first), (
        first
    )


def test_zipped_package(copy, tmp_path):
    archive = tmp_path / "package.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in copy.rglob("*"):
            file.write(path, path.relative_to(copy))
    code = SETUP + "x, ids = inputs()\ncheck(x, ids, fused_logp(x, ids))\nprint(fused_logp_hub.__file__)"
    assert run_python(code, tmp_path, package=archive).startswith(str(archive))


# ---- Which GPU an ordinal means.

SAME_GPUS = (
    SETUP
    + """
import uuid
from cuda.bindings import driver
for ordinal in range(torch.cuda.device_count()):
    status, found = driver.cuDeviceGetUuid(_driver.device(ordinal).handle)
    assert int(status) == 0, status
    ours = uuid.UUID(bytes=bytes(found.bytes))
    assert str(ours) == str(torch.cuda.get_device_properties(ordinal).uuid), ordinal
    x, ids = inputs(f"cuda:{ordinal}")
    check(x, ids, fused_logp(x, ids))
    print(ours)
"""
)


def uuids():
    return [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]


def mig_uuids():
    """Those of MIG instances; none where MIG is off."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except OSError:
        return []
    return re.findall(r"\(UUID: (MIG-[^)]+)\)", done.stdout)


def test_visible_by_uuid(tmp_path):
    """The package and PyTorch mean the same GPU."""
    if mig_uuids():
        pytest.skip("a GPU in MIG mode is not visible by its own UUID")
    wanted = uuids()[-1]
    assert run_python(SAME_GPUS, tmp_path, CUDA_VISIBLE_DEVICES=f"GPU-{wanted}").split() == [wanted]


def test_visible_in_another_order(tmp_path):
    if len(uuids()) < 2:
        pytest.skip("needs 2 GPUs")
    wanted = uuids()[::-1]
    for value in (",".join(f"GPU-{u}" for u in wanted), ",".join(map(str, range(len(wanted))[::-1]))):
        assert run_python(SAME_GPUS, tmp_path, CUDA_VISIBLE_DEVICES=value).split() == wanted


def test_visible_mig_instance(tmp_path):
    instances = mig_uuids()
    if not instances:
        pytest.skip("needs a GPU in MIG mode")
    assert len(run_python(SAME_GPUS, tmp_path, CUDA_VISIBLE_DEVICES=instances[0]).split()) == 1


def test_no_gpu_visible(tmp_path):
    """The error of a request names the variable."""
    out = run_python(
        "import fused_logp_hub\ntry:\n    fused_logp_hub.preload(0)\nexcept fused_logp_hub.DriverError as e: print(e)",
        tmp_path,
        CUDA_VISIBLE_DEVICES="-1",
    )
    assert out.startswith("cuInit: expected success, got CUDA_ERROR_NO_DEVICE (100): ")
    assert "Check CUDA_VISIBLE_DEVICES" in out


def test_import_after_cuda_makes_no_other_context(tmp_path):
    """PyTorch uses the second GPU only, the first being its current one: import loads on the second."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    out = run_python(
        """
        import torch
        x = torch.ones(8, device="cuda:1").mul(2)
        torch.cuda.synchronize(1)
        from fused_logp_hub import _driver
        print(sorted(_driver._devices), _driver.active_devices(), bool(_driver._libraries))
        """,
        tmp_path,
    )
    if "[0, 1] True" in out:
        pytest.skip("PyTorch itself made a context on device 0")
    assert out == "[1] [1] True\n"
