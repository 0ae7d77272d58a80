"""OpenRLHF: ``log_probs_from_logits`` of ``openrlhf.models.utils``, and ``patch``, which swaps it into OpenRLHF."""

from __future__ import annotations

from torch import Tensor

from fused_logp_hub.integrations._drop_in import drop_in_logp
from fused_logp_hub.integrations._patch import Patch

__all__ = ["log_probs_from_logits", "patch"]


def log_probs_from_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of each row's label, as ``openrlhf.models.utils.log_probs_from_logits``.

    ``log_softmax(logits / temperature)`` gathered at ``labels``; differentiable. OpenRLHF's own function leaves the
    logits divided by the temperature; this one does not write to them.

    Args:
        logits: [..., V], bfloat16, float16, float32 or float64, read in place as by `fused_logp`.
        labels: [...], int32 or int64, ids in [0, V); -100 gives 0, and its row is not read.
        temperature: T > 0.

    Returns:
        [...], in nats, in the logits' dtype.

    Raises:
        ArgumentError: as `fused_logp`.
        InvalidTokenIdError: another label outside [0, V), on the CPU; on CUDA its result is NaN.

    Numerics, Memory, Source:
        As `fused_logp`; a half-precision result is rounded once.
    """
    return drop_in_logp(logits, labels, temperature=temperature, out_dtype=logits.dtype)  # type: ignore[no-any-return]


patch = Patch(
    "openrlhf", ">=0.9,<0.12", "openrlhf.models.utils", {log_probs_from_logits.__name__: log_probs_from_logits}
)
