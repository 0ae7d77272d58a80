"""Logits cut into shards of the vocabulary, none as wide as another where that is possible."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

PADDING = 3


class Cut(NamedTuple):
    logits: Tensor
    """[..., V_r], with padding of NaN where the vocabulary ends."""
    vocab_start: int
    width: int
    """Columns that are not padding; 0 for some shards of a small vocabulary."""


def boundaries(vocab_size: int, count: int) -> list[int]:
    return [vocab_size * i * (i + 1) // (count * (count + 1)) for i in range(count + 1)]


def cut(logits: Tensor, count: int, aligned: bool = False) -> list[Cut]:
    """So many shards."""
    return cut_at(logits, boundaries(logits.shape[-1], count), PADDING, aligned)


def cut_at(logits: Tensor, edges: list[int], padding: int, aligned: bool = False) -> list[Cut]:
    """The shards, as views where nothing asks for a copy; aligned: rows begin on 16-byte boundaries."""
    shards = []
    for start, stop in pairwise(edges):
        padding_here = padding if stop == edges[-1] else 0
        part = logits[..., start:stop]
        if padding_here or aligned:
            store = torch.full(
                (*part.shape[:-1], -(-(stop - start + padding_here) // 16) * 16),
                float("nan"),
                dtype=logits.dtype,
                device=logits.device,
            )
            store[..., : stop - start] = part
            part = store[..., : stop - start + padding_here]
        shards.append(Cut(part, start, stop - start))
    return shards


def joined(grads: list[Tensor], shards: list[Cut]) -> Tensor:
    """The gradient of the whole from those of the shards, whose padding must have none."""
    for grad, shard in zip(grads, shards, strict=True):
        assert grad.shape == shard.logits.shape
        assert not grad[..., shard.width :].count_nonzero(), "padding has a gradient"
    return torch.cat([grad[..., : shard.width] for grad, shard in zip(grads, shards, strict=True)], -1)
