"""`torch.ops.fused_logp_hub.*`: the operations as PyTorch's dispatcher sees them.

Registered with fake implementations and autograd, so torch.compile, export, tensor subclasses and
dispatch modes can follow them. Eager calls on plain tensors do not come through here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_logp_hub import _checks, _memory, _ops
from fused_logp_hub._errors import SecondDerivativeError
from fused_logp_hub._problem import Problem, accumulation_dtype

# The package's own name: a loader that gives each copy of the package another one (the `kernels` hub) loads several.
_NAMESPACE = __name__.partition(".")[0]


def _problem(
    logits: Tensor,
    token_ids: Tensor,
    row_mask: Tensor | None,
    temperature: float,
    temperature_rows: Tensor | None,
    ignore_index: int | None,
    on_invalid: str,
) -> Problem:
    return _checks.make_problem(
        logits,
        token_ids,
        row_mask,
        temperature if temperature_rows is None else temperature_rows,
        ignore_index,
        on_invalid,
    )


@torch.library.custom_op(f"{_NAMESPACE}::logp_forward", mutates_args=())
def logp_forward(
    logits: Tensor,
    token_ids: Tensor,
    row_mask: Tensor | None,
    temperature: float,
    temperature_rows: Tensor | None,
    ignore_index: int | None,
    on_invalid: str,
    out_dtype: torch.dtype,
    want_entropy: bool,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """logp with the ids' shape, statistics [2, ...] (row_max, log_sum), entropy [...] or empty [0]."""
    problem = _problem(logits, token_ids, row_mask, temperature, temperature_rows, ignore_index, on_invalid)
    logp, statistics, entropy = _ops.run_forward(problem, kernel, out_dtype, True, want_entropy)
    assert statistics is not None  # asked for
    return logp, statistics, statistics.new_empty(0) if entropy is None else entropy


@logp_forward.register_fake
def _(
    logits: Tensor,
    token_ids: Tensor,
    row_mask: Tensor | None,
    temperature: float,
    temperature_rows: Tensor | None,
    ignore_index: int | None,
    on_invalid: str,
    out_dtype: torch.dtype,
    want_entropy: bool,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    leading, acc = logits.shape[:-1], accumulation_dtype(logits.dtype)
    return (
        torch.empty(token_ids.shape, dtype=out_dtype, device=logits.device),
        torch.empty((2, *leading), dtype=acc, device=logits.device),
        torch.empty(leading if want_entropy else (0,), dtype=acc, device=logits.device),
    )


@torch.library.custom_op(f"{_NAMESPACE}::logp_backward", mutates_args=())
def logp_backward(
    grad_logp: Tensor,
    grad_entropy: Tensor | None,
    logits: Tensor,
    token_ids: Tensor,
    statistics: Tensor,
    entropy: Tensor | None,
    row_mask: Tensor | None,
    temperature: float,
    temperature_rows: Tensor | None,
    ignore_index: int | None,
    on_invalid: str,
    kernel: str,
) -> Tensor:
    """grad_logits, in the layout of the logits where that is dense."""
    problem = _problem(logits, token_ids, row_mask, temperature, temperature_rows, ignore_index, on_invalid)
    return _ops.run_backward(problem, kernel, statistics, entropy, grad_logp, grad_entropy)


@logp_backward.register_fake
def _(
    grad_logp: Tensor,
    grad_entropy: Tensor | None,
    logits: Tensor,
    token_ids: Tensor,
    statistics: Tensor,
    entropy: Tensor | None,
    row_mask: Tensor | None,
    temperature: float,
    temperature_rows: Tensor | None,
    ignore_index: int | None,
    on_invalid: str,
    kernel: str,
) -> Tensor:
    return _memory.like(logits)


@torch.library.custom_op(f"{_NAMESPACE}::row_mask_from_indices", mutates_args=())
def row_mask_from_indices(row_indices: Tensor, num_rows: int) -> Tensor:
    """[num_rows] bool, True where listed."""
    return _ops.row_mask_from_indices(row_indices, num_rows)


@row_mask_from_indices.register_fake
def _(row_indices: Tensor, num_rows: int) -> Tensor:
    return torch.empty(num_rows, dtype=torch.bool, device=row_indices.device)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, token_ids, row_mask, temperature, rows, ignore_index, on_invalid, _, want_entropy, kernel = inputs
    _, statistics, entropy = output
    ctx.mark_non_differentiable(statistics)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, token_ids, row_mask, rows, statistics, entropy if want_entropy else None)
    ctx.options = (temperature, ignore_index, on_invalid, kernel)


def _differentiate(ctx: Any, grad_logp: Tensor | None, _: None, grad_entropy: Tensor | None) -> tuple[Any, ...]:
    logits, token_ids, row_mask, rows, statistics, entropy = ctx.saved_tensors
    temperature, ignore_index, on_invalid, kernel = ctx.options
    if entropy is None:
        grad_entropy = None
    if grad_logp is None and grad_entropy is None:
        return (None,) * 10
    if grad_logp is None:
        grad_logp = torch.zeros(token_ids.shape, device=logits.device)
    # the ids were checked in the forward: no second synchronisation
    on_invalid = "zero" if on_invalid == "raise" else on_invalid
    grad = logp_backward(
        grad_logp, grad_entropy, logits, token_ids, statistics, entropy, row_mask, temperature, rows,
        ignore_index, on_invalid, kernel,
    )  # fmt: skip
    return (grad, *(None,) * 9)


def _no_second_derivative(ctx: Any, *grads: Any) -> Any:
    raise SecondDerivativeError(_ops.TWICE)


logp_forward.register_autograd(_differentiate, setup_context=_save)
logp_backward.register_autograd(_no_second_derivative, setup_context=lambda ctx, inputs, output: None)
