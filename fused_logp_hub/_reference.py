"""The `reference` kernel: the contract in plain PyTorch, for CPU tensors and for comparison.

Works on rows in chunks, so its extra memory is bounded. Same formulas, statistics and special cases as
the CUDA kernels; float32 arithmetic (float64 for float64 logits).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fused_logp_hub._problem import Problem, accumulation_dtype

CHUNK_ELEMENTS = 1 << 22
INF, NAN = float("inf"), float("nan")


def forward(
    problem: Problem,
    logp: Tensor,
    row_max: Tensor | None,
    log_sum: Tensor | None,
    entropy: Tensor | None,
    raw: bool,
) -> None:
    """Write logp [N, K] and, where given, the statistics [N] of every row."""
    for out in (logp, row_max, log_sum, entropy):
        if out is not None:
            out.zero_()
    no_target = 0.0
    if problem.spec.shard is not None:
        no_target = INF
        logp.fill_(no_target)
        if log_sum is not None:
            log_sum.fill_(-INF)
    ids, ignored, valid, elsewhere = _classify(problem)
    for rows, x, inv_t in _chunks(problem, _active(problem, ignored)):
        top = x.amax(-1, keepdim=True)
        d = (x - top.where(top != -INF, 0.0)) * inv_t  # only -inf: an empty sum, and not NaN
        e = d.exp()
        s = e.sum(-1, keepdim=True)
        log_s = s.log()
        target = x.gather(-1, ids[rows].where(valid[rows], 0))
        values = (target - top) * inv_t - log_s if problem.spec.shard is None else target.where(target != INF, NAN)
        values = values.where(valid[rows], NAN if problem.spec.invalid_is_nan else no_target)
        values = values.where(~ignored[rows], no_target).where(~elsewhere[rows], -INF)
        logp[rows] = values.to(logp.dtype)
        if row_max is not None:
            row_max[rows] = (top if raw else top * inv_t).squeeze(-1)
        if log_sum is not None:
            log_sum[rows] = log_s.squeeze(-1)
        if entropy is not None:
            # the bound turns 0 * -inf into 0 and leaves NaN rows NaN through e
            entropy[rows] = (log_s - (e * d.clamp(min=-1e30)).sum(-1, keepdim=True) / s).squeeze(-1)


def backward(
    problem: Problem,
    row_max: Tensor,
    log_sum: Tensor,
    entropy: Tensor | None,
    raw: bool,
    grad_logp: Tensor,
    grad_entropy: Tensor | None,
    grad_logits: Tensor,
) -> None:
    """Write grad_logits [N, V] from grad_logp [N, K] and grad_entropy [N]."""
    acc = accumulation_dtype(problem.logits.dtype)
    ids, ignored, valid, elsewhere = _classify(problem)
    used = grad_logp.to(acc).where(valid | elsewhere, 0.0)
    if problem.spec.invalid_is_nan:
        used = used.masked_fill(~valid & ~elsewhere & ~ignored, NAN)
    weight = used.sum(-1)
    entropy_weight = torch.zeros_like(weight) if grad_entropy is None else grad_entropy.to(acc)
    active = _active(problem, ignored)
    reads = active & ((weight != 0) | (entropy_weight != 0))
    scatters = active & (used != 0).any(-1)
    grad_logits[~(reads | scatters)] = 0
    for rows, x, inv_t in _chunks(problem, reads | scatters):
        top = row_max[rows, None]
        lp = ((x - top) * inv_t if raw else x * inv_t - top) - log_sum[rows, None]
        w = weight[rows, None]
        if entropy is not None and grad_entropy is not None:
            w = w + entropy_weight[rows, None] * (lp.clamp(min=-1e3) + entropy[rows, None])
        # rows with no weight are 0 but for their ids, whatever the logits hold
        grad = (-(lp.exp() * w)).where(reads[rows, None], 0.0)
        columns, upstream = ids[rows].where(valid[rows], 0), used[rows].where(valid[rows], 0.0)
        for k in range(columns.shape[1]):  # one id at a time: equal ids in one scatter add up in any order
            grad.scatter_add_(-1, columns[:, k : k + 1], upstream[:, k : k + 1])
        grad_logits[rows] = (grad * inv_t).to(grad_logits.dtype)


def _classify(problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ids as int64 [N, K] from the first column on, and which are ignored, valid, and valid on another shard."""
    ids = problem.token_ids.long()
    ignored = torch.zeros_like(ids, dtype=torch.bool)
    if problem.spec.ignore_index is not None:
        ignored = ids == problem.spec.ignore_index
    start, vocab_size = problem.spec.shard or (0, problem.spec.vocab_size)
    known = (ids >= 0) & (ids < vocab_size) & ~ignored
    ids = ids - start
    valid = known & (ids >= 0) & (ids < problem.spec.vocab_size)
    return ids, ignored, valid, known & ~valid


def _active(problem: Problem, ignored: Tensor) -> Tensor:
    active = ~ignored.all(-1)
    return active if problem.row_mask is None else active & problem.row_mask.bool()


def _chunks(problem: Problem, wanted: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Row numbers, their logits in the accumulation dtype, and 1 / T [rows, 1], a chunk at a time."""
    logits = problem.logits[:, : problem.spec.vocab_size]
    acc = accumulation_dtype(logits.dtype)
    for rows in wanted.nonzero()[:, 0].split(max(1, CHUNK_ELEMENTS // logits.shape[-1])):
        if problem.temperature_rows is None:
            inv_t = torch.full((rows.numel(), 1), 1.0 / problem.spec.temperature, dtype=acc, device=logits.device)
        else:
            inv_t = 1.0 / problem.temperature_rows[rows].to(acc)[:, None]
        yield rows, logits[rows].to(acc), inv_t
