"""One call's inputs after checking, and where their rows lie in memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Problem:
    """Everything a forward and its backward share.

    ``logits`` [..., V] with a vocabulary stride of 1; ``token_ids`` [..., K] (K = 1 for the usual form);
    ``row_mask`` [N] bool, contiguous, or None; ``temperature_rows`` [...] float32 or None, which then
    takes the place of ``temperature``.
    """

    __slots__ = (
        "ignore_index",
        "invalid_is_nan",
        "logits",
        "num_rows",
        "row_mask",
        "temperature",
        "temperature_rows",
        "token_ids",
    )

    def __init__(
        self,
        logits: Tensor,
        token_ids: Tensor,
        num_rows: int,
        row_mask: Tensor | None,
        temperature: float,
        temperature_rows: Tensor | None,
        ignore_index: int | None,
        invalid_is_nan: bool,
    ) -> None:
        self.logits = logits
        self.token_ids = token_ids
        self.num_rows = num_rows
        self.row_mask = row_mask
        self.temperature = temperature
        self.temperature_rows = temperature_rows
        self.ignore_index = ignore_index
        self.invalid_is_nan = invalid_is_nan

    def reshaped(self, *leading: int) -> Problem:
        """The same problem with other leading dimensions; copies only what has no such view."""
        rows = self.temperature_rows
        return Problem(
            self.logits.reshape(*leading, self.logits.shape[-1]),
            self.token_ids.reshape(*leading, self.token_ids.shape[-1]),
            self.num_rows,
            self.row_mask,
            self.temperature,
            None if rows is None else rows.reshape(leading),
            self.ignore_index,
            self.invalid_is_nan,
        )

    def readable(self) -> Problem:
        """The same problem as the CUDA kernels read it: unit vocabulary stride, two leading dimensions at most.

        Copies the logits only if their vocabulary stride is not 1 or their leading dimensions need more
        than two strides; `copy_reason` says so beforehand.
        """
        problem = self
        if copy_reason(self.logits) is not None:
            problem = self.reshaped(*self.logits.shape[:-1])
            problem.logits = self.logits.contiguous()
        if problem.logits.dim() <= 3:
            return problem
        folded = collapse(problem.logits.shape[:-1], [problem.logits.stride()[:-1]])
        assert folded is not None
        return problem.reshaped(self.num_rows // folded[0], folded[0])


def copy_reason(logits: Tensor) -> str | None:
    """Why the CUDA kernels cannot read these logits in place; None if they can."""
    if logits.shape[-1] > 1 and logits.stride(-1) != 1:
        return f"the vocabulary stride is {logits.stride(-1)}, not 1"
    if logits.dim() > 3 and collapse(logits.shape[:-1], [logits.stride()[:-1]]) is None:
        return f"leading strides {logits.stride()[:-1]} do not fold into two"
    return None


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64 logits, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def collapse(
    shape: Sequence[int], strides: Sequence[Sequence[int]]
) -> tuple[int, list[tuple[int, int]]] | None:
    """Fold leading dimensions, the same way for several tensors, into at most two.

    Args:
        shape: sizes of the leading dimensions.
        strides: for each tensor, its strides over them.

    Returns:
        ``inner_rows`` and each tensor's (outer, inner) strides, so that row r lies at
        ``(r // inner_rows) * outer + (r % inner_rows) * inner``; None if two are not enough.
    """
    if len(shape) == 1:
        return max(shape[0], 1), [(0, s[0]) for s in strides]
    sizes: list[int] = []
    folded: list[list[int]] = []  # per dimension kept, each tensor's stride
    for dim, size in enumerate(shape):
        if size == 1:
            continue
        here = [s[dim] for s in strides]
        if sizes and all(outer == inner * size for outer, inner in zip(folded[-1], here, strict=True)):
            sizes[-1] *= size
            folded[-1] = here
        else:
            sizes.append(size)
            folded.append(here)
    if len(sizes) > 2:
        return None
    zero = [0] * len(strides)
    while len(sizes) < 2:
        sizes.insert(0, 1)
        folded.insert(0, zero)
    return max(sizes[1], 1), list(zip(folded[0], folded[1], strict=True))
