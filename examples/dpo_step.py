"""One DPO loss and its gradient, on made-up logits. In a trainer they come from the policy and the reference model."""

import torch
import torch.nn.functional as F

from fused_logp_hub import fused_logp

IGNORE = -100


def make_labels(tokens, prompt_length, lengths):
    """[B, T]: the next token where it belongs to the answer, IGNORE everywhere else."""
    labels = tokens.roll(-1, dims=1)
    position = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)  # of the label, in its sequence
    return labels.masked_fill((position < prompt_length) | (position >= lengths[:, None]), IGNORE)


def sequence_logp(logits, labels):
    """[B]: the log-probability of each answer. Ignored positions add exactly 0 and are not read."""
    return fused_logp(logits, labels, ignore_index=IGNORE).sum(-1)


def dpo_loss(policy_logits, reference_logp, labels, beta=0.1):
    """-log sigmoid of beta times how much more the policy prefers the chosen answer than the reference does.

    The batch holds the chosen answers first and then the rejected ones, in the same order.
    """
    margin = sequence_logp(policy_logits, labels) - reference_logp
    chosen, rejected = margin.chunk(2)
    return -F.logsigmoid(beta * (chosen - rejected)).mean(), (chosen > rejected).float().mean()


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pairs, length, prompt_length, vocab_size = 4, 24, 10, 32000
    tokens = torch.randint(vocab_size, (2 * pairs, length), device=device)
    tokens[pairs:, :prompt_length] = tokens[:pairs, :prompt_length]  # a pair answers the same prompt
    lengths = torch.randint(prompt_length + 4, length + 1, (2 * pairs,), device=device)
    labels = make_labels(tokens, prompt_length, lengths)
    logits = torch.randn(2 * pairs, length, vocab_size, device=device, dtype=torch.bfloat16)

    # The reference model's log-probabilities need no gradient, so nothing is kept for a backward.
    reference_logp = sequence_logp(logits + 0.1 * torch.randn_like(logits), labels)

    for update in range(4):
        logits.requires_grad_()
        loss, accuracy = dpo_loss(logits, reference_logp, labels)
        (gradient,) = torch.autograd.grad(loss, logits)
        ignored = gradient[labels == IGNORE].abs().max()
        print(
            f"update {update}: loss {loss:.4f}, chosen preferred {accuracy:.0%}, gradient where ignored {ignored:.0f}"
        )
        # Stands in for the optimiser's step.
        logits = (logits - 100 * gradient).detach()


if __name__ == "__main__":
    main()
