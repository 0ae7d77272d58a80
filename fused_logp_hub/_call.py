"""What the public functions have in common: from checked arguments to results, and to gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import unwrap_if_dead
from torch.autograd.graph import increment_version

from fused_logp_hub import _checks, _library, _memory, _ops, _outputs
from fused_logp_hub._errors import ArgumentError
from fused_logp_hub._problem import Problem, Shard

PLAIN = (Tensor, torch.nn.Parameter)


class LogpResult(NamedTuple):
    """Result of `fused_logp` with a ``return_*`` flag; fields not asked for are None.

    ``logp`` has the ids' shape, the others the logits' leading shape. ``logp`` and ``entropy`` (nats) are
    differentiable; ``row_max`` and ``log_sum`` are constants to autograd, with
    logsumexp(logits / T) = row_max + log_sum.
    """

    logp: Tensor
    entropy: Tensor | None
    row_max: Tensor | None
    log_sum: Tensor | None


def is_plain(logits: Tensor) -> bool:
    """Whether a call may go around the dispatcher: nothing traces, wraps or intercepts tensors."""
    return (
        type(logits) in PLAIN and not torch.compiler.is_dynamo_compiling() and not torch._C._len_torch_dispatch_stack()
    )


def merge_mask(row_indices: Tensor, row_mask: Tensor | None, logits: Tensor) -> Tensor:
    """row_indices as a mask over the logits' leading shape, and row_mask where given."""
    _checks.dense("logits", logits)
    _checks.row_indices(row_indices, logits)
    if row_mask is not None:
        _checks.shaped_tensor("row_mask", row_mask, logits.shape[:-1], logits, (torch.bool,))
    leading = logits.shape[:-1]
    make = _ops.row_mask_from_indices if is_plain(logits) else _library.row_mask_from_indices
    mask = make(row_indices, leading.numel()).view(leading)
    return mask if row_mask is None else mask & row_mask


def make_problem(
    logits: Tensor,
    token_ids: Tensor,
    row_indices: Tensor | None,
    row_mask: Tensor | None,
    temperature: float | Tensor,
    ignore_index: int | None,
    on_invalid: str,
    shard: Shard | None = None,
) -> Problem:
    """The checked problem of the rows that both row_indices and row_mask admit."""
    if row_indices is not None:
        row_mask = merge_mask(row_indices, row_mask, logits)
    return _checks.make_problem(logits, token_ids, row_mask, temperature, ignore_index, on_invalid, shard)


def compute(
    problem: Problem,
    kernel: str,
    out_dtype: torch.dtype | None,
    return_lse: bool,
    return_entropy: bool,
    inplace_backward: bool,
    run: _ops.Run = _ops.run_forward,
) -> _ops.Results:
    """The results of ``run``; where the logits require grad, of a node in autograd's graph."""
    logits = problem.logits
    out_dtype = problem.spec.dtype if out_dtype is None else _checks.out_dtype(out_dtype, logits)
    if not (logits.requires_grad and torch.is_grad_enabled()):
        return run(problem, kernel, out_dtype, return_lse, return_entropy)
    if inplace_backward:
        _outputs.overwritable(logits)
    more = return_lse or return_entropy
    results = _ops.apply(
        unwrap_if_dead(logits), (problem, kernel, out_dtype, more, return_entropy, inplace_backward, run)
    )
    return results if more else (results, None, None)


def result(
    results: _ops.Results, temperature: float | Tensor, return_lse: bool, return_entropy: bool
) -> Tensor | LogpResult:
    """What the caller asked for."""
    logp, statistics, entropy = results
    if not (return_lse or return_entropy):
        return logp
    row_max = log_sum = None
    if return_lse and statistics is not None:
        row_max, log_sum = statistics.detach().unbind(0)
        if isinstance(temperature, Tensor):
            row_max = row_max * temperature.to(row_max.dtype).reciprocal()
        elif temperature != 1.0:
            row_max = row_max * (1.0 / float(temperature))
    return LogpResult(logp, entropy if return_entropy else None, row_max, log_sum)


def backward(
    problem: Problem,
    kernel: str,
    row_max: Tensor,
    log_sum: Tensor,
    entropy: Tensor | None,
    raw: bool,
    grad_logp: Tensor,
    grad_entropy: Tensor | None,
    grad_logits: Tensor | None,
) -> Tensor:
    """The gradient at the logits into ``grad_logits``, by default new memory; raw as in `_ops.backward`."""
    logits, spec = problem.logits, problem.spec
    _checks.shaped_tensor("grad_logp", grad_logp, spec.ids_shape, logits, _checks.FLOAT_DTYPES)
    _checks.no_autograd("grad_logp", grad_logp)
    _checks.no_autograd("logits", logits)
    row_max = _checks.statistic("row_max", row_max, problem)
    log_sum = _checks.statistic("log_sum", log_sum, problem)
    if (entropy is None) != (grad_entropy is None):
        raise ArgumentError("grad_entropy: expected both entropy and grad_entropy or neither, got one. Pass both.")
    if entropy is not None and grad_entropy is not None:
        entropy = _checks.statistic("entropy", entropy, problem)
        _checks.shaped_tensor("grad_entropy", grad_entropy, spec.leading, logits, _checks.FLOAT_DTYPES)
    if grad_logits is None:
        grad_logits = (_memory.empty_grad if is_plain(logits) else _memory.like)(logits)
    else:
        _outputs.grad_logits(grad_logits, logits)
        increment_version(grad_logits)
    _ops.backward(problem, kernel, row_max, log_sum, entropy, raw, grad_logp, grad_entropy, grad_logits)
    return grad_logits
