"""What `doctor` tries: every kernel that a GPU would select, by dtype, alignment and size of the logits, run there."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, pairwise, takewhile

import torch
from torch import Tensor

from fused_logp_hub import _selection, fused_logp
from fused_logp_hub._manifest import Manifest
from fused_logp_hub.cli.exactness import IGNORE, compare

FORWARD, BACKWARD = "logp_forward", "logp_backward"
_VOCAB_SIZE = 1000  # a multiple of 16 bytes in every dtype, so the padding alone decides alignment
_ROWS = 32
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
    vocab_size: int
    row_bytes_label: str
    forward: Choice
    backward: Choice
    logp_error: float | None = None
    """Largest |difference| from float64; None if it did not run."""
    grad_error: float | None = None

    def __str__(self) -> str:
        return f"{self.dtype}, {self.alignment}-byte rows, {self.rows} x {self.vocab_size}"

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
    """The smallest case of each dtype and alignment for every kernel that a call would run there; touches no GPU."""
    row_limits, size_limits = manifest.thresholds(FORWARD)
    cases: list[Case] = []
    for dtype in GRAD_BOUNDS:
        item_bytes = getattr(torch, dtype).itemsize
        sizes = [(_VOCAB_SIZE, "any"), *((-(-(n + 1) // 16) * 16 // item_bytes, f">= {n + 1}") for n in size_limits)]
        for alignment in (16, item_bytes):
            found: dict[tuple[str | None, str | None], Case] = {}
            for vocab_size, size_label in sizes:
                for rows, rows_label in _row_classes(row_limits):
                    facts = _selection.Facts(capability, driver_cuda, dtype, alignment, rows, vocab_size * item_bytes)
                    forward = _choice(_selection.select(manifest, FORWARD, requested, facts))
                    # The backward has one fused kernel: a forward kernel's name asks for nothing there.
                    backward = _choice(_selection.select(manifest, BACKWARD, _selection.AUTO, facts))
                    case = Case(dtype, alignment, rows, rows_label, vocab_size, size_label, forward, backward)
                    found.setdefault((forward.symbol, backward.symbol), case)
            cases += found.values()
    return cases


def _row_classes(limits: list[int]) -> list[tuple[int, str]]:
    """Few rows between each two limits; and the limits."""
    if not limits:
        return [(_ROWS, "any")]
    first = (min(_ROWS, limits[0]), f"<= {limits[0]}")
    middle = [(low + 1, f"{low + 1} to {high}") for low, high in pairwise(limits)]
    return [first, *middle, (max(_ROWS, limits[-1] + 1), f"> {limits[-1]}")]


def run_case(case: Case, device: torch.device, kernel: str = _selection.AUTO) -> None:
    """Forward and backward, compared with float64: so often that a norm over all rows means something.

    Once with rows left out, once with all, as most calls are: some kernels have machine code of their own for these.
    """
    generator, times = torch.Generator().manual_seed(0), range(-(-_ROWS // case.rows))
    runs = [[_run_once(case, device, kernel, generator, every) for _ in times] for every in (False, True)]
    logp_errors, grad_errors = torch.tensor(runs, dtype=torch.float64).unbind(-1)
    case.logp_error = float(logp_errors.amax())
    case.grad_error = float(grad_errors.square().mean(-1).sqrt().amax())


def _run_once(
    case: Case, device: torch.device, kernel: str, generator: torch.Generator, every: bool
) -> tuple[float, float]:
    """The errors of every row, or of seven rows in eight."""
    padding = 0 if case.alignment == 16 else 1  # an odd stride, and an odd start
    buffer = torch.randn(case.rows, case.vocab_size + padding, generator=generator)
    logits = buffer.to(device, getattr(torch, case.dtype))[:, padding:].requires_grad_()
    token_ids = torch.randint(case.vocab_size, (case.rows,), generator=generator).to(device)
    listed = (torch.arange(case.rows, device=device) % 8 != 1) | every
    indices = None if every else listed.nonzero()[:, 0]
    logp = fused_logp(logits, token_ids, row_indices=indices, kernel=kernel)
    assert isinstance(logp, Tensor)  # no return_* flag
    logp.retain_grad()
    (logp * (torch.rand(case.rows, generator=generator) - 2).to(device)).sum().backward()
    return compare(logits, token_ids.where(listed, IGNORE), logp)


def reference_case(dtype: str) -> Case:
    """What CPU tensors run."""
    plain = Choice(_selection.REFERENCE, None, None, None, "CPU tensors always run it")
    return Case(dtype, getattr(torch, dtype).itemsize, _ROWS, "any", _VOCAB_SIZE, "any", plain, plain)


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
        if kernel.auto == () if is_auto else kernel.name != selection.requested:
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
