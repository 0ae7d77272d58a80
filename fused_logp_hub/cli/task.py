"""The demo's task, checkable without a judge: write the prompt's digits in ascending order.

A row is ``[PAD .. PAD, digits, SORT, completion]``: prompts are padded on the left, as trainers do,
so that every completion starts at the same column.
"""

from __future__ import annotations

import torch
from torch import Tensor

PAD, SORT, END = 10, 11, 12
VOCAB_SIZE = 16  # padded, as real vocabularies are, so that rows are aligned
MIN_DIGITS, MAX_DIGITS = 3, 5
PROMPT_LENGTH = MAX_DIGITS + 1
COMPLETION_LENGTH = MAX_DIGITS + 1
_SYMBOLS = "0123456789 >.???"


def sample_prompts(count: int, generator: torch.Generator) -> Tensor:
    """[count, PROMPT_LENGTH] prompts of random length and digits."""
    digits = torch.randint(10, (count, MAX_DIGITS), generator=generator)
    length = torch.randint(MIN_DIGITS, MAX_DIGITS + 1, (count, 1), generator=generator)
    padded = torch.arange(MAX_DIGITS) < MAX_DIGITS - length
    return torch.cat([digits.masked_fill(padded, PAD), torch.full((count, 1), SORT)], 1)


def is_held_out(prompts: Tensor) -> Tensor:
    """[count] bool, by the multiset of digits: no ordering of a held-out prompt is trained on."""
    digits = prompts[:, :MAX_DIGITS]
    squares = torch.where(digits == PAD, 0, digits * digits + digits + 1).sum(1)
    return squares % 5 == 0


def answers(prompts: Tensor) -> Tensor:
    """[count, COMPLETION_LENGTH] the right completions: sorted digits, END, PAD."""
    ordered = prompts[:, :MAX_DIGITS].sort(1).values  # PAD is above every digit
    ended = torch.cat([ordered, torch.full_like(ordered[:, :1], PAD)], 1)
    length = (ordered != PAD).sum(1, keepdim=True)
    return ended.scatter(1, length, END)


def reward(prompts: Tensor, completions: Tensor) -> Tensor:
    """[count] the share of the answer's tokens, END included, that stand where they should."""
    right = answers(prompts)
    counted = right != PAD
    return ((completions == right) & counted).sum(1) / counted.sum(1)


def to_text(tokens: Tensor) -> str:
    """A row of token ids as the reader sees it."""
    return "".join(_SYMBOLS[t] for t in tokens.tolist()).strip()
