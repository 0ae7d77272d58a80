"""Scores the tokens of a Qwen2 causal LM, full vocabulary, and compares with float64.

Needs `transformers`; downloads nothing: the weights are random and the layers small, but the logits
have a real model's dtype, vocabulary and layout. Exit code 1 if an error leaves the contract.
"""

import argparse
import sys

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from fused_logp_hub import explain_selection, fused_logp

# Plausible ids of a chat in this vocabulary (three turns, control tokens included).
CHAT = [151644, 8948, 198, 2610, 525, 264, 10950, 17847, 13, 151645, 198]
CHAT += [151644, 872, 198, 9707, 11, 1879, 0, 151645, 198]
CHAT += [151644, 77091, 198, 108386, 151645, 198]


def make_model(device):
    # The wide initial weights spread the logits as training does; random ones are nearly uniform.
    config = Qwen2Config(
        vocab_size=151936, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.4,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).to(device, torch.bfloat16)


def make_ids(batch, vocab_size):
    """[batch, T]: the chat, then sequences spread over the vocabulary from id 0 to the last."""
    length = len(CHAT)
    spread = torch.linspace(0, vocab_size - 1, (batch - 1) * length).long()
    spread = spread[torch.randperm(len(spread))].view(batch - 1, length)
    return torch.cat([torch.tensor([CHAT]), spread])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=2, help="sequences, at least 2")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = make_model(options.device)
    ids = make_ids(options.batch, model.config.vocab_size).to(options.device)

    # All but the last position predict a token. The slice is a view, and it is read in place.
    logits = model(ids).logits[:, :-1]
    labels = ids[:, 1:]
    logits.retain_grad()  # for the comparison below; training does not need it
    logp = fused_logp(logits, labels)
    weights = torch.randn_like(logp)
    (logp * weights).sum().backward()

    exact = logits.detach().double().requires_grad_()
    wanted = exact.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    (wanted * weights).sum().backward()
    error = (logp - wanted).abs().detach()
    excess = (error - 1e-6 * wanted.abs()).max().item()
    grad_error = ((logits.grad - exact.grad).norm() / exact.grad.norm()).item()

    explanation = explain_selection(logits)
    print(f"logits   {list(logits.shape)}, {logits.dtype}, {logits.device}")
    print(f"strides  {logits.stride()}")
    print(f"ids      {ids.min()} to {ids.max()}")
    print(f"kernel   {explanation.kernel}; notes: {'; '.join(explanation.notes) or 'none'}")
    print(f"logp     {logp.min():.3f} to {logp.max():.3f}, mean {logp.mean():.3f}")
    print(f"logp     largest error {error.max():.1e} (bound 1e-5 + 1e-6 |logp|)")
    print(f"gradient relative norm error {grad_error:.1e} (bound 2e-3)")
    within = excess <= 1e-5 and grad_error <= 2e-3 and not explanation.notes
    print("within the contract" if within else "OUTSIDE the contract")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
