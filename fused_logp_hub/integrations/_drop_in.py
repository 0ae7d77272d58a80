"""What the drop-ins have in common."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fused_logp_hub._api import fused_logp


def drop_in_logp(logits: Tensor, token_ids: Tensor, **options: Any) -> Any:
    """`fused_logp` with the drop-ins' rule for invalid ids.

    The replaced functions index with them, which is an error on the CPU and undefined on CUDA. There the check
    would synchronise, so the result is NaN: a wrong label must not pass for a log-probability of 0.
    """
    return fused_logp(logits, token_ids, on_invalid="nan" if logits.is_cuda else "raise", **options)
