"""What a user is told when the machine, the driver or the installation is not as it should be: the exact error.

Without a GPU: a driver that fails as told stands in (support/driver.py). Processes are in test_processes.py, what is
installed in test_installations.py, test_manifest.py and test_cli.py, what a real GPU can show in test_gpu_failures.py.
"""

from __future__ import annotations

import threading

import pytest
import torch
from support.driver import TEXTS, FakeDriver, first_launch, function
from support.package import write_package

import fused_logp_hub
from fused_logp_hub import CubinError, DriverError, NoMatchingKernelError, _driver, _inspect, _manifest
from fused_logp_hub.cli import main


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Cubins and a manifest for the loader to read, whatever was built here."""
    folder = tmp_path / "package" / "cubins"
    write_package(folder)
    monkeypatch.setattr(_manifest, "CUBIN_DIR", folder)
    _manifest.shipped.cache_clear()
    yield folder
    _manifest.shipped.cache_clear()


@pytest.fixture
def put(package, monkeypatch):
    """Puts a fake driver under the package."""

    def put(*capabilities, **options):
        return FakeDriver(*capabilities, **options).install(monkeypatch.setattr)

    return put


def error_of(error, call=lambda: fused_logp_hub.preload(0)):
    """The message, the same when the call is made again."""
    with pytest.raises(error) as first:
        call()
    with pytest.raises(error) as second:
        call()
    assert str(first.value) == str(second.value)
    return str(first.value)


# ---- The driver.


def test_no_libcuda(package, monkeypatch):
    def refuse(name, *args, **kwargs):
        raise OSError("libcuda.so.1: cannot open shared object file: No such file or directory")

    FakeDriver().install(monkeypatch.setattr)
    monkeypatch.setattr(_driver.ctypes, "CDLL", refuse)
    assert error_of(DriverError) == (
        "libcuda.so.1: expected the NVIDIA driver's library, got none (libcuda.so.1: cannot open shared object file: "
        "No such file or directory). Install the NVIDIA driver, or use CPU tensors or kernel='reference'."
    )


MPS = "Look at this node's MPS daemon, or unset CUDA_MPS_PIPE_DIRECTORY."
START = {
    34: (
        "CUDA_ERROR_STUB_LIBRARY",
        "This libcuda.so.1 is the toolkit's stub, for linking only: take its folder off LD_LIBRARY_PATH.",
    ),
    100: (
        "CUDA_ERROR_NO_DEVICE",
        "Check CUDA_VISIBLE_DEVICES, and that this container was started with GPUs.",
    ),
    802: (
        "CUDA_ERROR_SYSTEM_NOT_READY",
        "Start the fabric manager (nvidia-fabricmanager) of this node.",
    ),
    803: (
        "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        "libcuda.so.1 is of another release than the kernel module: take a cuda-compat folder off LD_LIBRARY_PATH, "
        "or reboot after a driver's update.",
    ),
    804: (
        "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
        "Forward compatibility (cuda-compat) exists for data-center GPUs only: take its folder off LD_LIBRARY_PATH, "
        "or update the driver.",
    ),
    805: ("CUDA_ERROR_MPS_CONNECTION_FAILED", MPS),
    999: ("CUDA_ERROR_UNKNOWN", "Run `fused-logp-hub doctor`."),
}


@pytest.mark.parametrize("code", START)
def test_driver_that_does_not_start(put, capsys, code):
    """Forward-compatibility libraries and others; the doctor says the same, and does not refer to itself twice."""
    put((9, 0), errors={"cuInit": code})
    name, what_to_do = START[code]
    message = f"cuInit: expected success, got {name} ({code}): {TEXTS[code].decode()}. {what_to_do}"
    assert error_of(DriverError) == message
    assert main(["doctor"]) == 1
    assert f"problem: {message}\n" in capsys.readouterr().out


def test_driver_older_than_the_calls(put):
    del put((9, 0)).library.cuLaunchKernelEx
    assert error_of(DriverError) == (
        "libcuda.so.1: expected a driver for CUDA 12.0 or newer, got one without cuLaunchKernelEx. "
        "Update the NVIDIA driver."
    )


def test_driver_too_old_for_a_cubin(put):
    put((12, 0), version=12040)
    head, *trace = error_of(NoMatchingKernelError).splitlines()
    assert head == (
        "kernel: expected one that fits this device and these tensors, got none; the installed wheel ships "
        "sm_120, sm_80, sm_90, sm_90a. Use a wheel with your architecture, or kernel='reference'."
    )
    assert trace[0].startswith("logp_forward, kernel='auto': capability 12.0, driver CUDA 12.4, ")
    assert (
        "  online (logp_forward_generic_bfloat16, sm_120): rejected: needs a driver for CUDA 12.9 (575 or newer)"
        in trace
    )


def test_gpu_without_a_cubin(put):
    fake = put((7, 5))
    head, *trace = error_of(NoMatchingKernelError).splitlines()
    assert "ships sm_120, sm_80, sm_90, sm_90a." in head
    assert trace[0].startswith("logp_forward, kernel='auto': capability 7.5, ")
    assert (
        "  online (logp_forward_generic_bfloat16, sm_80): rejected: sm_80 runs on capability 8.x with x >= 0" in trace
    )
    assert not fake.called("cuLibraryLoadData")


@pytest.mark.parametrize("code", [200, 209])
def test_cubin_that_the_driver_refuses(put, code):
    """Right checksum, foreign contents."""
    put((9, 0), errors={"cuLibraryLoadData": code})
    name = {200: "CUDA_ERROR_INVALID_IMAGE", 209: "CUDA_ERROR_NO_BINARY_FOR_GPU"}[code]
    assert error_of(DriverError) == (
        f"cuLibraryLoadData for cluster.sm_90.cubin on device 0: expected success, got {name} ({code}): "
        f"{TEXTS[code].decode()}. Reinstall fused-logp-hub; if it stays, report this as a bug."
    )


def test_damaged_cubin_stops_at_the_first_use(put, package):
    fake = put((9, 0))
    path = package / "cluster.sm_90.cubin"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    assert error_of(CubinError) == f"{path}: expected {size} bytes, got {size - 1}. Reinstall fused-logp-hub."
    path.unlink()
    assert error_of(CubinError) == (
        f"{path}: expected a cubin, got No such file or directory. Reinstall fused-logp-hub."
    )
    assert not fake.called("cuLibraryLoadData")


@pytest.mark.parametrize("call", ["cuLibraryLoadData", "cuKernelGetFunction", "cuLaunchKernelEx"])
def test_call_that_the_driver_refuses_in_a_capture(put, call):
    """One in another thread, which this package cannot see; its own are in test_cuda_graphs.py."""
    put((9, 0), errors={call: 900})
    assert error_of(DriverError, first_launch).endswith(
        "expected success, got CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED (900): operation not permitted when stream is "
        "capturing. Call fused_logp_hub.preload() before capturing a graph."
    )


def test_what_is_loaded_is_known(put):
    """Which a capture asks before it would load a kernel."""
    put((9, 0))
    manifest = _manifest.shipped()
    kernel = manifest.kernels[0]
    cubin = manifest.closest(kernel.module, (9, 0), 13000)
    device = _driver.device(0)
    assert not device.has(kernel, cubin)
    fused_logp_hub.preload(0)
    assert device.has(kernel, cubin)


# ---- PyTorch.


def test_pytorch_without_cuda(put, capsys, monkeypatch):
    put((9, 0))
    monkeypatch.setattr(torch.version, "cuda", None)
    assert main(["doctor"]) == 1
    wanted = f"torch: expected a build with CUDA, got {torch.__version__}. Install one from pytorch.org."
    assert f"problem: {wanted}\n" in capsys.readouterr().out


def test_pytorch_for_another_cuda(put, capsys, monkeypatch):
    """It finds no GPU, and warns; the doctor says which builds would."""
    import warnings

    put((9, 0), version=12040)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: warnings.warn("too old", stacklevel=1) or False)
    assert main(["doctor"]) == 1
    assert (
        f"problem: torch.cuda: expected the driver's 1 GPUs, got none that PyTorch {torch.__version__}, built for "
        "CUDA 13.0, can use. Install a build for CUDA 12.4 or older from pytorch.org.\n"
    ) in capsys.readouterr().out


# ---- Devices.


def test_second_gpu_needs_no_context_on_the_first(put):
    fake = put((9, 0), (9, 0))
    fused_logp_hub.preload(1)
    first_launch(1)
    assert fake.active == {1}
    assert {context for (context,) in fake.called("cuKernelGetFunction")} == {1001}
    assert fake.called("cuLaunchKernelEx") == [(1001, 7)]
    assert fake.stack() == []  # what was pushed was popped


def test_import_after_cuda_loads_only_on_gpus_in_use(put, monkeypatch):
    """The second GPU is in use, the first is not, whichever PyTorch calls current."""
    fake = put((9, 0), (9, 0), (7, 5))
    fake.active = {1, 2}  # and nothing fits the third, which is no reason to fail
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    _inspect.preload_if_initialized()
    assert fake.active == {1, 2}
    assert {context for (context,) in fake.called("cuKernelGetFunction")} == {1001}


@pytest.mark.parametrize(
    ("value", "visible"),
    [("1,0", [1, 0]), ("GPU-8f6d", [1]), ("MIG-c7a1", [1]), ("1", [1])],
)
def test_ordinals_are_the_drivers(put, monkeypatch, value, visible):
    """CUDA_VISIBLE_DEVICES is the driver's to read: PyTorch's ordinal goes to it as it is."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    fake = put((8, 0), (9, 0), visible=visible)
    for ordinal, physical in enumerate(visible):
        device = _driver.device(ordinal)
        assert (device.name, device.capability) == (f"Fake {physical}", fake.capabilities[physical])
        assert device.context == 1000 + physical
    assert fake.called("cuDeviceGet") == [(ordinal,) for ordinal in range(len(visible))]
    assert error_of(DriverError, lambda: _driver.device(len(visible))) == (
        f"cuDeviceGet on device {len(visible)}: expected success, got CUDA_ERROR_INVALID_DEVICE (101): "
        "invalid device ordinal. Use an index below the number of visible GPUs."
    )


# ---- Threads.


def test_eight_threads_at_once(put):
    """The first use in all of them: each cubin is loaded once, and no thread is left with a context."""
    fake = put((9, 0))
    start = threading.Barrier(8)
    found, stacks, errors = [], [], []

    def work():
        try:
            start.wait()
            found.append(function())
            fused_logp_hub.preload(0)
            first_launch()
            stacks.append(fake.stack())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors
    assert len(found) == 8
    assert len(set(map(id, found))) == 1
    loaded = [data for (data,) in fake.called("cuLibraryLoadData")]
    assert len(loaded) == len(set(loaded)) == 3  # generic, cluster and tma for 9.0
    assert fake.called("cuDevicePrimaryCtxRetain") == [(0,)]
    assert stacks == [[]] * 8
