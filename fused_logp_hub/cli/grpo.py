"""Group relative policy optimisation on the demo's task, with `fused_logp`.

Each step samples GROUP completions for each prompt, scores them, and takes INNER_STEPS optimiser
steps on the clipped ratio exp(new - old). Labels outside the completion are IGNORE: those rows of
the logits are not read, their gradient is exactly 0, and the logits need no slicing.

Source: Shao et al., "DeepSeekMath", 2024, arXiv:2402.03300.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fused_logp_hub import _selection, explain_selection, fused_logp
from fused_logp_hub._inspect import Explanation
from fused_logp_hub.cli import task
from fused_logp_hub.cli.exactness import IGNORE, compare
from fused_logp_hub.cli.policy import Policy

PROMPTS, GROUP, INNER_STEPS = 24, 16, 3
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
LEARNING_RATE = 3e-3
HELD_OUT = 512


@dataclass(frozen=True)
class Step:
    """What one step saw."""

    reward: float
    """Mean over the samples."""
    logp_error: float
    """Largest |difference| from float64 over the inner steps."""
    grad_error: float
    """Largest relative norm of the difference from float64, at the logits."""


class Trainer:
    """A policy in training; one seed on one device gives one run."""

    def __init__(self, device: torch.device, seed: int, kernel: str) -> None:
        torch.manual_seed(seed)
        self.device, self.kernel = device, kernel
        self.policy = Policy().to(device)
        self.explanations: tuple[Explanation, Explanation] | None = None
        """Of the forward and the backward, for the logits of the first update."""
        self._optimizer = torch.optim.AdamW(self.policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        self._prompts = torch.Generator().manual_seed(seed)
        self._samples = torch.Generator(device).manual_seed(seed)
        self.held_out = self._draw(HELD_OUT, held_out=True)

    def step(self) -> Step:
        """Roll out, score, and update INNER_STEPS times."""
        prompts = self._draw(PROMPTS, held_out=False).repeat_interleave(GROUP, 0)
        completions = self.complete(prompts)
        rewards = task.reward(prompts, completions)
        advantages = group_advantages(rewards)
        tokens = torch.cat([prompts, completions], 1)
        labels = make_labels(tokens)
        with torch.no_grad():
            old = self._logp(self.policy(tokens), labels)
        errors = [self._update(tokens, labels, old, advantages) for _ in range(INNER_STEPS)]
        return Step(rewards.mean().item(), *largest(errors))

    def evaluate(self) -> float:
        """Mean reward of greedy completions of the held-out prompts."""
        return task.reward(self.held_out, self.complete(self.held_out, greedy=True)).mean().item()

    @torch.no_grad()
    def complete(self, prompts: Tensor, greedy: bool = False) -> Tensor:
        """[B, COMPLETION_LENGTH] sampled, or the most likely, tokens; PAD after END."""
        tokens = prompts
        ended = torch.zeros_like(prompts[:, 0], dtype=torch.bool)
        for _ in range(task.COMPLETION_LENGTH):
            logits = self.policy(tokens)[:, -1]
            if greedy:
                chosen = logits.argmax(-1)
            else:
                chosen = torch.multinomial(logits.softmax(-1), 1, generator=self._samples)[:, 0]
            chosen = chosen.masked_fill(ended, task.PAD)
            ended = ended | (chosen == task.END)
            tokens = torch.cat([tokens, chosen[:, None]], 1)
        return tokens[:, task.PROMPT_LENGTH :]

    def _update(self, tokens: Tensor, labels: Tensor, old: Tensor, advantages: Tensor) -> tuple[float, float]:
        logits = self.policy(tokens)
        new = self._logp(logits, labels)
        for tensor in (logits, new):
            tensor.retain_grad()  # for the comparison alone
        loss = clipped_loss(new, old, advantages, labels != IGNORE)
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self._optimizer.step()
        if self.explanations is None:
            self.explanations = self._explain(logits)
        return compare(logits, labels, new)

    def _logp(self, logits: Tensor, labels: Tensor) -> Tensor:
        logp = fused_logp(logits, labels, ignore_index=IGNORE, kernel=self.kernel)
        assert isinstance(logp, Tensor)  # no return_* flag
        return logp

    def _explain(self, logits: Tensor) -> tuple[Explanation, Explanation]:
        # The backward has one fused kernel, so a forward kernel's name asks for nothing there.
        is_reference = self.kernel == _selection.REFERENCE
        backward = _selection.REFERENCE if is_reference else _selection.AUTO
        return (
            explain_selection(logits, kernel=self.kernel, op="logp_forward"),
            explain_selection(logits, kernel=backward, op="logp_backward"),
        )

    def _draw(self, count: int, held_out: bool) -> Tensor:
        drawn = task.sample_prompts(16 * count, self._prompts)
        return drawn[task.is_held_out(drawn) == held_out][:count].to(self.device)


def largest(errors: list[tuple[float, float]]) -> tuple[float, float]:
    """Each column's largest; NaN if there is one, which the built-in max may drop."""
    logp_error, grad_error = torch.tensor(errors, dtype=torch.float64).amax(0).tolist()
    return logp_error, grad_error


def group_advantages(rewards: Tensor) -> Tensor:
    """[B, 1] each sample's reward against the mean and deviation of the samples of its prompt."""
    groups = rewards.view(-1, GROUP)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)


def make_labels(tokens: Tensor) -> Tensor:
    """[B, T] the token that each column's logits predict; IGNORE outside the completion."""
    completion = tokens[:, task.PROMPT_LENGTH :]
    ends = (completion == task.END).long()
    labels = torch.full_like(tokens, IGNORE)
    labels[:, task.PROMPT_LENGTH - 1 : -1] = completion.masked_fill(ends.cumsum(1) > ends, IGNORE)
    return labels


def clipped_loss(new: Tensor, old: Tensor, advantages: Tensor, counted: Tensor) -> Tensor:
    """Mean over the counted tokens of -min(r A, clip(r) A) with r = exp(new - old).

    All are [B, T] but the advantages [B, 1].
    """
    ratio = (new - old).exp()
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    return -(torch.minimum(ratio * advantages, clipped * advantages) * counted).sum() / counted.sum()
