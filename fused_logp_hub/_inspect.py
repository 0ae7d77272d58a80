"""What is shipped, what would run and why, and loading ahead of time."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_logp_hub import _driver, _launch, _manifest, _selection
from fused_logp_hub._errors import ArgumentError, KernelUnavailableError
from fused_logp_hub._problem import copy_reason

FORWARD = "logp_forward"


@dataclass(frozen=True)
class Explanation:
    """The kernel that a call would run, and why; printing it gives the whole trace."""

    op: str
    kernel: str | None
    """Public name, None if nothing fits."""
    symbol: str | None
    arch: str | None
    trace: str
    notes: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([f"{self.op}: {self.kernel or 'no kernel'}", *(f"note: {n}" for n in self.notes), self.trace])


@dataclass(frozen=True)
class AvailableKernel:
    """One shipped kernel in one cubin."""

    op: str
    kernel: str
    dtype: str
    arch: str
    symbol: str
    alignment: int
    registers: int
    usable: bool | None
    """Whether it runs on the current GPU; None without one."""


def explain_selection(logits: Tensor, *, kernel: str = "auto", op: str = FORWARD) -> Explanation:
    """Which kernel these logits would run with, and the verdict on every other one. Launches nothing.

    Args:
        logits: [..., V], any supported dtype, on the CPU or a GPU.
        kernel: as in `fused_logp`, the environment variable included.
        op: "logp_forward" or "logp_backward".

    Raises:
        ArgumentError: the kernel's name is unknown.
        CubinError, DriverError: the wheel or the driver is unusable.
    """
    kernel = _selection.resolve(kernel)
    if op != FORWARD:
        kernel = _selection.backward_kernel(kernel)
    if kernel == _selection.REFERENCE or not logits.is_cuda:
        why = "asked for by name" if logits.is_cuda else f"{logits.device.type} tensors always run it"
        return Explanation(op, _selection.REFERENCE, None, None, f"reference (plain PyTorch): {why}", ())
    reason = copy_reason(logits)
    notes = () if reason is None else (f"the logits are copied first: {reason}",)
    facts = _launch.facts_of(logits, logits.shape[:-1].numel(), copied=reason is not None)
    selection = _selection.select(_manifest.shipped(), op, kernel, facts)
    chosen = selection.chosen
    if chosen is None:
        return Explanation(op, None, None, None, selection.trace(), notes)
    return Explanation(op, chosen.kernel.name, chosen.kernel.symbol, chosen.cubin.arch, selection.trace(), notes)


def available_kernels(device: int | str | torch.device | None = None) -> list[AvailableKernel]:
    """Every kernel in the wheel, with whether it runs on a GPU (the current one by default).

    Works without a GPU or driver: ``usable`` is then None.
    """
    manifest = _manifest.shipped()
    on = None
    if device is not None or torch.cuda.is_available():
        with contextlib.suppress(KernelUnavailableError):
            on = _driver.device(_ordinal(device))
    rows = []
    for kernel in manifest.kernels:
        for cubin in manifest.cubins_of(kernel.module):
            usable = None if on is None else cubin.runs_on(on.capability, on.driver_cuda)
            registers = cubin.symbols[kernel.symbol]["registers"]
            rows.append(
                AvailableKernel(
                    kernel.op, kernel.name, kernel.dtype, cubin.arch, kernel.symbol, kernel.alignment, registers, usable
                )
            )
    return rows


def preload(device: int | str | torch.device | None = None) -> None:
    """Load every kernel that fits a GPU (the current one by default), so that no later call loads anything.

    Before capturing a CUDA graph, or to keep the first call fast. Initialises CUDA.

    Raises:
        ArgumentError: the device is not a CUDA device.
        NoMatchingKernelError: nothing in the wheel fits the GPU.
        CubinError, DriverError: the wheel or the driver is unusable.
    """
    manifest = _manifest.shipped()
    on = _driver.device(_ordinal(device))
    for op, dtype in dict.fromkeys((k.op, k.dtype) for k in manifest.kernels):
        facts = _selection.Facts(on.capability, on.driver_cuda, dtype, 16, 0, 0)
        _selection.select_or_raise(manifest, op, _selection.AUTO, facts)
    for kernel in manifest.kernels:
        cubin = manifest.closest(kernel.module, on.capability, on.driver_cuda)
        if cubin is not None:
            on.function(manifest, kernel, cubin)


def preload_if_initialized() -> None:
    """At import: load now on the GPUs that PyTorch already uses; one that nothing fits does not fail the import."""
    if not torch.cuda.is_initialized():  # is_available would initialise the driver, and break a later fork
        return
    with contextlib.suppress(KernelUnavailableError):
        for index in _driver.active_devices():
            with contextlib.suppress(KernelUnavailableError):
                preload(index)


def _ordinal(device: int | str | torch.device | None) -> int:
    if isinstance(device, int):
        return device
    resolved = torch.device("cuda" if device is None else device)
    if resolved.type != "cuda":
        raise ArgumentError(f"device: expected a CUDA device, got {resolved}. Pass 'cuda' or an index.")
    index: int | None = resolved.index
    if index is not None:
        return index
    return torch.cuda.current_device() if torch.cuda.is_available() else 0  # 0: the driver says what is missing
