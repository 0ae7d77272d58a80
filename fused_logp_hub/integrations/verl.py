"""verl: ``logprobs_from_logits`` of ``verl.utils.torch_functional``, and ``patch``, which swaps it into verl."""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from fused_logp_hub._call import is_plain
from fused_logp_hub.integrations._drop_in import drop_in_logp
from fused_logp_hub.integrations._patch import Patch

__all__ = ["logprobs_from_logits", "patch"]

_FLASH_ATTENTION = importlib.util.find_spec("flash_attn") is not None


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """Log-probability of each row's label, as ``verl.utils.torch_functional.logprobs_from_logits``.

    ``log_softmax(logits)`` gathered at ``labels``; differentiable.

    Args:
        logits: [..., V], bfloat16, float16, float32 or float64, read in place as by `fused_logp`.
        labels: [...], int32 or int64, ids in [0, V); -100 gives 0, and its row is not read.
        inplace_backward: let the gradient overwrite the logits' memory, where verl would: on CUDA with flash-attn
            installed. Leaves and logits that are not contiguous are never overwritten.

    Returns:
        [...], in nats; float32 where verl would call flash-attn's kernel, else the logits' dtype.

    Raises:
        ArgumentError: as `fused_logp`.
        InvalidTokenIdError: another label outside [0, V), on the CPU; on CUDA its result is NaN.
        RuntimeError: in a backward that needs logits which were overwritten.

    Numerics, Memory, Source:
        As `fused_logp`; a half-precision result is rounded once.
    """
    flash = _calls_flash_attention(logits)
    in_place = flash and inplace_backward and not logits.is_leaf and logits.is_contiguous() and is_plain(logits)
    dtype = torch.float32 if flash else logits.dtype
    return drop_in_logp(logits, labels, out_dtype=dtype, inplace_backward=in_place)  # type: ignore[no-any-return]


def _calls_flash_attention(logits: Tensor) -> bool:
    """Whether verl itself would give these logits to flash-attn's cross-entropy."""
    return logits.is_cuda and _FLASH_ATTENTION and os.environ.get("VERL_DISABLE_FLASH_ATTN_CE", "0") != "1"


patch = Patch(
    "verl", ">=0.7,<0.10", "verl.utils.torch_functional", {logprobs_from_logits.__name__: logprobs_from_logits}
)
