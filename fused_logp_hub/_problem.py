"""One call's inputs after checking, and where their rows lie in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

CACHE_ENTRIES = 4096


class Shard(NamedTuple):
    """Where a shard's columns lie in the vocabulary that the token ids are of."""

    start: int
    vocab_size: int


@dataclass(frozen=True, eq=False, slots=True)
class Spec:
    """What a call asks for, without its tensors. `_checks.make_problem` gives the same object to calls that
    differ in nothing but addresses, so that it stands for shapes, strides, dtypes and all it holds in a cache's key.
    """

    dtype: torch.dtype
    """Of the arithmetic and the statistics."""
    leading: tuple[int, ...]
    ids_shape: tuple[int, ...]
    num_rows: int
    vocab_size: int
    num_ids: int
    temperature: float
    ignore_index: int | None
    invalid_is_nan: bool
    shard: Shard | None
    readable: bool
    """Whether the CUDA kernels read these logits as they lie; see `Problem.readable`."""


class Problem(NamedTuple):
    """Everything a forward and its backward share.

    With a shard the logits are a part of the columns, and the forward gives what `_shards.merge` takes.
    Columns behind the first ``spec.vocab_size`` are then padding.
    """

    logits: Tensor
    """[..., V]"""
    token_ids: Tensor
    """[...] or [..., K]"""
    row_mask: Tensor | None
    """[N] bool, contiguous"""
    temperature_rows: Tensor | None
    """[...] float32, which then takes the place of the spec's temperature"""
    spec: Spec

    def reshaped(self, *leading: int) -> Problem:
        """The same problem over other leading dimensions, ids as [..., K]; copies only what has no such view."""
        rows = self.temperature_rows
        return Problem(
            self.logits.reshape(*leading, self.logits.shape[-1]),
            self.token_ids.reshape(*leading, self.spec.num_ids),
            self.row_mask,
            None if rows is None else rows.reshape(leading),
            self.spec,
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
            problem = self._replace(logits=logits.contiguous())
        if logits.dim() <= 3:
            return problem
        folded = collapse(problem.logits.shape[:-1], [problem.logits.stride()[:-1]])
        assert folded is not None  # copied if not
        return problem.reshaped(self.spec.num_rows // folded[0], folded[0])


def remember(cache: dict[Any, Any], key: object, value: object) -> None:
    """Put it into a cache, which starts anew when it holds more than any steady state needs."""
    if len(cache) >= CACHE_ENTRIES:
        cache.clear()
    cache[key] = value


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
