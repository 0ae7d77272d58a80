"""One GRPO loss and its gradient, on made-up logits. In a trainer they come from the policy."""

import torch

from fused_logp_hub import fused_logp

IGNORE = -100


def make_labels(tokens, prompt_length, pad_id):
    """[B, T]: the next token where it belongs to the completion, IGNORE everywhere else."""
    labels = tokens.roll(-1, dims=1)
    labels[:, -1] = IGNORE  # nothing follows the last token
    labels[:, : prompt_length - 1] = IGNORE  # the prompt is given, not chosen
    return labels.masked_fill(labels == pad_id, IGNORE)


def grpo_loss(logits, labels, old_logp, advantages, clip=0.2):
    """Clipped policy loss, the mean over completion tokens.

    logits [B, T, V] go in whole. Slicing them to the completion saves nothing: a row whose label is
    IGNORE is not read, its log-probability is 0 and its gradient is exactly 0.
    """
    logp = fused_logp(logits, labels, ignore_index=IGNORE)  # float32, also for bfloat16 logits
    ratio = (logp - old_logp).exp()  # 1 at ignored positions, as both are 0 there
    clipped = ratio.clamp(1 - clip, 1 + clip)
    per_token = -torch.minimum(ratio * advantages, clipped * advantages)
    counted = labels != IGNORE
    return (per_token * counted).sum() / counted.sum()


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch, length, prompt_length, vocab_size, pad_id = 8, 24, 10, 32000, 0
    tokens = torch.randint(1, vocab_size, (batch, length), device=device)
    tokens[::2, -4:] = pad_id  # some completions are shorter
    labels = make_labels(tokens, prompt_length, pad_id)
    logits = torch.randn(batch, length, vocab_size, device=device, dtype=torch.bfloat16)

    # The old policy's log-probabilities need no gradient, so nothing is kept for a backward.
    old_logp = fused_logp(logits, labels, ignore_index=IGNORE)

    # A group is one prompt's samples: here 8 of one prompt, each reward against the group's mean.
    rewards = torch.rand(batch, 1, device=device)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)

    for update in range(3):
        logits.requires_grad_()
        loss = grpo_loss(logits, labels, old_logp, advantages)
        (gradient,) = torch.autograd.grad(loss, logits)
        ignored = gradient[labels == IGNORE].abs().max()
        print(f"update {update}: loss {loss:+.4f}, gradient at ignored positions {ignored:.0f}")
        # Stands in for the optimiser's step.
        logits = (logits - 100 * gradient).detach()


if __name__ == "__main__":
    main()
