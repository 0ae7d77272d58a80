"""A row's softmax in parts: what one shard of the vocabulary knows of it, and the merge of all shards.

A shard's statistics are those of the whole row with -inf in all other columns. They are packed as one tensor
[F, ...] in the dtype of the arithmetic, F = 2 + K, or 3 + K with the entropy:

    row_max   of the logits themselves, not of logits / T
    log_sum   log of the sum of exp((x - row_max) / T); -inf for a sum of nothing
    K times   the target's logit: -inf if the id is another shard's, +inf if there is no target (the id is
              ignored, or invalid under "zero"), NaN for NaN, +inf, and an invalid id under "nan"
    entropy   of the shard's own softmax

A row that is left out has row_max 0, log_sum -inf and no target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor

from fused_logp_hub import _ops
from fused_logp_hub._problem import Problem

INF = float("inf")


def statistics(problem: Problem, kernel: str, want_entropy: bool) -> Tensor:
    """The packed statistics of the problem's shard, in one pass over it."""
    spec, num_ids = problem.spec, problem.spec.num_ids
    shape = (2 + num_ids + want_entropy, *spec.leading)
    packed = torch.empty(shape, dtype=spec.dtype, device=problem.logits.device)
    if spec.vocab_size == 0:
        return packed.fill_(-INF)
    targets = packed[2 : 2 + num_ids]
    # the kernels write the ids of a row side by side
    target = targets[0] if num_ids == 1 else targets.new_empty((*shape[1:], num_ids))
    _ops.forward(problem, kernel, target, packed[0], packed[1], packed[-1] if want_entropy else None, True)
    if num_ids > 1:
        targets.copy_(target.movedim(-1, 0))
    return packed


def merge(
    gathered: Tensor, ids_shape: Sequence[int], inv_t: float | Tensor, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As `_ops.run_forward`, from the packed statistics of all shards [R, F, ...].

    Sums run over the shards in their order, one after the other: an element's bits depend on nothing else.
    """
    leading = gathered.shape[2:]
    num_ids = ids_shape[-1] if len(ids_shape) > len(leading) else 1
    tops, log_sums, targets = gathered[:, 0], gathered[:, 1], gathered[:, 2 : 2 + num_ids]
    top = tops.amax(0)
    left_out = (top == 0) & (log_sums.amax(0) == -INF)
    shares = (tops - top) * inv_t + log_sums  # the logarithm of each shard's share of the sum
    log_sum = _ordered_sum(shares.exp()).log()
    target = targets.amax(0)
    logp = ((target - top) * inv_t - log_sum).masked_fill(target == INF, 0.0)
    logp = logp.movedim(0, -1).to(out_dtype).reshape(ids_shape)
    entropy = None
    if gathered.shape[1] > 2 + num_ids:
        shares = shares - log_sum
        weights = shares.exp()
        # the entropy of which shard, and that within each; one without weight has none, whatever it says
        parts = (weights * (gathered[:, -1] - shares)).masked_fill(weights == 0, 0.0)
        entropy = _ordered_sum(parts).masked_fill(left_out, 0.0)
    return logp, torch.stack((top, log_sum.masked_fill(left_out, 0.0))), entropy


def run_forward(
    gather: Callable[[Tensor], Tensor],
    problem: Problem,
    kernel: str,
    out_dtype: torch.dtype,
    want_statistics: bool,
    want_entropy: bool,
) -> _ops.Results:
    """`_ops.run_forward` for a shard: ``gather`` brings the packed statistics of all of them, [R, F, ...]."""
    gathered = gather(statistics(problem, kernel, want_entropy))
    inv_t = inverse_temperature(problem.spec.temperature, problem.temperature_rows, gathered.dtype)
    return merge(gathered, problem.token_ids.shape, inv_t, out_dtype)


def inverse_temperature(temperature: float, rows: Tensor | None, dtype: torch.dtype) -> float | Tensor:
    """1 / T, one number or one a row, rounded as the kernels round it."""
    return 1.0 / temperature if rows is None else rows.to(dtype).reciprocal()


def _ordered_sum(parts: Tensor) -> Tensor:
    return reduce(torch.add, parts.unbind(0))
