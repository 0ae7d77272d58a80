"""The demo's policy: one causal transformer block with random initial weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fused_logp_hub.cli import task

WIDTH, HEADS = 64, 4


class Policy(nn.Module):
    """Next-token logits [B, T, V] in float32 for tokens [B, T] that are padded on the left."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(task.VOCAB_SIZE, WIDTH)
        self.position = nn.Embedding(task.PROMPT_LENGTH + task.COMPLETION_LENGTH, WIDTH)
        self.norm_attention = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.merge = nn.Linear(WIDTH, WIDTH)
        self.norm_mlp = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.norm_head = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, task.VOCAB_SIZE, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)  # starts near the uniform distribution

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        x = x + self._attend(self.norm_attention(x), tokens != task.PAD)
        x = x + self.mlp(self.norm_mlp(x))
        logits: Tensor = self.head(self.norm_head(x))
        return logits

    def _attend(self, x: Tensor, present: Tensor) -> Tensor:
        """Causal self-attention over the columns that are present."""
        b, t, _ = x.shape
        places = torch.arange(t, device=x.device)
        # Every column sees itself, padding too: a row of attention without columns gives NaN.
        mask = (present[:, None, None, :] & (places[:, None] >= places)) | (places[:, None] == places)
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        merged: Tensor = self.merge(attended.transpose(1, 2).reshape(b, t, WIDTH))
        return merged
