"""New tensors at the least cost on the host, where a small call is a handful of microseconds."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fused_logp_hub._problem import copy_reason

# What the code that torch.compile generates allocates with: on the current device, past the dispatcher, in two thirds
# of new_empty's time (validation/2026-11-30-h200.experiments.txt). Takes plain tuples.
_empty_strided_cuda: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def allocator(tensor: Tensor) -> Callable[[tuple[int, ...], torch.dtype], Tensor]:
    """Makes contiguous tensors of a shape and dtype on the device of a plain tensor."""
    if _empty_strided_cuda is not None and tensor.is_cuda and _current_device() == tensor.get_device():
        return _empty_cuda
    return lambda shape, dtype: tensor.new_empty(shape, dtype=dtype)


def empty_grad(logits: Tensor) -> Tensor:
    """For the gradient at plain logits, laid out as `like` has it."""
    if logits.is_contiguous():
        return allocator(logits)(tuple(logits.shape), logits.dtype)
    return like(logits)


def like(logits: Tensor) -> Tensor:
    """The logits' own layout where that is dense with unit vocabulary stride, else contiguous; any kind of tensor."""
    grad = torch.empty_like(logits)
    if not grad.is_contiguous() and copy_reason(grad) is not None:
        grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    return grad


def _empty_cuda(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    fresh: Tensor = _empty_strided_cuda(shape, _contiguous_strides(shape), dtype)
    return fresh


@lru_cache(maxsize=4096)
def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
