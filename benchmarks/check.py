"""Compares a provider's result with float64 before it is timed; a wrong one is never timed.

Errors, as reported:
    forward   the largest |logp - reference|, in nats
    backward  the relative norm of the difference, the larger of two: over the target entries, and
              over all others. The targets dominate the norm of the whole, so a gradient without its
              softmax part would pass.
Rows that are left out must be exactly 0 in both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.case import Case

CHUNK_ELEMENTS = 1 << 26

# Largest error of a correct result. Forward: absolute and relative to |logp|, for float32 results
# and for those in the logits' dtype. Backward: of a gradient rounded once to the logits' dtype, and
# of one computed from a logp that was itself rounded to it.
FORWARD = (1e-4, 1e-5)
FORWARD_ROUNDED = {"bfloat16": (1e-3, 2**-8), "float16": (1e-3, 2**-11), "float32": FORWARD}
BACKWARD = {"bfloat16": 5e-3, "float16": 1e-3, "float32": 2e-5}
BACKWARD_ROUNDED = {"bfloat16": 5e-2, "float16": 5e-3, "float32": 2e-5}


@dataclass(frozen=True)
class Verdict:
    """Outcome of a comparison; ``reason`` is None if the result may be timed."""

    error: float
    reason: str | None = None

    @property
    def status(self) -> str:
        return "ok" if self.reason is None else f"wrong: {self.reason}"


class Reference:
    """logp and gradient of buffer 0 in float64, a chunk of rows at a time."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.vocab = case.shape.vocab
        self.logits = case.logits[0]
        self.ids = case.token_ids.reshape(-1)
        self.keep = torch.ones_like(self.ids, dtype=torch.bool) if case.row_mask is None else case.row_mask.reshape(-1)
        self.lse = torch.cat([x.logsumexp(-1) for _, x in self._chunks()])
        target = torch.cat([x.gather(-1, self.ids[rows, None])[:, 0] for rows, x in self._chunks()])
        self.logp = (target - self.lse).where(self.keep, 0.0)

    def check_forward(self, logp: Tensor, rounded: bool = False) -> Verdict:
        """Judge logp, any float dtype, of the ids' shape."""
        if logp.numel() != self.logp.numel():
            return Verdict(math.nan, f"{list(logp.shape)} values for {list(self.case.token_ids.shape)}")
        got = logp.detach().reshape(-1).double()
        if not bool(torch.isfinite(got).all()):
            return Verdict(math.nan, "NaN" if bool(got.isnan().any()) else "infinite")
        if bool((got[~self.keep] != 0).any()):
            return Verdict(math.nan, "rows left out are not 0")
        error = (got - self.logp).abs()
        absolute, relative = FORWARD_ROUNDED[self.case.shape.dtype] if rounded else FORWARD
        worst = float(error.max())
        if bool((error > absolute + relative * self.logp.abs()).any()):
            return Verdict(worst, f"error {worst:.0e}")
        return Verdict(worst)

    def check_backward(self, grad: Tensor, rounded: bool = False) -> Verdict:
        """Judge the gradient at the logits of ``(grad_logp * logp).sum()``."""
        if grad.shape != self.logits.shape:
            return Verdict(math.nan, f"shape {list(grad.shape)} for {list(self.logits.shape)}")
        g = self.case.grad_logp.reshape(-1).double().where(self.keep, 0.0)
        sums = torch.zeros(4, dtype=torch.float64, device=grad.device)
        left_out_is_zero = torch.ones((), dtype=torch.bool, device=grad.device)
        for rows, x in self._chunks():
            got = _rows(grad, rows).double()
            left_out_is_zero &= (got[~self.keep[rows]] == 0).all()
            index = self.ids[rows, None]
            wanted = (x - self.lse[rows, None]).exp_().mul_(-g[rows, None])
            wanted.scatter_add_(-1, index, g[rows, None])
            got -= wanted
            for k, tensor in enumerate((got, wanted)):
                at_target = tensor.gather(-1, index).square().sum()
                sums[k] += at_target
                sums[2 + k] += tensor.scatter_(-1, index, 0.0).square_().sum()
        if not bool(torch.isfinite(sums).all()):
            return Verdict(math.nan, "NaN")
        error = math.sqrt(max(_ratio(sums[0], sums[1]), _ratio(sums[2], sums[3])))
        if not bool(left_out_is_zero):
            return Verdict(error, "rows left out are not 0")
        limits = BACKWARD_ROUNDED if rounded else BACKWARD
        if error > limits[self.case.shape.dtype]:
            return Verdict(error, f"error {error:.0e}")
        return Verdict(error)

    def _chunks(self):
        step = max(1, CHUNK_ELEMENTS // self.vocab)
        for start in range(0, self.ids.numel(), step):
            rows = slice(start, min(start + step, self.ids.numel()))
            yield rows, _rows(self.logits, rows).double()


def _rows(tensor: Tensor, rows: slice) -> Tensor:
    """Flat rows of [N, V] or [B, T, V] without copying the whole."""
    if tensor.dim() == 2:
        return tensor[rows]
    index = torch.arange(rows.start, rows.stop, device=tensor.device)
    per_sequence = tensor.shape[1]
    return tensor[index // per_sequence, index % per_sequence]


def _ratio(error: Tensor, reference: Tensor) -> float:
    e, r = float(error), float(reference)
    if r == 0.0:
        return 0.0 if e == 0.0 else math.inf
    return e / r
