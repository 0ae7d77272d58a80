"""A call like one that passed goes from its arguments to the launch: nothing is checked, selected or worked out again.

Alike are calls with the same options whose tensors differ in nothing but their addresses, and in those not by the
alignment of the logits. Simple calls only: plain tensors that want no gradient, one temperature for all rows, no mask.
Others go the long way, whose checks are then looked up piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.compiler import is_dynamo_compiling

from fused_logp_hub import _launch, _memory, _ops
from fused_logp_hub._call import is_plain
from fused_logp_hub._launch import Launch
from fused_logp_hub._problem import Problem, remember

# What torch.compile guards its inputs with: one call compares several tensors with those it was made from, by type,
# dispatch keys (layout, modes and transforms among them), dtype, device, requires_grad, shape and strides, in less
# time than it takes to read all that. A nested tensor, which has no strides to compare, would end the process.
_TensorGuards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)
_is_nested = attrgetter("is_nested")
_NO_ADDRESS = (AttributeError, RuntimeError)  # what is no tensor, or does not lie in memory, raises when asked for it

Key = tuple[object, ...]


class _Passed(NamedTuple):
    alike: Callable[..., bool]
    launch: Launch


passed: dict[Key, tuple[_Passed, ...]] = {}
_PASSED_A_KEY = 4  # calls that differ in strides, dtypes or the ids' shape, the newest first


def key_of(
    logits: Tensor,
    temperature: float | Tensor,
    ignore_index: int | None,
    on_invalid: str,
    kernel: str,
    out_dtype: torch.dtype | None,
    *absent: bool,
) -> Key | None:
    """What a simple call is looked up by, with which of the outputs are absent; None for all others.

    Values of other types would equal plain numbers without computing as they do, so they have no key; nor has a call
    that torch.compile traces, which would guard on what the cache holds.
    """
    if (
        is_dynamo_compiling()
        or type(logits) is not Tensor
        or logits.requires_grad
        or type(temperature) is not float
        or (ignore_index is not None and type(ignore_index) is not int)
        or type(on_invalid) is not str
        or on_invalid == "raise"
        or (out_dtype is not None and type(out_dtype) is not torch.dtype)
        or forward_ad._current_level >= 0
    ):
        return None
    try:
        alignment = logits.data_ptr() & 15
        return logits.shape, alignment, temperature, ignore_index, on_invalid, kernel, out_dtype, *absent
    except _NO_ADDRESS:
        return None


def keep(
    key: Key,
    problem: Problem,
    kernel: str,
    logp_dtype: torch.dtype,
    raw: bool,
    wants_entropy: bool = False,
    outputs: tuple[Tensor | None, ...] = (),
) -> None:
    """After a call that passed: what it launched, if all it did was to launch on the tensors as they are."""
    logits, token_ids, _, _, spec = problem
    tensors = [logits, token_ids, *(output for output in outputs if output is not None)]
    if (
        _TensorGuards is not None
        and spec.readable
        and spec.num_rows
        and is_plain(logits)
        and not _ops.uses_reference(logits, kernel)
        and not any(tensor.requires_grad for tensor in tensors)
    ):
        guards = _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        launch = _launch.forward_launch(problem, kernel, logp_dtype, raw, wants_entropy)
        found = _Passed(guards.check, launch), *passed.get(key, ())
        remember(passed, key, found[:_PASSED_A_KEY])


def forward(key: Key, logits: Tensor, token_ids: Tensor, out_dtype: torch.dtype | None) -> Tensor | None:
    """logp in new memory, or None if no call like this one passed."""
    try:
        ids_address = token_ids.data_ptr()
        launch = _find(key, logits, token_ids)
    except _NO_ADDRESS:
        return None
    if launch is None:
        return None
    logp = _memory.allocator(logits)(launch.spec.ids_shape, out_dtype or launch.spec.dtype)
    launch.run((ids_address, 0, logits.data_ptr(), 0, 0, 0, 0, logp.data_ptr(), 0, 0, 0))
    return logp


def forward_out(
    key: Key,
    logits: Tensor,
    token_ids: Tensor,
    out: Tensor,
    row_max: Tensor | None,
    log_sum: Tensor | None,
    entropy: Tensor | None,
) -> bool:
    """Into the caller's memory; False, and nothing is written, if no call like this one passed."""
    outputs = [output for output in (out, row_max, log_sum, entropy) if output is not None]
    try:
        addresses = (
            token_ids.data_ptr(), 0, logits.data_ptr(), 0,
            0 if row_max is None else row_max.data_ptr(),
            0 if log_sum is None else log_sum.data_ptr(),
            0 if entropy is None else entropy.data_ptr(),
            out.data_ptr(), 0, 0, 0,
        )  # fmt: skip
        launch = _find(key, logits, token_ids, *outputs)
    except _NO_ADDRESS:
        return False
    if launch is None:
        return False
    increment_version(outputs)
    launch.run(addresses)
    return True


def _find(key: Key, *tensors: Tensor) -> Launch | None:
    found = passed.get(key)
    if found is not None and not any(map(_is_nested, tensors)):
        for alike, launch in found:
            if alike(*tensors):
                return launch
    return None
