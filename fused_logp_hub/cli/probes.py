"""What `doctor` tries: dtype x alignment x number of rows, selected for a GPU, then run there."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, takewhile

import torch
from torch import Tensor

from fused_logp_hub import _selection, fused_logp
from fused_logp_hub._manifest import Manifest
from fused_logp_hub.cli.exactness import IGNORE, compare

FORWARD, BACKWARD = "logp_forward", "logp_backward"
_VOCAB_SIZE = 1000  # a multiple of 16 bytes in every dtype, so the padding alone decides alignment
LOGP_BOUND = 1e-5
# The contract's relative norm errors; it names none for float64, which is held to float32's.
GRAD_BOUNDS = {"bfloat16": 2e-3, "float16": 3e-4, "float32": 2e-6, "float64": 2e-6}


@dataclass
class Choice:
    """What one op would run; all but ``why`` None if nothing fits."""

    kernel: str | None
    module: str | None
    symbol: str | None
    arch: str | None
    why: str
    """What stands before it in order and does not fit; or, if nothing does, why not."""

    def __str__(self) -> str:
        return "none" if self.kernel is None else f"{self.kernel} ({self.module})"


@dataclass
class Case:
    """One kind of call on one GPU."""

    dtype: str
    alignment: int
    """Bytes; below 16 where the row stride is odd."""
    rows: int
    rows_label: str
    forward: Choice
    backward: Choice
    logp_error: float | None = None
    """Largest |difference| from float64; None if it did not run."""
    grad_error: float | None = None

    def __str__(self) -> str:
        return f"{self.dtype}, {self.alignment}-byte rows, rows {self.rows_label}"

    @property
    def selected(self) -> bool:
        return self.forward.kernel is not None and self.backward.kernel is not None

    @property
    def ran(self) -> bool:
        return self.logp_error is not None

    @property
    def within_bounds(self) -> bool:
        """It ran, and kept the contract; NaN does not."""
        if self.logp_error is None or self.grad_error is None:
            return False
        return self.logp_error <= LOGP_BOUND and self.grad_error <= GRAD_BOUNDS[self.dtype]


def select_cases(manifest: Manifest, requested: str, capability: tuple[int, int], driver_cuda: int) -> list[Case]:
    """Every case with what a call would run and why; touches no GPU."""
    thresholds = manifest.row_thresholds(FORWARD)
    row_classes = [(limit, f"<= {limit}") for limit in thresholds]
    row_classes.append((thresholds[-1] + 1, f"> {thresholds[-1]}") if thresholds else (1, "any"))
    cases = []
    for dtype in GRAD_BOUNDS:
        for alignment in (16, getattr(torch, dtype).itemsize):
            for rows, label in row_classes:
                facts = _selection.Facts(capability, driver_cuda, dtype, alignment, rows)
                forward = _choice(_selection.select(manifest, FORWARD, requested, facts))
                # The backward has one fused kernel: a forward kernel's name asks for nothing there.
                backward = _choice(_selection.select(manifest, BACKWARD, _selection.AUTO, facts))
                cases.append(Case(dtype, alignment, rows, label, forward, backward))
    return cases


def run_case(case: Case, device: torch.device, kernel: str = _selection.AUTO) -> None:
    """Forward and backward of two rows in three, compared with float64 on that device."""
    generator = torch.Generator().manual_seed(0)
    padding = 0 if case.alignment == 16 else 1  # an odd stride, and an odd start
    buffer = torch.randn(case.rows, _VOCAB_SIZE + padding, generator=generator)
    logits = buffer.to(device, getattr(torch, case.dtype))[:, padding:].requires_grad_()
    token_ids = torch.randint(_VOCAB_SIZE, (case.rows,), generator=generator).to(device)
    listed = torch.arange(case.rows, device=device) % 3 != 1
    logp = fused_logp(logits, token_ids, row_indices=listed.nonzero()[:, 0], kernel=kernel)
    assert isinstance(logp, Tensor)  # no return_* flag
    logp.retain_grad()
    (logp * torch.randn(case.rows, generator=generator).to(device)).sum().backward()
    case.logp_error, case.grad_error = compare(logits, token_ids.where(listed, IGNORE), logp)


def reference_case(dtype: str) -> Case:
    """What CPU tensors run."""
    plain = Choice(_selection.REFERENCE, None, None, None, "CPU tensors always run it")
    return Case(dtype, getattr(torch, dtype).itemsize, 2, "2", plain, plain)


def run_reference() -> bool:
    """Whether the CPU's forward and backward keep the contract."""
    case = reference_case("float32")
    run_case(case, torch.device("cpu"), _selection.REFERENCE)
    return case.within_bounds


def _choice(selection: _selection.Selection) -> Choice:
    capability, chosen = selection.facts.capability, selection.chosen
    before = takewhile(lambda v: chosen is None or v.kernel != chosen.kernel, selection.verdicts)
    reasons = []
    # A kernel stands in several cubins; the one for this GPU has the reason that matters.
    for kernel, group in groupby(before, key=lambda v: v.kernel):
        is_auto = selection.requested == _selection.AUTO
        if not kernel.auto if is_auto else kernel.name != selection.requested:
            continue  # was not asked for, which explains nothing
        verdicts = list(group)
        fitting = [v.reason for v in verdicts if v.cubin.mismatch(capability) is None and v.reason]
        built_for = "is built for " + ", ".join(v.cubin.arch for v in verdicts)
        reasons.append(f"{kernel.name} ({kernel.module}) {fitting[0] if fitting else built_for}")
    if chosen is None:
        return Choice(None, None, None, None, "; ".join(reasons) or "no kernel of this dtype is shipped")
    kernel, cubin = chosen.kernel, chosen.cubin
    return Choice(
        kernel.name,
        kernel.module,
        kernel.symbol,
        cubin.arch,
        "; ".join(reasons) or "first in order",
    )
