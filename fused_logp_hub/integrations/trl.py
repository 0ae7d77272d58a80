"""TRL: the functions of ``trl.trainer.utils``, and ``patch``, which swaps them into TRL."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_logp_hub.integrations._drop_in import drop_in_logp
from fused_logp_hub.integrations._patch import Patch

__all__ = ["entropy_from_logits", "patch", "selective_log_softmax", "selective_log_softmax_and_entropy"]

_MASKED = -(2**31)  # fits int32 ids, and never is a token


def selective_log_softmax(
    logits: Tensor,
    index: Tensor,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
) -> Tensor:
    """Log-probability of each row's ids, as ``trl.trainer.utils.selective_log_softmax``.

    ``log_softmax(logits / temperature)`` gathered at ``index``; differentiable.

    Args:
        logits: [..., V], bfloat16, float16, float32 or float64, read in place as by `fused_logp`.
        index: [...] or [..., K], int32 or int64, ids in [0, V).
        temperature: T > 0.
        row_mask: shape of ``index``, any dtype; where it is 0 the result is 0. A row whose mask is all 0 is not
            read, and its ids may be anything.

    Returns:
        Shape of ``index``, in nats. float32 where TRL's own GPU kernel would run (CUDA, one id a row, at most three
        dimensions); else the logits' dtype.

    Raises:
        ArgumentError: as `fused_logp`, a temperature of 0 or less included.
        InvalidTokenIdError: an id outside [0, V), on the CPU; on CUDA its result is NaN.

    Numerics, Memory, Source:
        As `fused_logp`; a half-precision result is rounded once.
    """
    dtype = _result_dtype(logits, index, row_mask)
    return drop_in_logp(  # type: ignore[no-any-return]
        logits, _masked(index, row_mask), temperature=temperature, ignore_index=_MASKED, out_dtype=dtype
    )


def selective_log_softmax_and_entropy(
    logits: Tensor,
    index: Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies in one pass, as ``trl.trainer.utils.selective_log_softmax_and_entropy``.

    The former as `selective_log_softmax`, the latter ``-sum(p * log(p))`` with
    ``p = softmax(logits / temperature)``; both differentiable.

    Args:
        logits, index, temperature, row_mask: as in `selective_log_softmax`; both results are 0 where the mask is.
        entropy_requires_grad: False makes the entropy a constant to autograd.

    Returns:
        Log-probabilities with the shape of ``index`` and the dtype of `selective_log_softmax`, entropies [...] with
        that of `entropy_from_logits`; both in nats.

    Raises, Numerics, Memory, Source:
        As `selective_log_softmax`. The entropy is finite with logits of -inf: 0 * log(0) = 0.
    """
    dtype = _result_dtype(logits, index, row_mask)
    logp, entropy, *_ = drop_in_logp(
        logits, _masked(index, row_mask), temperature=temperature, ignore_index=_MASKED, out_dtype=dtype,
        return_entropy=True,
    )  # fmt: skip
    return logp, (entropy if entropy_requires_grad else entropy.detach()).to(_result_dtype(logits))


def entropy_from_logits(logits: Tensor, chunk_size: int = 128) -> Tensor:
    """Entropy of each row's softmax, as ``trl.trainer.utils.entropy_from_logits``.

    ``-sum(p * log(p))`` with ``p = softmax(logits)``; differentiable.

    Args:
        logits: [..., V], as in `selective_log_softmax`.
        chunk_size: has no effect: no memory grows with it.

    Returns:
        [...], in nats; float32 where TRL's own GPU kernel would run (CUDA, at most three dimensions), else the
        logits' dtype.

    Raises, Numerics, Memory, Source:
        As `selective_log_softmax_and_entropy`.
    """
    # the entropy needs no id, but costs no more with one
    index = torch.zeros((), dtype=torch.int64, device=logits.device).expand(logits.shape[:-1])
    return selective_log_softmax_and_entropy(logits, index)[1]


def _masked(index: Tensor, row_mask: Tensor | None) -> Tensor:
    return index if row_mask is None else index.masked_fill(row_mask == 0, _MASKED)


def _result_dtype(logits: Tensor, index: Tensor | None = None, row_mask: Tensor | None = None) -> torch.dtype:
    """float32 where TRL's own kernel would take the call, else what its PyTorch code would give."""
    fused = (
        logits.is_cuda
        and logits.dtype != torch.float64
        and logits.dim() <= 3
        and logits.stride(-1) == 1
        and (index is None or index.shape == logits.shape[:-1])
        and (row_mask is None or row_mask.dtype in (torch.bool, torch.int32, torch.int64))
    )
    return torch.float32 if fused else logits.dtype


patch = Patch(
    "trl",
    ">=1.14,<1.17",
    "trl.trainer.utils",
    {f.__name__: f for f in (selective_log_softmax, selective_log_softmax_and_entropy, entropy_from_logits)},
)
