"""The operations: one forward and one backward, three ways in.

* `forward` and `backward` compute, on either device. Nothing requires grad, nothing is compiled: they
  are called directly, which saves half of a small call's host time.
* `LogpFunction` wraps them for eager autograd.
* `torch.ops.fused_logp_hub.*` (in `_library`) wrap them for torch.compile, tensor subclasses and dispatch modes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fused_logp_hub import _launch, _memory, _reference, _selection
from fused_logp_hub._errors import SecondDerivativeError
from fused_logp_hub._problem import Problem

TWICE = (
    "fused_logp: expected to be differentiated once, got a second derivative. Use torch.log_softmax where you need one."
)


# logp as the ids; raw row_max and log_sum [2, ...] and entropy [...], where wanted; and what computes them.
Results = tuple[Tensor, Tensor | None, Tensor | None]
Run = Callable[[Problem, str, torch.dtype, bool, bool], Results]


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
    n = problem.spec.num_rows
    if n == 0:
        return
    if not uses_reference(problem.logits, kernel):
        addresses = (_address(row_max), _address(log_sum), _address(entropy))
        _launch.forward(problem, kernel, logp, *addresses, raw)
        return
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
    """Fill grad_logits [..., V] from grad_logp, shaped as the ids, and grad_entropy [...].

    The statistics are contiguous; raw as in `forward`.
    """
    n = problem.spec.num_rows
    if problem.spec.shard is not None:  # columns beyond the vocabulary
        grad_logits[..., problem.spec.vocab_size :].zero_()
        grad_logits = grad_logits[..., : problem.spec.vocab_size]
    if n == 0 or problem.spec.vocab_size == 0:
        return
    if not uses_reference(problem.logits, kernel):
        addresses = (row_max.data_ptr(), log_sum.data_ptr(), _address(entropy))
        _backward_cuda(problem, addresses, raw, grad_logp, grad_entropy, grad_logits)
        return
    entropy = None if entropy is None else entropy.view(n)
    grad_entropy = None if grad_entropy is None else grad_entropy.reshape(n)
    target = _over(grad_logits, (n,))
    statistics = (row_max.view(n), log_sum.view(n), entropy)
    _reference.backward(problem.reshaped(n), *statistics, raw, grad_logp.reshape(n, -1), grad_entropy, target)
    _bring_home(target, grad_logits)


def _backward_cuda(
    problem: Problem,
    statistics: tuple[int, int, int],
    raw: bool,
    grad_logp: Tensor,
    grad_entropy: Tensor | None,
    grad_logits: Tensor,
) -> None:
    problem = problem.readable()
    # A negation that PyTorch left to the reader, as a gradient through complex numbers may carry one.
    grad_logp = grad_logp.resolve_neg()
    grad_entropy = None if grad_entropy is None else grad_entropy.resolve_neg()
    if problem.logits.dim() == grad_logits.dim():
        _launch.backward(problem, *statistics, raw, grad_logp, grad_entropy, grad_logits)
        return
    leading = problem.logits.shape[:-1]
    grad_entropy = None if grad_entropy is None else grad_entropy.reshape(leading)
    target = _over(grad_logits, leading)
    grad_logp = grad_logp.reshape(problem.token_ids.shape)
    _launch.backward(problem, *statistics, raw, grad_logp, grad_entropy, target)
    _bring_home(target, grad_logits)


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
) -> Results:
    """`forward` into new memory: logp as the ids; raw row_max and log_sum as one tensor [2, ...]; entropy [...]."""
    logits, spec = problem.logits, problem.spec
    empty = _memory.allocator(logits)
    logp = empty(spec.ids_shape, out_dtype)
    statistics = empty((2, *spec.leading), spec.dtype) if want_statistics else None
    entropy = empty(spec.leading, spec.dtype) if want_entropy else None
    if spec.num_rows and not uses_reference(logits, kernel):
        row_max, log_sum = _halves(statistics, spec.num_rows)
        _launch.forward(problem, kernel, logp, row_max, log_sum, _address(entropy), True)
    else:
        tops, log_sums = (None, None) if statistics is None else statistics.unbind(0)
        forward(problem, kernel, logp, tops, log_sums, entropy, True)
    return logp, statistics, entropy


class LogpFunction(torch.autograd.Function):
    """Eager autograd around forward and backward.

    The output is logp or, if more is wanted, (logp, statistics [2, ...], entropy): each output of a Function
    costs host time, as does each argument, so all but the logits come as one.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, call: tuple[Problem, str, torch.dtype, bool, bool, bool, Run]) -> Any:
        problem, kernel, out_dtype, want_more, want_entropy, in_place, run = call
        results = run(problem, kernel, out_dtype, True, want_entropy)
        _, token_ids, row_mask, rows, spec = problem
        ctx.save_for_backward(logits, token_ids, row_mask, rows, *results[1:])
        ctx.call = spec, kernel, in_place
        if not want_more:
            return results[0]
        ctx.mark_non_differentiable(results[1])
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(
        ctx: Any, grad_logp: Tensor | None, grad_statistics: None = None, grad_entropy: Tensor | None = None
    ) -> Any:
        if grad_logp is None and grad_entropy is None:
            return None, None
        logits, token_ids, row_mask, rows, statistics, entropy = ctx.saved_tensors
        spec, kernel, in_place = ctx.call
        problem = Problem(logits, token_ids, row_mask, rows, spec)
        if in_place:
            if torch.is_grad_enabled():
                raise SecondDerivativeError(TWICE)
            # The new version makes every later use of these logits by autograd an error, this node's own too.
            torch.autograd.graph.increment_version(logits)
            grad = run_backward(problem, kernel, statistics, entropy, grad_logp, grad_entropy, logits.detach())
        elif torch.is_grad_enabled():  # create_graph=True
            grad = _OnceDifferentiable.apply(  # type: ignore[no-untyped-call]
                logits, problem, kernel, statistics, entropy, grad_logp, grad_entropy
            )
        else:
            grad = run_backward(problem, kernel, statistics, entropy, grad_logp, grad_entropy)
        return grad, None


# Past Function.apply, which looks for transforms of torch.func, refused by _checks, and in every argument for tensors
# that outlived one; here only the first can be such.
apply: Callable[..., Any] = super(torch.autograd.Function, LogpFunction).apply


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
    grad_logits: Tensor | None = None,
) -> Tensor:
    """`backward` into grad_logits, by default new memory; an absent gradient counts as zero."""
    logits, spec = problem.logits, problem.spec
    if grad_logp is None:
        grad_logp = torch.zeros((), device=logits.device).expand(spec.ids_shape)
    if grad_logits is None:
        grad_logits = _memory.empty_grad(logits)
    if spec.num_rows and spec.shard is None and not uses_reference(logits, kernel):
        addresses = (*_halves(statistics, spec.num_rows), _address(entropy))
        _backward_cuda(problem, addresses, True, grad_logp, grad_entropy, grad_logits)
    else:
        row_max, log_sum = statistics.unbind(0)
        backward(problem, kernel, row_max, log_sum, entropy, True, grad_logp, grad_entropy, grad_logits)
    return grad_logits


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _halves(statistics: Tensor | None, num_rows: int) -> tuple[int, int]:
    """Addresses of row_max and log_sum in one tensor [2, ...]; two views cost as much as a launch."""
    if statistics is None:
        return 0, 0
    start = statistics.data_ptr()
    return start, start + num_rows * statistics.element_size()


def _over(grad_logits: Tensor, leading: Sequence[int]) -> Tensor:
    """grad_logits over other leading dimensions: a view if there is one, else new memory of that shape."""
    shape = (*leading, grad_logits.shape[-1])
    try:
        return grad_logits.view(shape)
    except RuntimeError:
        return torch.empty(shape, dtype=grad_logits.dtype, device=grad_logits.device)


def _bring_home(target: Tensor, grad_logits: Tensor) -> None:
    """Copy what could not be written in place."""
    if target.data_ptr() != grad_logits.data_ptr():
        grad_logits.copy_(target.view(grad_logits.shape))
