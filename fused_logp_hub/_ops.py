"""The operations: one forward and one backward, three ways in.

* `forward` and `backward` compute, on either device. Nothing requires grad, nothing is compiled: they
  are called directly, which saves half of a small call's host time.
* `LogpFunction` wraps them for eager autograd.
* `torch.ops.fused_logp_hub.*` (in `_library`) wrap them for torch.compile, tensor subclasses and dispatch modes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_logp_hub import _launch, _reference, _selection
from fused_logp_hub._errors import SecondDerivativeError
from fused_logp_hub._problem import Problem, accumulation_dtype, copy_reason

TWICE = (
    "fused_logp: expected to be differentiated once, got a second derivative. Use torch.log_softmax where you need one."
)


def uses_reference(logits: Tensor, kernel: str) -> bool:
    """CPU tensors always run the reference; CUDA tensors only when it is asked for."""
    return kernel == _selection.REFERENCE or not logits.is_cuda


def forward(
    problem: Problem,
    kernel: str,
    logp: Tensor,
    row_max: Tensor | None,
    log_sum: Tensor | None,
    entropy: Tensor | None,
    raw: bool,
) -> None:
    """Fill logp, shaped as the ids, and where given the statistics [...]; all outputs contiguous.

    raw: row_max is of the logits and not of logits / T, which is what a backward loses no precision with.
    """
    if problem.num_rows == 0:
        return
    if not uses_reference(problem.logits, kernel):
        _launch.forward(problem.readable(), kernel, logp, _address(row_max), _address(log_sum), _address(entropy), raw)
        return
    n = problem.num_rows
    row_max, log_sum, entropy = (None if t is None else t.view(n) for t in (row_max, log_sum, entropy))
    _reference.forward(problem.reshaped(n), logp.view(n, -1), row_max, log_sum, entropy, raw)


def backward(
    problem: Problem,
    kernel: str,
    row_max: Tensor,
    log_sum: Tensor,
    entropy: Tensor | None,
    raw: bool,
    grad_logp: Tensor,
    grad_entropy: Tensor | None,
    grad_logits: Tensor,
) -> None:
    """Fill grad_logits [..., V] from grad_logp, shaped as the ids, and grad_entropy [...]; statistics contiguous."""
    if problem.num_rows == 0:
        return
    n = problem.num_rows
    if uses_reference(problem.logits, kernel):
        problem = problem.reshaped(n)
        row_max, log_sum = row_max.view(n), log_sum.view(n)
        entropy = None if entropy is None else entropy.view(n)
    else:
        problem = problem.readable()
    leading = problem.logits.shape[:-1]
    if problem.token_ids.shape != grad_logp.shape:  # the rows were folded
        grad_logp = grad_logp.reshape(problem.token_ids.shape)
        grad_entropy = None if grad_entropy is None else grad_entropy.reshape(leading)
    target = grad_logits if grad_logits.shape[:-1] == leading else _viewed(grad_logits, leading)
    if uses_reference(problem.logits, kernel):
        _reference.backward(problem, row_max, log_sum, entropy, raw, grad_logp, grad_entropy, target)
    else:
        statistics = (row_max.data_ptr(), log_sum.data_ptr(), _address(entropy))
        _launch.backward(problem, *statistics, raw, grad_logp, grad_entropy, target)
    if target.data_ptr() != grad_logits.data_ptr():
        grad_logits.copy_(target.view(grad_logits.shape))


def row_mask_from_indices(row_indices: Tensor, num_rows: int) -> Tensor:
    """[num_rows] bool, True where listed; entries outside [0, num_rows) are skipped."""
    mask = torch.zeros(num_rows, dtype=torch.bool, device=row_indices.device)
    if row_indices.numel() == 0 or num_rows == 0:
        return mask
    if row_indices.is_cuda:
        _launch.mark_rows(row_indices, mask)
    else:
        mask[row_indices[(row_indices >= 0) & (row_indices < num_rows)].long()] = True
    return mask


def run_forward(
    problem: Problem, kernel: str, out_dtype: torch.dtype, want_statistics: bool, want_entropy: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`forward` into new memory: logp as the ids; raw row_max and log_sum as one tensor [2, ...]; entropy [...]."""
    logits = problem.logits
    device = logits.device
    logp = torch.empty(problem.token_ids.shape, dtype=out_dtype, device=device)
    statistics = entropy = row_max = log_sum = None
    if want_statistics or want_entropy:
        leading, acc = logits.shape[:-1], accumulation_dtype(logits.dtype)
        if want_statistics:
            statistics = torch.empty((2, *leading), dtype=acc, device=device)
            row_max, log_sum = statistics.unbind(0)
        if want_entropy:
            entropy = torch.empty(leading, dtype=acc, device=device)
    forward(problem, kernel, logp, row_max, log_sum, entropy, True)
    return logp, statistics, entropy


def empty_grad(logits: Tensor) -> Tensor:
    """Memory for the gradient: the logits' own layout where that is dense with unit vocabulary stride."""
    grad = torch.empty_like(logits)
    if copy_reason(grad) is not None:
        grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    return grad


class LogpFunction(torch.autograd.Function):
    """Eager autograd around forward and backward; outputs logp, statistics [2, ...], entropy."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        problem: Problem,
        kernel: str,
        out_dtype: torch.dtype,
        want_entropy: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        logp, statistics, entropy = run_forward(problem, kernel, out_dtype, True, want_entropy)
        ctx.save_for_backward(
            logits, problem.token_ids, problem.row_mask, problem.temperature_rows, statistics, entropy
        )
        ctx.scalars = problem.scalars()
        ctx.kernel = kernel
        ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)
        return logp, statistics, entropy

    @staticmethod
    def backward(ctx: Any, grad_logp: Tensor | None, _: None, grad_entropy: Tensor | None) -> Any:
        if grad_logp is None and grad_entropy is None:
            return None, None, None, None, None
        logits, token_ids, row_mask, rows, statistics, entropy = ctx.saved_tensors
        problem = Problem(logits, token_ids, row_mask, rows, *ctx.scalars)
        if torch.is_grad_enabled():  # create_graph=True
            grad = _OnceDifferentiable.apply(  # type: ignore[no-untyped-call]
                logits, problem, ctx.kernel, statistics, entropy, grad_logp, grad_entropy
            )
        else:
            grad = run_backward(problem, ctx.kernel, statistics, entropy, grad_logp, grad_entropy)
        return grad, None, None, None, None


class _OnceDifferentiable(torch.autograd.Function):
    """The backward as a node of a graph: its own derivative is an error that says so."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, problem: Problem, kernel: str, *tensors: Any) -> Tensor:
        return run_backward(problem, kernel, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise SecondDerivativeError(TWICE)


def run_backward(
    problem: Problem,
    kernel: str,
    statistics: Tensor,
    entropy: Tensor | None,
    grad_logp: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """`backward` into new memory; an absent gradient counts as zero."""
    if grad_logp is None:
        grad_logp = torch.zeros((), device=problem.logits.device).expand(problem.token_ids.shape)
    grad_logits = empty_grad(problem.logits)
    row_max, log_sum = statistics.unbind(0)
    backward(problem, kernel, row_max, log_sum, entropy, True, grad_logp, grad_entropy, grad_logits)
    return grad_logits


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _viewed(grad_logits: Tensor, leading: torch.Size) -> Tensor:
    """grad_logits over other leading dimensions: a view if there is one, else new memory of that shape."""
    try:
        return grad_logits.view(*leading, grad_logits.shape[-1])
    except RuntimeError:
        return torch.empty((*leading, grad_logits.shape[-1]), dtype=grad_logits.dtype, device=grad_logits.device)
