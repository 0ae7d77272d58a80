"""Which columns of the vocabulary a rank holds, and who holds the others: from a group or from a DTensor."""

from __future__ import annotations

import sys
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeGuard

import torch.distributed as dist
from torch import Tensor

from fused_logp_hub import _checks
from fused_logp_hub._errors import ArgumentError, ArgumentTypeError
from fused_logp_hub._problem import Shard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether it is a DTensor, without the seconds that importing them takes."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This process's place in the group; ArgumentError if it has none."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ArgumentError(
            "group: expected an initialised process group, got none. Call torch.distributed.init_process_group first, "
            "or use fused_logp on one process."
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise ArgumentError(
            "group: expected one that this process is in, got one without it. Call on the group's ranks."
        )
    return rank, dist.get_world_size(group)


def shard_at(vocab_start: Any, vocab_size: Any) -> Shard:
    """A shard's place in the vocabulary; one that begins behind the vocabulary's end is all padding."""
    for name, value, least in (("vocab_start", vocab_start, 0), ("vocab_size", vocab_size, 1)):
        _integer(name, value)
        if not least <= int(value) <= _checks.MAX_VOCAB:
            most = _checks.MAX_VOCAB
            raise ArgumentError(f"{name}: expected an int from {least} to {most}, got {value}. Correct it.")
    return Shard(int(vocab_start), int(vocab_size))


def complete(width: int, vocab_start: int | None, vocab_size: int | None, rank: int, size: int) -> Shard:
    """A rank's shard; what is left out is taken from shards of one width in the order of the ranks.

    What one rank cannot know is whether its neighbour begins where it ends.
    """
    for name, value in (("vocab_start", vocab_start), ("vocab_size", vocab_size)):
        if value is not None:
            _integer(name, value)
    usual = rank * width
    if vocab_size is None:
        vocab_size = size * width
        if vocab_start not in (None, usual):
            raise ArgumentError(
                f"vocab_size: expected the whole vocabulary's size, since rank {rank}'s vocab_start {vocab_start} is "
                f"not the {usual} of shards of one width, got None. Pass vocab_size."
            )
    if vocab_start is None:
        vocab_start = usual
        if size * width < vocab_size:
            raise ArgumentError(
                f"vocab_start: expected this shard's first id, since {size} shards of {width} columns do not hold "
                f"{vocab_size} ids, got None. Pass vocab_start."
            )
    if rank == 0 and vocab_start != 0:
        raise ArgumentError(
            f"vocab_start: expected 0 on the group's first rank, got {vocab_start}. Give each rank the id of its first "
            "column, in the order of the group's ranks."
        )
    if rank == size - 1 and vocab_start + width < vocab_size:
        raise ArgumentError(
            f"vocab_start: expected the last rank's columns to reach the vocabulary's end {vocab_size}, got "
            f"{vocab_start} with {width} columns. Give each rank the id of its first column."
        )
    return shard_at(vocab_start, vocab_size)


class Layout:
    """How a DTensor of logits spreads its columns over one dimension of its mesh."""

    def __init__(self, logits: DTensor, vocab_size: int | None) -> None:
        from torch.distributed.tensor import Shard as Sharded

        self.mesh, self.placements = logits.device_mesh, logits.placements
        last = logits.dim() - 1
        dims = [i for i, placement in enumerate(self.placements) if getattr(placement, "dim", None) == last]
        usual = len(dims) == 1 and type(self.placements[dims[0]]) is Sharded
        if not usual or any(p.is_partial() for p in self.placements):
            raise ArgumentError(
                f"logits_shard: expected a DTensor sharded on its last dimension over one dimension of its mesh, "
                f"got placements {self.placements}. Redistribute it, or use fused_logp on its local tensor."
            )
        self.dim = dims[0]
        self.group = self.mesh.get_group(self.dim)
        columns = logits.shape[-1]
        self.vocab_size = columns if vocab_size is None else vocab_size
        if self.vocab_size > columns:
            raise ArgumentError(
                f"vocab_size: expected at most the DTensor's {columns} columns, got {vocab_size}. Correct it."
            )
        rank, size = self.mesh.get_local_rank(self.dim), self.mesh.size(self.dim)
        chunk = -(-columns // size)  # as torch.chunk cuts
        self.vocab_start = min(rank * chunk, columns)
        width = logits.to_local().shape[-1]
        expected = min(chunk, columns - self.vocab_start)
        if width != expected:
            raise ArgumentError(
                f"logits_shard: expected {expected} columns on rank {rank} of a DTensor with {columns}, got "
                f"{width}. Pass the local tensor with group, vocab_start and vocab_size."
            )

    def local(self, name: str, value: Any) -> Any:
        """A DTensor's rows on this rank, which must be those of the logits; anything else as it is."""
        if not is_dtensor(value):
            return value
        from torch.distributed.tensor import Replicate

        expected = list(self.placements)
        expected[self.dim] = Replicate()
        if value.device_mesh != self.mesh or list(value.placements) != expected:
            raise ArgumentError(
                f"{name}: expected a plain tensor or placements {tuple(expected)} on the logits' mesh, got "
                f"{value.placements}. Redistribute it."
            )
        local: Tensor = value.to_local()
        return local


def _integer(name: str, value: object) -> None:
    if not isinstance(value, Integral):  # NumPy's included
        raise ArgumentTypeError(f"{name}: expected an int, got {type(value).__name__}. Pass an int.")
