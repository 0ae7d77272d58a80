"""RL-Kernel's native symbols, one for one, on this package's kernels.

The names, argument order, dtypes and rules are those of the extension module ``rl_engine._C``, so that
code written against it runs unchanged:

* Two-dimensional logits [N, V], ids [N]; ids below 0 or at least V give 0 on every path.
* ``fused_logp`` returns the logits' dtype; ``*_fp32``, ``*_with_lse`` and the SM90 functions float32.
* Indexed functions give 0 for rows that ``row_indices`` does not list, and an exactly zero gradient.
* Allocating functions are differentiable; ``*_out`` and ``deterministic_*`` are forward-only.
* ``*_with_lse`` return (logp, row_max, log_sum), constants to autograd, for the two backward functions.
* ``*_sm90`` leave the choice to the package: whichever kernel measured fastest for that many rows of that size. All of
  them give the same bits.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from fused_logp_hub import _api, _checks
from fused_logp_hub._errors import ArgumentError

__all__ = [
    "deterministic_logp_forward_fp32",
    "deterministic_logp_forward_out",
    "fused_logp",
    "fused_logp_backward",
    "fused_logp_backward_indexed",
    "fused_logp_forward_fp32",
    "fused_logp_forward_indexed_fp32",
    "fused_logp_forward_indexed_out",
    "fused_logp_forward_indexed_with_lse",
    "fused_logp_forward_online_fp32",
    "fused_logp_forward_online_indexed_fp32",
    "fused_logp_forward_online_indexed_out",
    "fused_logp_forward_online_indexed_with_lse",
    "fused_logp_forward_online_out",
    "fused_logp_forward_online_with_lse",
    "fused_logp_forward_out",
    "fused_logp_forward_with_lse",
    "fused_logp_sm90",
    "fused_logp_sm90_with_lse",
]

_TWO_PASS, _ONLINE, _SM90 = "two_pass", "online", "auto"
_Statistics = tuple[Tensor, Tensor, Tensor]


def fused_logp(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Log-probabilities [N] in the logits' dtype; two-pass, differentiable."""
    return _logp(logits, token_ids, None, _TWO_PASS, out_dtype=_dtype(logits))


def fused_logp_sm90(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probabilities [N] in float32; the package's choice of kernel, differentiable."""
    return _logp(logits, labels, None, _SM90)


def fused_logp_forward_out(logits: Tensor, token_ids: Tensor, output: Tensor) -> Tensor:
    """Two-pass into ``output`` [N], which is returned; forward-only."""
    return _out(logits, token_ids, None, output, _TWO_PASS)


def fused_logp_forward_fp32(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Two-pass, float32 [N], differentiable."""
    return _logp(logits, token_ids, None, _TWO_PASS)


def fused_logp_forward_indexed_out(logits: Tensor, token_ids: Tensor, row_indices: Tensor, output: Tensor) -> Tensor:
    """Two-pass over the listed rows into ``output`` [N], others 0; forward-only."""
    return _out(logits, token_ids, row_indices, output, _TWO_PASS)


def fused_logp_forward_indexed_fp32(logits: Tensor, token_ids: Tensor, row_indices: Tensor) -> Tensor:
    """Two-pass over the listed rows, float32 [N], others 0; differentiable."""
    return _logp(logits, token_ids, row_indices, _TWO_PASS)


def fused_logp_forward_online_out(logits: Tensor, token_ids: Tensor, output: Tensor) -> Tensor:
    """Online into ``output`` [N], which is returned; forward-only."""
    return _out(logits, token_ids, None, output, _ONLINE)


def fused_logp_forward_online_fp32(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Online, float32 [N], differentiable."""
    return _logp(logits, token_ids, None, _ONLINE)


def fused_logp_forward_online_indexed_out(
    logits: Tensor, token_ids: Tensor, row_indices: Tensor, output: Tensor
) -> Tensor:
    """Online over the listed rows into ``output`` [N], others 0; forward-only."""
    return _out(logits, token_ids, row_indices, output, _ONLINE)


def fused_logp_forward_online_indexed_fp32(logits: Tensor, token_ids: Tensor, row_indices: Tensor) -> Tensor:
    """Online over the listed rows, float32 [N], others 0; differentiable."""
    return _logp(logits, token_ids, row_indices, _ONLINE)


def deterministic_logp_forward_fp32(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Two-pass, float32 [N], forward-only. Every function here repeats bit for bit; this name is the seed's."""
    _checks.no_autograd("logits", logits)
    return _logp(logits, token_ids, None, _TWO_PASS)


def deterministic_logp_forward_out(logits: Tensor, token_ids: Tensor, output: Tensor) -> Tensor:
    """Two-pass into ``output`` [N], which is returned; forward-only."""
    return _out(logits, token_ids, None, output, _TWO_PASS)


def fused_logp_forward_with_lse(logits: Tensor, token_ids: Tensor) -> _Statistics:
    """Two-pass: logp, row_max, log_sum, float32 [N] each."""
    return _with_lse(logits, token_ids, None, _TWO_PASS)


def fused_logp_forward_indexed_with_lse(logits: Tensor, token_ids: Tensor, row_indices: Tensor) -> _Statistics:
    """Two-pass over the listed rows: logp, row_max, log_sum, others 0."""
    return _with_lse(logits, token_ids, row_indices, _TWO_PASS)


def fused_logp_forward_online_with_lse(logits: Tensor, token_ids: Tensor) -> _Statistics:
    """Online: logp, row_max, log_sum, float32 [N] each."""
    return _with_lse(logits, token_ids, None, _ONLINE)


def fused_logp_forward_online_indexed_with_lse(logits: Tensor, token_ids: Tensor, row_indices: Tensor) -> _Statistics:
    """Online over the listed rows: logp, row_max, log_sum, others 0."""
    return _with_lse(logits, token_ids, row_indices, _ONLINE)


def fused_logp_sm90_with_lse(logits: Tensor, labels: Tensor) -> _Statistics:
    """The package's choice of kernel: logp, row_max, log_sum, float32 [N] each."""
    return _with_lse(logits, labels, None, _SM90)


def fused_logp_backward(
    grad_out: Tensor, logits: Tensor, token_ids: Tensor, row_max: Tensor, log_sum: Tensor
) -> Tensor:
    """The gradient [N, V] at the logits, in their dtype, from the statistics of a ``*_with_lse``."""
    return _backward(grad_out, logits, token_ids, row_max, log_sum, None)


def fused_logp_backward_indexed(
    grad_out: Tensor, logits: Tensor, token_ids: Tensor, row_max: Tensor, log_sum: Tensor, row_indices: Tensor
) -> Tensor:
    """As `fused_logp_backward`, exactly 0 for rows that are not listed."""
    return _backward(grad_out, logits, token_ids, row_max, log_sum, row_indices)


def _logp(
    logits: Tensor, ids: Tensor, row_indices: Tensor | None, kernel: str, out_dtype: torch.dtype = torch.float32
) -> Tensor:
    _two_dimensional(logits, ids)
    return cast(
        Tensor,
        _api.fused_logp(logits, ids, row_indices=row_indices, ignore_index=None, out_dtype=out_dtype, kernel=kernel),
    )


def _out(logits: Tensor, ids: Tensor, row_indices: Tensor | None, output: Tensor, kernel: str) -> Tensor:
    _two_dimensional(logits, ids)
    return _api.fused_logp_out(logits, ids, out=output, row_indices=row_indices, ignore_index=None, kernel=kernel)


def _with_lse(logits: Tensor, ids: Tensor, row_indices: Tensor | None, kernel: str) -> _Statistics:
    _two_dimensional(logits, ids)
    result = _api.fused_logp(
        logits.detach(), ids, row_indices=row_indices, ignore_index=None, kernel=kernel, return_lse=True
    )
    logp, _, row_max, log_sum = cast(_api.LogpResult, result)
    return logp, cast(Tensor, row_max), cast(Tensor, log_sum)


def _backward(
    grad_out: Tensor, logits: Tensor, ids: Tensor, row_max: Tensor, log_sum: Tensor, row_indices: Tensor | None
) -> Tensor:
    _two_dimensional(logits, ids)
    return _api.fused_logp_backward(
        grad_out.detach(), logits.detach(), ids, row_max, log_sum, row_indices=row_indices, ignore_index=None
    )


def _two_dimensional(logits: Tensor, ids: Tensor) -> None:
    if isinstance(logits, Tensor) and isinstance(ids, Tensor) and (logits.dim(), ids.dim()) != (2, 1):
        raise ArgumentError(
            f"logits: expected logits [N, V] and ids [N], got {list(logits.shape)} and {list(ids.shape)}. "
            "Flatten the leading dimensions, or use fused_logp_hub.fused_logp."
        )


def _dtype(logits: Tensor) -> torch.dtype:
    return logits.dtype if isinstance(logits, Tensor) else torch.float32
