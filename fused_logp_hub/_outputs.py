"""Validation of memory that is written: its layout, and what else lies there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fused_logp_hub._checks import dense, no_autograd, not_negated, same_device, shaped_tensor
from fused_logp_hub._errors import ArgumentError
from fused_logp_hub._problem import copy_reason


def output(name: str, value: Tensor, shape: Sequence[int], logits: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """As shaped_tensor, for a tensor that is written: contiguous and free of autograd."""
    shaped_tensor(name, value, shape, logits, dtypes)
    not_negated(name, value)
    if not value.is_contiguous():
        raise ArgumentError(f"{name}: expected a contiguous tensor, got strides {value.stride()}. Allocate it so.")
    no_autograd(name, value)


def overwritable(logits: Tensor) -> None:
    """ArgumentError unless the gradient may take the logits' own memory."""
    if logits.is_leaf:
        raise ArgumentError(
            "inplace_backward: expected logits that an operation computed, got a leaf, whose values would be lost. "
            "Leave it False for leaves."
        )
    base = logits._base
    if base is not None and base.is_leaf and base.requires_grad:
        raise ArgumentError(
            "inplace_backward: expected logits with memory of their own, got a view of a leaf, whose values would be "
            "lost. Leave it False for these."
        )
    hooks = (
        "inplace_backward: expected no hooks on saved tensors, under which PyTorch cannot see that the logits were "
        "overwritten, got torch.utils.checkpoint, save_on_cpu or the like. Leave it False there."
    )
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks(hooks):
            pass  # entering fails where there are hooks
    except RuntimeError:
        raise ArgumentError(hooks) from None
    if copy_reason(logits) is not None or not _rows_apart(logits):
        raise ArgumentError(
            "inplace_backward: expected logits with a last stride of 1 and rows that do not overlap, "
            f"got strides {logits.stride()}. Leave it False for these."
        )


def grad_logits(out: Tensor, logits: Tensor) -> None:
    """ArgumentError unless the gradient can be written there: its own memory, or exactly the logits'."""
    dense("grad_logits", out)
    not_negated("grad_logits", out)
    if out.shape != logits.shape or out.dtype != logits.dtype:
        raise ArgumentError(
            f"grad_logits: expected shape {list(logits.shape)}, {logits.dtype}, as the logits, "
            f"got {list(out.shape)}, {out.dtype}. Allocate it with torch.empty_like(logits)."
        )
    same_device("grad_logits", out, logits)
    no_autograd("grad_logits", out)
    if copy_reason(out) is not None or not _rows_apart(out):
        raise ArgumentError(
            f"grad_logits: expected rows with a last stride of 1 that do not overlap, got strides {out.stride()}. "
            "Allocate it with torch.empty_like(logits)."
        )
    if out.data_ptr() == logits.data_ptr() and out.stride() == logits.stride():
        return  # in place
    first, last = _span(out)
    logits_first, logits_last = _span(logits)
    if out.numel() and first < logits_last and logits_first < last:
        raise ArgumentError(
            "grad_logits: expected memory of its own or exactly the logits', got a partial overlap. "
            "Pass logits itself to work in place."
        )


def _span(tensor: Tensor) -> tuple[int, int]:
    """First byte and one past the last."""
    if tensor.is_contiguous():
        return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _rows_apart(tensor: Tensor) -> bool:
    if tensor.is_contiguous():  # as an empty one is, whatever its strides
        return True
    extent = tensor.shape[-1]
    for stride, size in sorted(zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True)):
        if size == 1:
            continue
        if stride < extent:
            return False
        extent += stride * (size - 1)
    return True
