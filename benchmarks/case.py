"""The tensors of one shape: buffers to rotate over, ids, mask and upstream gradient."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from benchmarks.shapes import Shape

LOGIT_SCALE = 2.0  # a peaked softmax, as a trained model's; with 1.0 every probability is tiny
MAX_BUFFERS = 64
IGNORE = -100


class Case:
    """Inputs of one shape on one device.

    Each buffer holds one row more than is used (``base`` [B, T + 1, V], ``logits`` its
    ``[:, :-1]``): peers that shift the labels themselves want it. All hold the same values.
    """

    def __init__(self, shape: Shape, device: torch.device, cache_bytes: int, seed: int = 0) -> None:
        self.shape, self.device = shape, device
        dtype = getattr(torch, shape.dtype)
        batch = shape.sequences
        rows = shape.rows // batch
        generator = torch.Generator(device).manual_seed(seed)
        first = torch.empty((batch, rows + 1, shape.vocab), dtype=dtype, device=device)
        first.normal_(0.0, LOGIT_SCALE, generator=generator)
        self.token_ids = torch.randint(
            shape.vocab, (batch, rows), generator=generator, device=device, dtype=torch.int64
        )
        _raise_some_targets(first, self.token_ids)
        if batch == 1:
            self.token_ids = self.token_ids[0]
        count = buffer_count(first.numel() * first.element_size(), cache_bytes)
        self.bases = [first, *(first.clone() for _ in range(count - 1))]
        self.logits = [base[0, :-1] if batch == 1 else base[:, :-1] for base in self.bases]
        leading = self.token_ids.shape
        self.row_mask = _row_mask(shape, leading, device)
        self.grad_logp = torch.randn(leading, generator=generator, device=device)

    @property
    def count(self) -> int:
        """The number of buffers."""
        return len(self.logits)

    @property
    def labels(self) -> Tensor:
        """token_ids with IGNORE for rows that are left out, for peers without a mask."""
        if self.row_mask is None:
            return self.token_ids
        return self.token_ids.masked_fill(~self.row_mask, IGNORE)

    def leaf(self, i: int) -> Tensor:
        """Buffer i as a leaf that requires grad; shares its memory."""
        return self.logits[i].detach().requires_grad_()


def buffer_count(buffer_bytes: int, cache_bytes: int) -> int:
    """Enough buffers to exceed three caches, two at least: a call finds none of its data in L2.

    The bound keeps set-up short for tiny shapes; there the flush between samples keeps L2 cold.
    """
    return min(MAX_BUFFERS, max(2, math.ceil(3 * cache_bytes / buffer_bytes)))


def _raise_some_targets(base: Tensor, ids: Tensor) -> None:
    """Every third target gets a probability near a half: there the gradient's two terms cancel."""
    row = torch.arange(0, ids.numel(), 3, device=ids.device)
    sequence, position = row // ids.shape[1], row % ids.shape[1]
    raised = math.log(base.shape[-1]) + LOGIT_SCALE**2 / 2
    base[sequence, position, ids[sequence, position]] = raised


def _row_mask(shape: Shape, leading: torch.Size, device: torch.device) -> Tensor | None:
    if not shape.layout.startswith("half"):
        return None
    row = torch.arange(leading.numel(), device=device)
    keep = row % 2 == 0 if shape.layout == "half-alternating" else row < shape.kept_rows
    return keep.view(leading)
