"""Which kernel runs: every row of the manifest is accepted, or rejected with a reason.

A pure function of facts, so it is tested for every capability without hardware. It knows no op by name.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from fused_logp_hub._errors import ArgumentError, NoMatchingKernelError
from fused_logp_hub._manifest import Cubin, KernelRow, Manifest, Range

ENVIRONMENT_VARIABLE = "FUSED_LOGP_HUB_KERNEL"
AUTO = "auto"
REFERENCE = "reference"
KERNEL_NAMES = (AUTO, "two_pass", "online", "tma", REFERENCE)


@dataclass(frozen=True)
class Facts:
    """All that selection depends on."""

    capability: tuple[int, int]
    driver_cuda: int
    """cuDriverGetVersion, such as 13000."""
    dtype: str
    alignment: int
    """Largest power of two, at most 16, that divides every row's address in bytes."""
    rows: int
    row_bytes: int


@dataclass(frozen=True)
class Verdict:
    """One row of the manifest and one cubin that holds it, judged."""

    kernel: KernelRow
    cubin: Cubin
    reason: str | None
    """Why it was rejected; None for an accepted kernel."""

    def __str__(self) -> str:
        mark = "rejected: " + self.reason if self.reason else "accepted"
        return f"{self.kernel.name} ({self.kernel.symbol}, {self.cubin.arch}): {mark}"


@dataclass(frozen=True)
class Selection:
    """The outcome: the first accepted verdict, and the trace that led to it."""

    op: str
    requested: str
    facts: Facts
    verdicts: tuple[Verdict, ...]

    @property
    def chosen(self) -> Verdict | None:
        return next((v for v in self.verdicts if v.reason is None), None)

    def trace(self) -> str:
        """One line for each kernel considered, with the reason it was not taken."""
        f = self.facts
        head = (
            f"{self.op}, kernel={self.requested!r}: capability {f.capability[0]}.{f.capability[1]}, "
            f"driver CUDA {f.driver_cuda // 1000}.{f.driver_cuda % 1000 // 10}, {f.dtype}, "
            f"{f.rows} rows of {f.row_bytes} bytes aligned to {f.alignment}"
        )
        return "\n".join([head, *(f"  {v}" for v in self.verdicts)])


def forced_by_environment() -> str | None:
    """The value of FUSED_LOGP_HUB_KERNEL, if set and not empty."""
    return os.environ.get(ENVIRONMENT_VARIABLE) or None


_forced = forced_by_environment()


def resolve(kernel: str) -> str:
    """The kernel to use: the argument, else the environment's at import, with the name checked."""
    source = "kernel"
    if kernel == AUTO and _forced is not None:
        kernel, source = _forced, ENVIRONMENT_VARIABLE
    if kernel not in KERNEL_NAMES:
        raise ArgumentError(f"{source}: expected one of {', '.join(KERNEL_NAMES)}, got {kernel!r}. Correct the name.")
    return kernel


def backward_kernel(kernel: str) -> str:
    """What a forward's kernel means for its backward: one fused backward serves all fused forwards."""
    return REFERENCE if kernel == REFERENCE else AUTO


def select(manifest: Manifest, op: str, requested: str, facts: Facts) -> Selection:
    """Judge every kernel of the op; the accepted ones keep the manifest's order."""
    verdicts = [
        Verdict(kernel, cubin, _reason(kernel, cubin, requested, facts))
        for kernel in manifest.kernels
        if kernel.op == op and kernel.dtype in (facts.dtype, "any")
        for cubin in manifest.cubins_of(kernel.module)
    ]
    return Selection(op, requested, facts, tuple(verdicts))


def select_or_raise(manifest: Manifest, op: str, requested: str, facts: Facts) -> Verdict:
    """The chosen kernel; NoMatchingKernelError with the whole trace if there is none."""
    selection = select(manifest, op, requested, facts)
    if selection.chosen is None:
        raise NoMatchingKernelError(
            f"kernel: expected one that fits this device and these tensors, got none; the installed wheel "
            f"ships {manifest.architectures()}. Use a wheel with your architecture, or kernel='reference'.\n"
            + selection.trace()
        )
    return selection.chosen


def _reason(kernel: KernelRow, cubin: Cubin, requested: str, facts: Facts) -> str | None:
    if requested == AUTO and kernel.auto is not None:
        if not kernel.auto:
            return "runs only when asked for by name"
        if not _any_holds(kernel.auto, facts):
            return f"is taken by itself for {_words(kernel.auto)}"
    if requested not in (AUTO, kernel.name):
        return f"{requested!r} was asked for"
    mismatch = cubin.mismatch(facts.capability)
    if mismatch:
        return mismatch
    if facts.driver_cuda < cubin.min_cuda:
        return (
            f"needs a driver for CUDA {cubin.min_cuda // 1000}.{cubin.min_cuda % 1000 // 10} "
            f"({cubin.min_driver} or newer)"
        )
    if facts.alignment % kernel.alignment:
        return f"needs rows aligned to {kernel.alignment} bytes"
    if kernel.meant_for is not None and not _any_holds(kernel.meant_for, facts):
        return f"is for {_words(kernel.meant_for)}"
    return None


def _any_holds(ranges: tuple[Range, ...], facts: Facts) -> bool:
    return any(r.holds(facts.rows, facts.row_bytes) for r in ranges)


def _words(ranges: tuple[Range, ...]) -> str:
    return " or ".join(map(str, ranges))
