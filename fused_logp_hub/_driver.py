"""The CUDA driver: loads cubins, looks kernels up, launches them. The only module that imports ``cuda``.

Importing it does not touch CUDA. Work happens on first use, once per device, under one lock:

* A cubin becomes one CUlibrary for the process; a kernel becomes one CUfunction per device.
* Each launch runs in the primary context of the tensor's device, which is pushed when another one (or
  none, as on autograd's threads) is current. Contexts of other devices are never created.
* Nothing is unloaded at exit: the driver may be gone by then.
* A forked child starts from nothing: what its parent initialised does not work there, and cuInit says so.

The launch itself goes through ctypes: one call with two prepared buffers costs half of what the typed
binding costs, and it is on the path of every token batch.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Sequence
from typing import Any

from cuda.bindings import driver as cuda

from fused_logp_hub._advice import advice
from fused_logp_hub._errors import DriverError
from fused_logp_hub._manifest import Cubin, KernelRow, Manifest
from fused_logp_hub._params import MAX_PARAMS_BYTES

_lock = threading.RLock()
_devices: dict[int, Device] = {}
_libraries: dict[str, Any] = {}  # by checksum
_libcuda: ctypes.CDLL | None = None


# CUlaunchConfig: the grid's first dimension, which varies; its others, the block and dynamic shared memory, packed once
# a kernel; the stream; no attributes.
# cuLaunchKernelEx takes it as one argument, which ctypes converts faster than cuLaunchKernel's eleven.
_SHAPE = struct.Struct("@6I")
_CONFIG = struct.Struct(f"@I{_SHAPE.size}s4xQ16x")


class _Buffers:
    """A launch's buffers: parameters, the pointers they are read through, the configuration.

    Struct packs into views of them, which takes less time than into ctypes' own objects.
    """

    def __init__(self) -> None:
        buffer, config = ctypes.create_string_buffer(MAX_PARAMS_BYTES), ctypes.create_string_buffer(_CONFIG.size)
        self.buffer, self.config = memoryview(buffer), memoryview(config)
        self.pointers = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        self.pointers_address = ctypes.addressof(self.pointers)
        self.config_address = ctypes.addressof(config)
        self.current = ctypes.c_void_p()
        self.current_address = ctypes.addressof(self.current)


class _Arguments(threading.local):
    """Each thread's own."""

    def __init__(self) -> None:
        self.buffers = _Buffers()


_arguments = _Arguments()


def _forget() -> None:
    global _lock, _libcuda
    _lock = threading.RLock()  # another thread of the parent may have held it
    _libcuda = None
    _devices.clear()
    _libraries.clear()


os.register_at_fork(after_in_child=_forget)


def libcuda() -> ctypes.CDLL:
    """The driver's library, initialised; DriverError if there is none."""
    global _libcuda
    if _libcuda is not None:
        return _libcuda
    with _lock:
        try:
            library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DriverError(
                f"libcuda.so.1: expected the NVIDIA driver's library, got none ({error}). "
                "Install the NVIDIA driver, or use CPU tensors or kernel='reference'."
            ) from None
        pointer = ctypes.c_void_p
        try:
            library.cuLaunchKernelEx.argtypes = [pointer] * 4
        except AttributeError:
            raise DriverError(
                "libcuda.so.1: expected a driver for CUDA 12.0 or newer, got one without cuLaunchKernelEx. "
                "Update the NVIDIA driver."
            ) from None
        library.cuCtxGetCurrent.argtypes = [pointer]
        library.cuCtxPushCurrent_v2.argtypes = [pointer]
        library.cuCtxPopCurrent_v2.argtypes = [pointer]
        _check(cuda.cuInit(0), "cuInit")
        _libcuda = library
    return _libcuda


def driver_version() -> int:
    """cuDriverGetVersion: 13000 for a driver of CUDA 13.0."""
    libcuda()
    return int(_check(cuda.cuDriverGetVersion(), "cuDriverGetVersion"))


def device_count() -> int:
    """The number of visible devices."""
    libcuda()
    return int(_check(cuda.cuDeviceGetCount(), "cuDeviceGetCount"))


def active_devices() -> list[int]:
    """The devices whose primary context exists; makes none."""
    active = []
    for ordinal in range(device_count()):
        handle = _check(cuda.cuDeviceGet(ordinal), "cuDeviceGet", device=ordinal)
        state = cuda.cuDevicePrimaryCtxGetState(handle)
        _check(state, "cuDevicePrimaryCtxGetState", device=ordinal)
        if state[2]:
            active.append(ordinal)
    return active


class Function:
    """A kernel that is ready to launch on one device; ``usual`` is its machine code for usual calls, or itself."""

    __slots__ = ("device", "handle", "kernel", "shape", "symbol", "usual")

    def __init__(
        self, device: Device, kernel: KernelRow, symbol: str, handle: int, usual: Function | None = None
    ) -> None:
        self.device = device
        self.kernel = kernel
        self.symbol = symbol
        self.handle = handle
        self.usual = usual or self
        self.shape = _SHAPE.pack(1, 1, kernel.threads, 1, 1, kernel.shared_memory)

    def launch(self, grid: int, stream: int, layout: struct.Struct, values: Sequence[Any]) -> None:
        """Pack the parameters and launch on a raw stream of this device; DriverError names the symbol."""
        library = _libcuda or libcuda()  # None in a forked child, where libcuda() raises
        arguments = _arguments.buffers
        layout.pack_into(arguments.buffer, 0, *values)
        _CONFIG.pack_into(arguments.config, 0, grid, self.shape, stream)
        library.cuCtxGetCurrent(arguments.current_address)
        config, parameters = arguments.config_address, arguments.pointers_address
        if arguments.current.value == self.device.context:
            status = library.cuLaunchKernelEx(config, self.handle, parameters, None)
        else:
            with self.device:
                status = library.cuLaunchKernelEx(config, self.handle, parameters, None)
        if status:
            _check((cuda.CUresult(status),), "cuLaunchKernelEx", self.symbol, self.device.ordinal)


class Device:
    """A GPU's facts, its primary context, and the kernels loaded on it."""

    def __init__(self, ordinal: int) -> None:
        libcuda()
        self.ordinal = ordinal
        self.driver_cuda = driver_version()
        self.handle = _check(cuda.cuDeviceGet(ordinal), "cuDeviceGet", device=ordinal)
        attribute = cuda.CUdevice_attribute
        self.capability = (
            self._attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
            self._attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
        )
        self.multiprocessors = self._attribute(attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        name = _check(cuda.cuDeviceGetName(128, self.handle), "cuDeviceGetName", device=ordinal)
        self.name = name.split(b"\0")[0].decode()
        context = cuda.cuDevicePrimaryCtxRetain(self.handle)
        self.context = int(_check(context, "cuDevicePrimaryCtxRetain", device=ordinal))
        self._functions: dict[tuple[str, str], Function] = {}

    def _attribute(self, attribute: Any) -> int:
        value = cuda.cuDeviceGetAttribute(attribute, self.handle)
        return int(_check(value, "cuDeviceGetAttribute", device=self.ordinal))

    def __enter__(self) -> Device:
        status = libcuda().cuCtxPushCurrent_v2(self.context)
        _check((cuda.CUresult(status),), "cuCtxPushCurrent", device=self.ordinal)
        return self

    def __exit__(self, *_: object) -> None:
        libcuda().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def function(self, manifest: Manifest, kernel: KernelRow, cubin: Cubin) -> Function:
        """The kernel on this device, loaded on first use."""
        key = (cubin.sha256, kernel.symbol)
        found = self._functions.get(key)
        if found is None:
            with _lock:
                found = self._functions.get(key)
                if found is None:
                    library = _library(manifest, cubin, self.ordinal)
                    usual = None if kernel.usual_symbol is None else self._load(library, kernel, kernel.usual_symbol)
                    found = self._functions[key] = self._load(library, kernel, kernel.symbol, usual)
        return found

    def has(self, kernel: KernelRow, cubin: Cubin) -> bool:
        """Whether `function` would load nothing."""
        return (cubin.sha256, kernel.symbol) in self._functions

    def _load(self, library: Any, kernel: KernelRow, symbol: str, usual: Function | None = None) -> Function:
        where = (symbol, self.ordinal)
        handle = _check(cuda.cuLibraryGetKernel(library, symbol.encode()), "cuLibraryGetKernel", *where)
        with self:
            function = _check(cuda.cuKernelGetFunction(handle), "cuKernelGetFunction", *where)
            if kernel.shared_memory:
                limit = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                _check(cuda.cuFuncSetAttribute(function, limit, kernel.shared_memory), "cuFuncSetAttribute", *where)
        return Function(self, kernel, symbol, int(function), usual)


def device(ordinal: int) -> Device:
    """The device, initialised on first use."""
    found = _devices.get(ordinal)
    if found is None:
        with _lock:
            found = _devices.get(ordinal) or Device(ordinal)
            _devices[ordinal] = found
    return found


def _library(manifest: Manifest, cubin: Cubin, ordinal: int) -> Any:
    found = _libraries.get(cubin.sha256)
    if found is None:
        data = manifest.read_cubin(cubin)
        loaded = cuda.cuLibraryLoadData(data, [], [], 0, [], [], 0)
        found = _libraries[cubin.sha256] = _check(loaded, "cuLibraryLoadData", cubin.file, ordinal)
    return found


def _check(result: Any, call: str, symbol: str = "", device: int | None = None) -> Any:
    """The value behind a driver call's status, or DriverError with call, code, symbol and device."""
    status, *values = result
    if status == cuda.CUresult.CUDA_SUCCESS:
        return values[0] if values else None
    _, name = cuda.cuGetErrorName(status)
    _, text = cuda.cuGetErrorString(status)
    where = f" for {symbol}" if symbol else ""
    where += f" on device {device}" if device is not None else ""
    raise DriverError(
        f"{call}{where}: expected success, got {(name or b'unknown').decode()} ({int(status)}): "
        f"{(text or b'no description').decode()}. {advice(int(status))}"
    )
