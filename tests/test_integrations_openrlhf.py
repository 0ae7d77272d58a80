"""OpenRLHF's function from PyPI, and its actor, with and without the swap."""

from __future__ import annotations

import pytest
import torch
from support.stand_ins import imported

from fused_logp_hub import InvalidTokenIdError, integrations
from fused_logp_hub.integrations.openrlhf import log_probs_from_logits

pytestmark = pytest.mark.filterwarnings("default")  # OpenRLHF's own warnings are not this package's

ABSENT = ["deepspeed", "flash_attn.bert_padding", "flash_attn.utils.distributed"]
B, T, V = 3, 5, 257


@pytest.fixture(scope="module")
def modules(require_package):
    require_package("openrlhf")
    with imported("openrlhf", ["openrlhf.models.utils", "openrlhf.models.actor"], ABSENT) as found:
        yield found


def make_inputs(device, dtype=torch.float32):
    torch.manual_seed(0)
    logits = (4 * torch.randn(B, T, V, device=device)).to(dtype).requires_grad_()
    return logits, torch.randint(V, (B, T), device=device)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_same_results(modules, device, dtype, temperature):
    """dtype and shape as OpenRLHF's, values and gradients within what the dtype costs OpenRLHF's own."""
    logits, labels = make_inputs(device, dtype)
    weights = torch.linspace(1, 2, B * T, device=device).view(B, T)
    results = []
    for function in (log_probs_from_logits, modules[0].log_probs_from_logits):
        logp = function(logits * 1, labels, temperature=temperature)
        (grad,) = torch.autograd.grad((logp.double() * weights).sum(), logits)
        results.append((logp, grad.double()))
    (got, grad), (wanted, wanted_grad) = results
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
    torch.testing.assert_close(got, wanted, atol=tolerance, rtol=tolerance)
    assert (grad - wanted_grad).norm() <= tolerance * wanted_grad.norm()


def test_the_logits_are_not_written(device):
    """OpenRLHF's own function divides them by the temperature in place."""
    logits, labels = make_inputs(device)
    before = logits.detach().clone()
    log_probs_from_logits(logits, labels, temperature=0.7)
    assert torch.equal(logits, before)


def test_labels_outside_the_vocabulary(device):
    """-100 gives 0, as with flash-attn; any other is an error, or NaN where the check would synchronise."""
    logits, labels = make_inputs(device)
    labels[0, 1] = -100
    assert log_probs_from_logits(logits, labels)[0, 1] == 0
    labels[1, 2] = V
    if device == "cpu":
        with pytest.raises(InvalidTokenIdError, match=f"got {V} in row {T + 2}"):
            log_probs_from_logits(logits, labels)
    else:
        assert log_probs_from_logits(logits, labels).isnan().nonzero().tolist() == [[1, 2]]


def test_the_actor(modules, device, drop_in_calls):
    """A tiny causal LM in OpenRLHF's actor: the same log-probabilities and gradients, and ours really ran."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.4,
    )  # fmt: skip
    actor = modules[1].Actor(LlamaForCausalLM(config).to(device), temperature=0.7)
    actor.packing_samples = False  # which the actor sets only for a model that it loads itself
    tokens = torch.randint(V, (B, T), device=device)
    mask = torch.ones_like(tokens)

    def step():
        logp = actor(tokens, mask[:, :3], attention_mask=mask)
        actor.zero_grad()
        logp.mean().backward()
        return [logp, *(p.grad.clone() for p in actor.parameters())]

    wanted = step()
    assert not drop_in_calls
    with integrations.openrlhf.patch:
        got = step()
    assert len(drop_in_calls) == 1
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


def test_every_binding_is_swapped_and_restored(modules):
    originals = [module.log_probs_from_logits for module in modules]
    with integrations.openrlhf.patch:
        assert all(module.log_probs_from_logits is log_probs_from_logits for module in modules)
    assert [module.log_probs_from_logits for module in modules] == originals
