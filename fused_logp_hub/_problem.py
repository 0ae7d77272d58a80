"""One call's inputs after checking, and where their rows lie in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Shard(NamedTuple):
    """Where a shard's columns lie in the vocabulary that the token ids are of."""

    start: int
    vocab_size: int


class Problem:
    """Everything a forward and its backward share.

    ``logits`` [..., V]; ``token_ids`` [...] or [..., K]; ``row_mask`` [N] bool, contiguous, or None;
    ``temperature_rows`` [...] float32 or None, which then takes the place of ``temperature``.

    With a ``shard`` the logits are a part of the columns, and the forward gives what `_shards.merge` takes.
    Columns behind the first ``vocab_size`` are then padding.
    """

    __slots__ = (
        "ignore_index",
        "invalid_is_nan",
        "logits",
        "num_ids",
        "num_rows",
        "row_mask",
        "shard",
        "temperature",
        "temperature_rows",
        "token_ids",
        "vocab_size",
    )

    def __init__(
        self,
        logits: Tensor,
        token_ids: Tensor,
        row_mask: Tensor | None,
        temperature_rows: Tensor | None,
        num_rows: int,
        vocab_size: int,
        num_ids: int,
        temperature: float,
        ignore_index: int | None,
        invalid_is_nan: bool,
        shard: Shard | None = None,
    ) -> None:
        self.logits = logits
        self.token_ids = token_ids
        self.num_rows = num_rows
        self.vocab_size = vocab_size
        self.num_ids = num_ids
        self.row_mask = row_mask
        self.temperature = temperature
        self.temperature_rows = temperature_rows
        self.ignore_index = ignore_index
        self.invalid_is_nan = invalid_is_nan
        self.shard = shard

    def with_tensors(
        self, logits: Tensor, token_ids: Tensor, row_mask: Tensor | None, temperature_rows: Tensor | None
    ) -> Problem:
        """The same problem with other tensors."""
        return Problem(logits, token_ids, row_mask, temperature_rows, *self.scalars())

    def scalars(self) -> tuple[int, int, int, float, int | None, bool, Shard | None]:
        """All but the tensors, in the constructor's order: what a backward keeps beside its saved tensors."""
        return (
            self.num_rows,
            self.vocab_size,
            self.num_ids,
            self.temperature,
            self.ignore_index,
            self.invalid_is_nan,
            self.shard,
        )

    def reshaped(self, *leading: int) -> Problem:
        """The same problem over other leading dimensions, ids as [..., K]; copies only what has no such view."""
        rows = self.temperature_rows
        return self.with_tensors(
            self.logits.reshape(*leading, self.logits.shape[-1]),
            self.token_ids.reshape(*leading, self.num_ids),
            self.row_mask,
            None if rows is None else rows.reshape(leading),
        )

    def readable(self) -> Problem:
        """The same problem as the CUDA kernels read it: unit vocabulary stride, two leading dimensions at most.

        Copies the logits only if `copy_reason` says so.
        """
        logits = self.logits
        if logits.dim() == 2 and logits.stride(1) == 1:
            return self
        problem = self
        if copy_reason(logits) is not None:
            problem = self.with_tensors(logits.contiguous(), self.token_ids, self.row_mask, self.temperature_rows)
        if logits.dim() <= 3:
            return problem
        folded = collapse(problem.logits.shape[:-1], [problem.logits.stride()[:-1]])
        assert folded is not None  # copied if not
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


def collapse(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[int, list[tuple[int, int]]] | None:
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
