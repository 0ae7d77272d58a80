"""Log-probabilities where each rank of a process group holds a part of the vocabulary's columns.

`vocab_parallel_logp` does it all on `torch.distributed`. Frameworks with collectives of their own put it
together from its parts: `shard_statistics`, a gather, `merge_statistics`, and `shard_backward`.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fused_logp_hub import _call, _checks, _placement, _selection, _shards
from fused_logp_hub._call import LogpResult
from fused_logp_hub._errors import ArgumentError, ArgumentTypeError

__all__ = [
    "MergedStatistics",
    "merge_statistics",
    "shard_backward",
    "shard_statistics",
    "vocab_parallel_logp",
]


class MergedStatistics(NamedTuple):
    """Result of `merge_statistics`, the same on every rank; constants to autograd.

    ``logp`` and ``entropy`` (nats; None if the shards came without) are what `fused_logp` gives. ``row_max``
    is the maximum of the logits and not of logits / T, so that nothing is rounded before `shard_backward`:
    logsumexp(logits / T) = row_max / T + log_sum.
    """

    logp: Tensor
    entropy: Tensor | None
    row_max: Tensor
    log_sum: Tensor


def vocab_parallel_logp(
    logits_shard: Tensor,
    token_ids: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    row_indices: Tensor | None = None,
    row_mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    ignore_index: int | None = -100,
    on_invalid: str = "zero",
    out_dtype: torch.dtype | None = None,
    kernel: str = "auto",
    return_lse: bool = False,
    return_entropy: bool = False,
    inplace_backward: bool = False,
) -> Tensor | LogpResult:
    """`fused_logp` of rows whose columns are spread over the ranks of a group, differentiable.

    A collective call: every rank of the group makes it, with the same rows, ids and options. Each reads its
    shard once; one all_gather brings every rank the statistics of all shards, which it merges in the order of
    the ranks. The gradient needs no communication: each rank gets that of its own shard.

    Args:
        logits_shard: [..., V_r], this rank's columns, as the logits of `fused_logp`; ranks may differ in V_r,
            which may be 0. Or a DTensor sharded on its last dimension over one dimension of its mesh: group,
            vocab_start and vocab_size then follow from it, and its gradient is a DTensor.
        token_ids: [...] or [..., K], numbered over the whole vocabulary, the same on every rank. Beside a
            DTensor it may be one too, with the same placements but replicated over the vocabulary's ranks;
            and so may row_mask and temperature.
        group: the ranks that hold a vocabulary together, in the order of their columns. None: all ranks.
        vocab_start: id of this rank's first column. None: rank * V_r, for shards of one width.
        vocab_size: size V of the whole vocabulary. Columns from V on are padding: they do not count, and their
            gradient is 0. None: the sum of the shards' widths, which must then be equal.
        row_indices, row_mask, temperature, ignore_index, on_invalid, out_dtype, kernel, return_lse,
            return_entropy: as in `fused_logp`, the same on every rank.
        inplace_backward: as in `fused_logp`; not for a DTensor.

    Returns:
        As `fused_logp`: plain tensors, with the same bits on every rank.

    Raises:
        ArgumentError: as `fused_logp`; also if there is no process group or this process is not in it, or if
            vocab_start and vocab_size contradict each other, the rank or a DTensor's layout. The other ranks
            may by then be waiting for this one.
        InvalidTokenIdError, NoMatchingKernelError, SecondDerivativeError: as `fused_logp`.

    Numerics:
        As `fused_logp`. The merge is in the dtype of the arithmetic. A row's bits depend also on how the
        columns are spread, and are the same every time.

    Memory:
        Forward O(N) for each rank of the group; backward one tensor like the shard. Communication: each rank
        sends, a row, 8 bytes and 4 for each id, and 4 more with the entropy: at most 16 for one id a row.
        Twice that for float64 logits.
    """
    if _placement.is_dtensor(logits_shard):
        if group is not None or vocab_start is not None or inplace_backward:
            raise ArgumentError(
                "logits_shard: expected no group, vocab_start or inplace_backward beside a DTensor, got one. "
                "Leave it out, or pass the local tensor."
            )
        layout = _placement.Layout(logits_shard, vocab_size)
        group, vocab_start, vocab_size = layout.group, layout.vocab_start, layout.vocab_size
        token_ids = layout.local("token_ids", token_ids)
        row_mask = layout.local("row_mask", row_mask)
        temperature = layout.local("temperature", temperature)
        logits_shard = logits_shard.to_local()
    rank, size = _placement.rank_and_size(group)
    width = _width(logits_shard)
    shard = _placement.complete(width, vocab_start, vocab_size, rank, size)
    kernel = _selection.resolve(kernel)
    problem = _call.make_problem(
        logits_shard, token_ids, row_indices, row_mask, temperature, ignore_index, on_invalid, shard
    )

    def gather(packed: Tensor) -> Tensor:
        gathered = packed.new_empty((size * packed.shape[0], *packed.shape[1:]))
        if packed.numel():
            # its name before torch 2.13 is deprecated there
            collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            collective(gathered, packed, group=group)
        return gathered.view(size, *packed.shape)

    run = partial(_shards.run_forward, gather)
    results = _call.compute(problem, kernel, out_dtype, return_lse, return_entropy, inplace_backward, run)
    return _call.result(results, temperature, return_lse, return_entropy)


def shard_statistics(
    logits_shard: Tensor,
    token_ids: Tensor,
    *,
    vocab_start: int,
    vocab_size: int,
    row_indices: Tensor | None = None,
    row_mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    ignore_index: int | None = -100,
    on_invalid: str = "zero",
    kernel: str = "auto",
    return_entropy: bool = False,
) -> Tensor:
    """What one shard of the vocabulary knows of each row, for `merge_statistics`; forward-only.

    Args:
        logits_shard, token_ids, vocab_start, vocab_size: as in `vocab_parallel_logp`, the last two required.
        row_indices, row_mask, temperature, ignore_index, on_invalid, kernel: as in `fused_logp`.
        return_entropy: whether the merge is to give the entropy.

    Returns:
        [F, ...], contiguous, float32 (float64 for float64 logits), F = 2 + K, or 3 + K with the entropy: the
        maximum of the shard's logits; log_sum, the logarithm of the sum of exp((x - maximum) / T); for each of
        the K ids a row its logit, -inf if another shard has it, +inf if it is ignored or otherwise without a
        target, and NaN where logp will be NaN; the entropy of the shard's own softmax in nats. A row that is
        left out has maximum 0 and log_sum -inf.

    Raises:
        ArgumentError: a shape, dtype, device or value is unsupported, or the logits require grad while
            gradients are enabled.
    """
    _width(logits_shard)
    kernel = _selection.resolve(kernel)
    shard = _placement.shard_at(vocab_start, vocab_size)
    problem = _call.make_problem(
        logits_shard, token_ids, row_indices, row_mask, temperature, ignore_index, on_invalid, shard
    )
    _checks.no_autograd("logits_shard", logits_shard)
    return _shards.statistics(problem, kernel, return_entropy)


def merge_statistics(
    gathered: Tensor,
    *,
    num_ids: int | None = None,
    temperature: float | Tensor = 1.0,
    out_dtype: torch.dtype | None = None,
) -> MergedStatistics:
    """The rows' results from the statistics of all shards.

    ``row_max = max_r m_r``, ``log_sum = log sum_r exp((m_r - row_max) / T + l_r)``, and with q_r each shard's share
    of the sum ``entropy = sum_r q_r (h_r - log q_r)``.

    Args:
        gathered: [R, F, ...], the `shard_statistics` of the R shards; in the same order on every rank, so that
            all get the same bits.
        num_ids: K if token_ids was [..., K], None if it was [...].
        temperature: as it was for the shards.
        out_dtype: dtype of logp, as in `fused_logp`.

    Returns:
        MergedStatistics.

    Raises:
        ArgumentError: a shape, dtype, device or value is unsupported.
    """
    _checks.tensor("gathered", gathered)
    ids = 1 if num_ids is None else num_ids
    if gathered.dim() < 2 or gathered.shape[0] == 0 or gathered.shape[1] not in (2 + ids, 3 + ids):
        raise ArgumentError(
            f"gathered: expected shape [R, F, ...] with R >= 1 and F = {2 + ids} or {3 + ids} for num_ids={num_ids}, "
            f"got {list(gathered.shape)}. Stack what shard_statistics gave on each rank."
        )
    if gathered.dtype not in (torch.float32, torch.float64):
        raise ArgumentError(f"gathered: expected dtype float32 or float64, got {gathered.dtype}. Gather it uncast.")
    rows = gathered[0, 0]
    inv_t = _shards.inverse_temperature(*_checks.split_temperature(temperature, rows[..., None]), gathered.dtype)
    ids_shape = rows.shape if num_ids is None else (*rows.shape, num_ids)
    logp, (row_max, log_sum), entropy = _shards.merge(
        gathered, ids_shape, inv_t, _checks.out_dtype(out_dtype, gathered)
    )
    return MergedStatistics(logp, entropy, row_max, log_sum)


def shard_backward(
    grad_logp: Tensor,
    logits_shard: Tensor,
    token_ids: Tensor,
    row_max: Tensor,
    log_sum: Tensor,
    *,
    vocab_start: int,
    vocab_size: int,
    grad_logits: Tensor | None = None,
    entropy: Tensor | None = None,
    grad_entropy: Tensor | None = None,
    row_indices: Tensor | None = None,
    row_mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    ignore_index: int | None = -100,
    on_invalid: str = "zero",
    kernel: str = "auto",
) -> Tensor:
    """The gradient at one shard's logits, from what `merge_statistics` gave; no communication.

    Args:
        grad_logp, entropy, grad_entropy, kernel: as in `fused_logp_backward`; entropy is the merged one.
        logits_shard, token_ids, vocab_start, vocab_size, and the other options: as in `shard_statistics`.
        row_max, log_sum: [...], of the merge: row_max of the logits, undivided.
        grad_logits: where to write, as in `fused_logp_backward_out`; None: new memory.

    Returns:
        grad_logits, shape and dtype of logits_shard; exactly 0 in columns from vocab_size on.

    Raises:
        ArgumentError: a shape, dtype, device or value is unsupported; nothing was launched.
    """
    _width(logits_shard)
    kernel = _selection.backward_kernel(_selection.resolve(kernel))
    shard = _placement.shard_at(vocab_start, vocab_size)
    problem = _call.make_problem(
        logits_shard, token_ids, row_indices, row_mask, temperature, ignore_index, on_invalid, shard
    )
    return _call.backward(problem, kernel, row_max, log_sum, entropy, True, grad_logp, grad_entropy, grad_logits)


def _width(logits_shard: Tensor) -> int:
    """Columns of a plain tensor."""
    _checks.tensor("logits_shard", logits_shard)
    if type(logits_shard) not in _call.PLAIN or torch.compiler.is_compiling():
        raise ArgumentTypeError(
            f"logits_shard: expected a plain tensor outside torch.compile, got {type(logits_shard).__name__}. Pass its "
            "local tensor, and disable torch.compile around the call."
        )
    if logits_shard.dim() == 0:
        raise ArgumentError("logits_shard: expected shape [..., V_r], got []. Pass this rank's columns.")
    return logits_shard.shape[-1]
