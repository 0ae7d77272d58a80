"""A call that passed before goes from its arguments to the launch: nothing is checked, selected or worked out again.

All that those depend on is in a key, but for the addresses, of which alignment is. Usual calls have one: plain tensors
that want no gradient, one temperature for all rows, no mask. What a key cannot hold goes the long way, whose checks
are then looked up piece by piece.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fused_logp_hub import _launch, _memory, _ops
from fused_logp_hub._call import is_plain
from fused_logp_hub._launch import Launch
from fused_logp_hub._problem import Problem, remember

Key = tuple[object, ...]


def key_of(
    logits: Tensor,
    token_ids: Tensor,
    temperature: float | Tensor,
    ignore_index: int | None,
    on_invalid: str,
    kernel: str,
    out_dtype: torch.dtype | None,
    outputs: tuple[Tensor | None, ...] = (),
) -> Key | None:
    """All that decides what this call launches, or None if it is not a usual one.

    With None nothing is looked up: torch.compile, for which there never is a key, would guard on what the cache holds.
    Values of other types would equal plain numbers without computing as they do, so they have no key.
    """
    if not (
        type(logits) is Tensor
        and not logits.requires_grad
        and is_plain(logits)
        and not _ops.uses_reference(logits, kernel)
        and isinstance(token_ids, Tensor)
        and type(temperature) is float
        and (ignore_index is None or type(ignore_index) is int)
        and type(on_invalid) is str
        and on_invalid != "raise"
        and (out_dtype is None or type(out_dtype) is torch.dtype)
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    ):
        return None
    try:
        # The number of a device suffices: logits are on a CUDA device, and PyTorch has one kind of accelerator.
        key: Key = (
            logits.dtype, logits.shape, logits.stride(), logits.get_device(), logits.data_ptr() & 15,
            token_ids.dtype, token_ids.shape, token_ids.stride(), token_ids.get_device(), token_ids.layout,
            temperature, ignore_index, on_invalid, kernel, out_dtype,
        )  # fmt: skip
        for output in outputs:
            if output is None:
                key += (None,)
            elif isinstance(output, Tensor) and not output.requires_grad:
                key += output.dtype, output.shape, output.is_contiguous(), output.get_device(), output.layout
            else:
                return None
    except RuntimeError:  # sparse or nested, as the checks will say
        return None
    return key


def keep(key: Key, problem: Problem, kernel: str, logp_dtype: torch.dtype, raw: bool) -> None:
    """After a call that passed: what it launched, if all it did was to launch on the tensors as they are."""
    if problem.spec.readable and problem.spec.num_rows:
        remember(_launch.launches, key, _launch.forward_launch(problem, kernel, logp_dtype, raw))


def forward(launch: Launch, logits: Tensor, token_ids: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    """logp in new memory."""
    spec = launch.spec
    logp = _memory.allocator(logits)(spec.ids_shape, out_dtype or spec.dtype)
    launch.run((token_ids.data_ptr(), 0, logits.data_ptr(), 0, 0, 0, 0, logp.data_ptr(), 0, 0, 0))
    return logp


def forward_out(
    launch: Launch,
    logits: Tensor,
    token_ids: Tensor,
    out: Tensor,
    row_max: Tensor | None,
    log_sum: Tensor | None,
    entropy: Tensor | None,
) -> None:
    """Into the caller's memory."""
    launch.run((
        token_ids.data_ptr(), 0, logits.data_ptr(), 0,
        0 if row_max is None else row_max.data_ptr(),
        0 if log_sum is None else log_sum.data_ptr(),
        0 if entropy is None else entropy.data_ptr(),
        out.data_ptr(), 0, 0, 0,
    ))  # fmt: skip
