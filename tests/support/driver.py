"""A CUDA driver without a GPU: keeps contexts as the real one does, records calls, and fails where a test says so."""

from __future__ import annotations

import ctypes
import os
import threading
import time

from cuda.bindings import driver as cuda

from fused_logp_hub import _driver, _manifest, _params

TEXTS = {  # of cuGetErrorString, as the driver words them
    2: b"out of memory",
    3: b"initialization error",
    34: b"CUDA driver is a stub library",
    46: b"CUDA-capable device(s) is/are busy or unavailable",
    100: b"no CUDA-capable device is detected",
    101: b"invalid device ordinal",
    200: b"device kernel image is invalid",
    209: b"no kernel image is available for execution on the device",
    700: b"an illegal memory access was encountered",
    802: b"system not yet initialized",
    803: b"system has unsupported display driver / cuda driver combination",
    804: b"forward compatibility was attempted on non supported HW",
    805: b"MPS client failed to connect to the MPS control daemon or the MPS server",
    900: b"operation not permitted when stream is capturing",
    901: b"operation failed due to a previous error during capture",
    999: b"unknown error",
}


class FakeDriver:
    """In place of ``cuda.bindings.driver``; `library` is in place of libcuda.so.1.

    Args:
        capabilities: of each physical GPU.
        version: cuDriverGetVersion.
        visible: the physical GPUs in the order in which ordinals count them, as CUDA_VISIBLE_DEVICES makes it.
        errors: what a call returns instead of success, by its name.
    """

    CUresult = cuda.CUresult
    CUdevice_attribute = cuda.CUdevice_attribute
    CUfunction_attribute = cuda.CUfunction_attribute

    def __init__(self, *capabilities, version=13000, visible=None, errors=None):
        self.capabilities = capabilities
        self.version = version
        self.visible = list(range(len(capabilities))) if visible is None else visible
        self.errors = errors or {}
        self.calls: list[tuple] = []
        self.active: set[int] = set()
        self.process: int | None = None
        self.stacks = threading.local()
        self.library = _Library(self)

    def install(self, setattr=setattr):
        """Put it under the package, which then has not used CUDA yet."""
        load = ctypes.CDLL
        fake = self.library
        setattr(ctypes, "CDLL", lambda name, *a, **k: fake if name == "libcuda.so.1" else load(name, *a, **k))
        setattr(_driver, "cuda", self)
        for name, value in (("_libcuda", None), ("_devices", {}), ("_libraries", {})):
            setattr(_driver, name, value)
        return self

    def called(self, name):
        """The arguments of each call of that name."""
        return [call[1:] for call in self.calls if call[0] == name]

    def status(self, name, *arguments):
        """Record a call and say how it ends; in a fork of the process that initialised it, as the real one."""
        self.calls.append((name, *arguments))
        code = self.errors.get(name, 0)
        if self.process not in (None, os.getpid()):
            code = 3
        return cuda.CUresult(code)

    # ---- The calls of the package. A device's handle is its physical number, its context 1000 more.

    def cuInit(self, flags):
        status = self.status("cuInit", flags)
        if int(status) == 0:
            self.process = os.getpid()
        return (status,)

    def cuDriverGetVersion(self):
        return self.status("cuDriverGetVersion"), self.version

    def cuDeviceGetCount(self):
        return self.status("cuDeviceGetCount"), len(self.visible)

    def cuDeviceGet(self, ordinal):
        status = self.status("cuDeviceGet", ordinal)
        if ordinal >= len(self.visible):
            return cuda.CUresult.CUDA_ERROR_INVALID_DEVICE, None
        return status, self.visible[ordinal]

    def cuDeviceGetName(self, length, device):
        return self.status("cuDeviceGetName"), f"Fake {device}".encode() + bytes(length - 6)

    def cuDeviceGetAttribute(self, attribute, device):
        major, minor = self.capabilities[device]
        kinds = self.CUdevice_attribute
        values = {
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: major,
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: minor,
            kinds.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: 132,
        }
        return self.status("cuDeviceGetAttribute"), values[attribute]

    def cuDevicePrimaryCtxRetain(self, device):
        status = self.status("cuDevicePrimaryCtxRetain", device)
        self.active.add(device)
        return status, 1000 + device

    def cuDevicePrimaryCtxGetState(self, device):
        return self.status("cuDevicePrimaryCtxGetState", device), 0, int(device in self.active)

    def cuLibraryLoadData(self, data, *_):
        status = self.status("cuLibraryLoadData", bytes(data))
        time.sleep(0.01)  # room for another thread to come in
        return status, len(self.calls)

    def cuLibraryGetKernel(self, library, symbol):
        return self.status("cuLibraryGetKernel", symbol), 1

    def cuKernelGetFunction(self, kernel):
        return self.status("cuKernelGetFunction", self.stack()[-1]), 2

    def cuFuncSetAttribute(self, *_):
        return (self.status("cuFuncSetAttribute"),)

    def cuGetErrorName(self, status):
        return cuda.CUresult.CUDA_SUCCESS, status.name.encode()

    def cuGetErrorString(self, status):
        return cuda.CUresult.CUDA_SUCCESS, TEXTS[int(status)]

    def stack(self) -> list[int]:
        """The contexts of this thread."""
        if not hasattr(self.stacks, "contexts"):
            self.stacks.contexts = []
        return self.stacks.contexts


class _Function:
    """A foreign function: takes argtypes like one of ctypes."""

    def __init__(self, call):
        self.call = call

    def __call__(self, *arguments):
        return self.call(*arguments)


class _Library:
    def __init__(self, driver: FakeDriver):
        def get_current(address):
            contexts = driver.stack()
            ctypes.c_void_p.from_address(address).value = contexts[-1] if contexts else None
            return int(driver.status("cuCtxGetCurrent"))

        def push(context):
            driver.stack().append(context)
            return int(driver.status("cuCtxPushCurrent"))

        def pop(_):
            driver.stack().pop()
            return int(driver.status("cuCtxPopCurrent"))

        def launch(config, *_):
            packed = ctypes.string_at(config, _driver._CONFIG.size)
            return int(driver.status("cuLaunchKernelEx", driver.stack()[-1], _driver._CONFIG.unpack(packed)[-1]))

        self.cuCtxGetCurrent = _Function(get_current)
        self.cuCtxPushCurrent_v2 = _Function(push)
        self.cuCtxPopCurrent_v2 = _Function(pop)
        self.cuLaunchKernelEx = _Function(launch)


def function(ordinal=0):
    """A kernel for the device, as a call looks it up."""
    manifest = _manifest.shipped()
    kernel = manifest.kernels[0]
    cubin = next(c for c in manifest.cubins_of(kernel.module) if c.arch == "sm_90")
    return _driver.device(ordinal).function(manifest, kernel, cubin)


def first_launch(ordinal=0):
    values = (*[0] * len(_params.LOGP_ADDRESSES), _params.logp_constants())
    function(ordinal).launch(1, 7, _params.LOGP, values)
