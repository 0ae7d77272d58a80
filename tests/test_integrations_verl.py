"""verl's function from PyPI, and a caller of it in verl, with and without the swap."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.stand_ins import imported

from fused_logp_hub import InvalidTokenIdError, integrations
from fused_logp_hub.integrations.verl import logprobs_from_logits

pytestmark = pytest.mark.filterwarnings("default")  # verl's own warnings are not this package's

ABSENT = ["ray", "prefix_grouper"]
B, T, V = 3, 5, 257


@pytest.fixture(scope="module")
def modules(require_package):
    require_package("verl")
    names = ["verl.utils.torch_functional", "verl.trainer.ppo.prefix_grouper_utils"]
    with imported("verl", names, ABSENT) as found:
        yield found


@pytest.fixture
def verl(modules):
    """``verl.utils.torch_functional`` as installed."""
    return modules[0]


@pytest.fixture
def flash_attention(monkeypatch):
    """As where flash-attn is installed, whose kernel verl would then call."""
    monkeypatch.setattr(integrations.verl, "_calls_flash_attention", lambda logits: True)


def make_inputs(device, dtype=torch.float32, shape=(B, T)):
    torch.manual_seed(0)
    logits = (4 * torch.randn(*shape, V, device=device)).to(dtype).requires_grad_()
    return logits, torch.randint(V, shape, device=device), torch.linspace(1, 2, B * T, device=device).view(shape)


@pytest.mark.parametrize("shape", [(B, T), (B * T,)], ids=str)
@pytest.mark.parametrize("inplace_backward", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_same_results(verl, device, dtype, inplace_backward, shape):
    """dtype and shape as verl's, values and gradients within what the dtype costs verl's own."""
    logits, labels, weights = make_inputs(device, dtype, shape)
    results = []
    for function in (logprobs_from_logits, verl.logprobs_from_logits):
        logp = function(logits * 1, labels, inplace_backward=inplace_backward)
        (grad,) = torch.autograd.grad((logp.double() * weights).sum(), logits)
        results.append((logp, grad.double()))
    (got, grad), (wanted, wanted_grad) = results
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
    torch.testing.assert_close(got, wanted, atol=tolerance, rtol=tolerance)
    assert (grad - wanted_grad).norm() <= tolerance * wanted_grad.norm()


SOURCES = {
    "a result": (lambda leaf: leaf * 1, True, True),
    "not asked for": (lambda leaf: leaf * 1, False, False),
    "a leaf": (lambda leaf: leaf, True, False),
    "a slice": (lambda leaf: torch.cat([leaf, leaf], 1)[:, :T], True, False),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_with_flash_attention(device, dtype, flash_attention, source):
    """float32 results, and the gradient takes the logits' memory where that is asked for and possible."""
    leaf, labels, weights = make_inputs(device, dtype)
    exact = leaf.detach().double().requires_grad_()
    wanted = exact.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    (wanted * weights).sum().backward()

    derive, inplace_backward, overwritten = SOURCES[source]
    logits = derive(leaf)
    before = logits.detach().clone()
    logp = logprobs_from_logits(logits, labels, inplace_backward=inplace_backward)
    assert logp.dtype == torch.float32
    torch.testing.assert_close(logp.double(), wanted, atol=1e-5, rtol=1e-6)
    (grad,) = torch.autograd.grad((logp * weights).sum(), logits)
    assert (grad.double() - exact.grad).norm() <= 4e-3 * exact.grad.norm()
    assert (grad.data_ptr() == logits.data_ptr()) == overwritten
    assert torch.equal(logits, before) == (not overwritten)


def test_only_cuda_logits_reach_flash_attention(monkeypatch):
    monkeypatch.setattr(integrations.verl, "_FLASH_ATTENTION", True)
    on_gpu = SimpleNamespace(is_cuda=True)
    assert integrations.verl._calls_flash_attention(on_gpu)
    assert not integrations.verl._calls_flash_attention(torch.zeros(1))
    monkeypatch.setenv("VERL_DISABLE_FLASH_ATTN_CE", "1")
    assert not integrations.verl._calls_flash_attention(on_gpu)


def test_labels_outside_the_vocabulary(device):
    """-100 gives 0, as with flash-attn; any other is an error, or NaN where the check would synchronise."""
    logits, labels, _ = make_inputs(device)
    labels[0, 1] = -100
    assert logprobs_from_logits(logits, labels)[0, 1] == 0
    labels[1, 2] = V
    if device == "cpu":
        with pytest.raises(InvalidTokenIdError, match=f"got {V} in row {T + 2}"):
            logprobs_from_logits(logits, labels)
    else:
        assert logprobs_from_logits(logits, labels).isnan().nonzero().tolist() == [[1, 2]]


class Grouper:
    """What verl's caller needs of prefix-grouper: two prompts' logits apart from their completions'."""

    def split_output(self, logits, include_prefix_last):
        ones = torch.ones(logits.shape[:2], device=logits.device)
        return logits[:, :2], ones[:, :2], logits[:, 1:], ones[:, 1:]

    def convert_padding(self, ids, mask, padding_mode):
        return ids


def test_a_caller_in_verl(modules, device, drop_in_calls):
    """Log-probabilities and the gradient at the model's output, and ours really ran."""
    verl, caller = modules
    logits, _, _ = make_inputs(device)
    ids = torch.randint(V, (B, T - 2), device=device)

    def step():
        logp, entropy, _ = caller.pg_forward(
            lambda **inputs: SimpleNamespace(logits=logits * 1), Grouper(), None, None, None, ids, None,
            temperature=0.7, calculate_entropy=True, entropy_fn=verl.entropy_from_logits,
        )  # fmt: skip
        (grad,) = torch.autograd.grad(logp.mean() + 0.1 * entropy.mean(), logits)
        return logp, entropy, grad

    wanted = step()
    assert not drop_in_calls
    with integrations.verl.patch:
        got = step()
    assert len(drop_in_calls) == 1
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_every_binding_is_swapped_and_restored(modules):
    originals = [module.logprobs_from_logits for module in modules]
    with integrations.verl.patch:
        assert all(module.logprobs_from_logits is logprobs_from_logits for module in modules)
    assert [module.logprobs_from_logits for module in modules] == originals
