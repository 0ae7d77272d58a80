"""`doctor --selftest`: every shipped kernel that fits a GPU, or the CPU's reference: its error and its speed.

Errors are those of the doctor's cases that run the kernel: the smallest inputs of each alignment that it is selected
for. The time is that of one larger input, so that it says something of the memory's bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from fused_logp_hub import _ops, _selection
from fused_logp_hub._api import LogpResult, fused_logp, fused_logp_backward_out, fused_logp_out
from fused_logp_hub._errors import NoMatchingKernelError
from fused_logp_hub._manifest import KernelRow, Manifest
from fused_logp_hub.cli import probes
from fused_logp_hub.cli.probes import Case
from fused_logp_hub.cli.timing import Call, median_times

_SAMPLES = 20
_ROWS, _VOCAB_SIZE = 4096, 8192  # what is timed on a GPU, where the kernel is for such rows
_UNCLAIMED = (640, 65536)  # aligned or not, no kernel is meant for these
_REFERENCE_SHAPE = (64, 1000)


@dataclass
class Check:
    """One kernel of one dtype on one device."""

    device: str
    op: str
    kernel: str
    dtype: str
    symbol: str | None
    """None for the reference."""
    arch: str | None
    error: float
    """The largest from float64: nats of logp, relative norm of a gradient, or rows marked wrongly."""
    bound: float
    right: bool
    """The error is within its bound; NaN is not."""
    microseconds: float
    gbytes_per_s: float
    """Of logits read and gradients written."""

    def __str__(self) -> str:
        return f"{self.op} by {self.kernel} in {self.dtype} on {self.device}"


@dataclass(frozen=True)
class _Subject:
    op: str
    name: str
    dtype: str
    cases: list[Case]
    """What runs it; already run."""
    device: torch.device
    rows: int
    vocab_size: int
    aligned: bool

    def logits(self) -> tuple[Tensor, Tensor]:
        """Logits and ids for the time."""
        shape, dtype = (self.rows, self.vocab_size + (not self.aligned)), getattr(torch, self.dtype)
        logits = torch.randn(shape, device=self.device).to(dtype)[:, -self.vocab_size :]
        return logits, torch.randint(self.vocab_size, (self.rows,), device=self.device)


@dataclass(frozen=True)
class _Measure:
    error: float
    bound: float
    call: Call
    size: int
    """Bytes that the call reads and writes."""


def check_gpu(manifest: Manifest, device: torch.device, capability: tuple[int, int], driver_cuda: int) -> list[Check]:
    """Each kernel that fits the GPU, asked for by its name; the GPU must be the current one."""
    checks = []
    select = cache(lambda requested: probes.select_cases(manifest, requested, capability, driver_cuda))
    for kernel in manifest.kernels:
        cubin = manifest.closest(kernel.module, capability, driver_cuda)
        if cubin is None:
            continue
        cases = cases_of(kernel, select)
        subject = _Subject(kernel.op, kernel.name, kernel.dtype, cases, device, *timed_shape(kernel))
        checks.append(_check(subject, kernel.symbol, cubin.arch))
    return checks


def check_reference() -> list[Check]:
    """The forward and backward of CPU tensors."""
    device = torch.device("cpu")
    return [
        _check(
            _Subject(op, _selection.REFERENCE, dtype, [probes.reference_case(dtype)], device, *_REFERENCE_SHAPE, True)
        )
        for dtype in probes.GRAD_BOUNDS
        for op in (probes.FORWARD, probes.BACKWARD)
    ]


def cases_of(kernel: KernelRow, select: Callable[[str], list[Case]]) -> list[Case]:
    """Of the doctor's cases, by the kernel asked for, those in which the GPU runs this one."""
    if kernel.op not in (probes.FORWARD, probes.BACKWARD):
        return []
    requested = kernel.name if kernel.op == probes.FORWARD else _selection.AUTO
    cases = [
        case
        for case in select(requested)
        if case.selected and kernel.symbol in (case.forward.symbol, case.backward.symbol)
    ]
    if not cases:
        raise NoMatchingKernelError(
            f"{kernel.symbol}: expected a call that runs it, got none; another kernel hides it. Report this as a bug."
        )
    return cases


def timed_shape(kernel: KernelRow) -> tuple[int, int, bool]:
    """Rows and vocabulary that the kernel is meant for, no smaller than need be; whether rows are aligned to 16 bytes.

    A forward's are so only where it needs them to be: other kernels of its name may take aligned ones before it.
    """
    item_bytes = 1 if kernel.dtype == "any" else int(getattr(torch, kernel.dtype).itemsize)
    aligned = kernel.op != probes.FORWARD or kernel.alignment == 16
    if kernel.meant_for is None:
        return *_UNCLAIMED, aligned
    meant_for = kernel.meant_for[0]
    vocab_size = max(_VOCAB_SIZE, -(-meant_for.min_row_bytes // 16) * 16 // item_bytes)
    if meant_for.max_row_bytes is not None:
        vocab_size = min(vocab_size, meant_for.max_row_bytes // item_bytes)
    return meant_for.max_rows or max(_ROWS, meant_for.min_rows), vocab_size, aligned


def _check(subject: _Subject, symbol: str | None = None, arch: str | None = None) -> Check:
    for case in subject.cases:
        probes.run_case(case, subject.device, str(case.forward.kernel))
    measure = _MEASURES[subject.op](subject)
    microseconds = median_times({subject.op: measure.call}, _SAMPLES, subject.device)[subject.op]
    return Check(
        str(subject.device), subject.op, subject.name, subject.dtype, symbol, arch, measure.error, measure.bound,
        measure.error <= measure.bound, microseconds, measure.size / microseconds / 1e3,
    )  # fmt: skip


def _forward(subject: _Subject) -> _Measure:
    logits, ids = subject.logits()
    out = logits.new_empty(subject.rows, dtype=torch.float32)
    error = _worst(case.logp_error for case in subject.cases)
    return _Measure(
        error, probes.LOGP_BOUND, lambda _: fused_logp_out(logits, ids, out=out, kernel=subject.name), logits.nbytes
    )


def _backward(subject: _Subject) -> _Measure:
    logits, ids = subject.logits()
    kernel = str(subject.cases[0].forward.kernel)  # that of the forward stands for its backward
    saved = fused_logp(logits, ids, kernel=kernel, return_lse=True)
    assert isinstance(saved, LogpResult)
    assert saved.row_max is not None
    assert saved.log_sum is not None
    row_max, log_sum = saved.row_max, saved.log_sum
    upstream, grad = torch.ones_like(saved.logp), torch.empty_like(logits)
    error = _worst(case.grad_error for case in subject.cases)
    return _Measure(
        error,
        probes.GRAD_BOUNDS[subject.dtype],
        lambda _: fused_logp_backward_out(upstream, logits, ids, row_max, log_sum, grad_logits=grad, kernel=kernel),
        2 * logits.nbytes,
    )


def _row_mask(subject: _Subject) -> _Measure:
    num_rows = subject.rows * subject.vocab_size
    listed = torch.arange(1, num_rows, 3, device=subject.device)
    mask = _ops.row_mask_from_indices(listed, num_rows)
    expected = torch.arange(num_rows, device=subject.device) % 3 == 1
    wrong = int((mask != expected).sum())
    return _Measure(wrong, 0, lambda _: _ops.row_mask_from_indices(listed, num_rows), listed.nbytes + mask.nbytes)


_MEASURES: dict[str, Callable[[_Subject], _Measure]] = {
    probes.FORWARD: _forward,
    probes.BACKWARD: _backward,
    "row_mask": _row_mask,
}


def _worst(errors: Iterable[float | None]) -> float:
    """The largest; NaN is larger than any, and so is what did not run."""
    return max((math.nan if e is None else e for e in errors), key=lambda e: (math.isnan(e), e))
