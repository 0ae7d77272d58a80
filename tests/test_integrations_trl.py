"""TRL's functions and trainers from PyPI, with and without the swap."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from fused_logp_hub import ArgumentError, InvalidTokenIdError, integrations

# The trainers' own warnings are not this package's.
pytestmark = pytest.mark.filterwarnings("default")

FUNCTIONS = ["selective_log_softmax", "selective_log_softmax_and_entropy", "entropy_from_logits"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
B, T, V, K = 3, 5, 257, 4


@pytest.fixture
def trl(require_package):
    """``trl.trainer.utils`` as installed."""
    require_package("trl")
    import trl.trainer.utils

    return trl.trainer.utils


def make_logits(dtype, device):
    torch.manual_seed(0)
    return (4 * torch.randn(B, T, V, device=device)).to(dtype)


MASKS = {
    "no mask": None,
    "bool mask": torch.tensor([[1, 1, 0, 1, 0]] * B, dtype=torch.bool),
    "int mask": torch.tensor([[0, 1, 1, 1, 1]] * B),
    "float mask": torch.tensor([[0.0, 1, 0, 0, 1]] * B),
}
CASES = {
    "selective_log_softmax": [
        {"temperature": temperature, "mask": mask, "k": k}
        for temperature in (1.0, 0.7)
        for mask in MASKS
        for k in (None, K)
    ],
    "selective_log_softmax_and_entropy": [
        {"temperature": temperature, "mask": mask, "entropy_requires_grad": grad}
        for temperature in (1.0, 0.7)
        for mask in MASKS
        for grad in (True, False)
    ],
    "entropy_from_logits": [{"chunk_size": 128}, {"chunk_size": 2}],
}


def call(function, logits, mask="no mask", k=None, **options):
    """The function on this case's ids and mask; its results as a tuple."""
    if "chunk_size" not in options:
        torch.manual_seed(1)
        options["index"] = torch.randint(V, (B, T) if k is None else (B, T, k)).to(logits.device)
        row_mask = MASKS[mask]
        if row_mask is not None:
            row_mask = row_mask.to(logits.device)
            row_mask = row_mask if k is None else row_mask[..., None].expand(B, T, k)
        options["row_mask"] = row_mask
    result = function(logits, **options)
    return result if isinstance(result, tuple) else (result,)


def gradient(results, logits):
    """Of a sum whose weights tell the elements apart."""
    total = sum((r.double() * torch.linspace(1, 2, r.numel(), device=r.device).view_as(r)).sum() for r in results)
    return torch.autograd.grad(total, logits)[0].double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "case"), [(n, c) for n in FUNCTIONS for c in CASES[n]], ids=str)
def test_same_results(trl, device, dtype, name, case):
    """dtype, shape and graph as TRL's, values and gradients within what the dtype costs TRL's own."""
    ours, theirs = getattr(integrations.trl, name), getattr(trl, name)
    logits = make_logits(dtype, device).requires_grad_()
    got, wanted = call(ours, logits, **case), call(theirs, logits, **case)
    exact = call(theirs, logits.detach().double(), **case)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 3e-2)
    for g, w, e in zip(got, wanted, exact, strict=True):
        assert (g.dtype, g.shape, g.requires_grad) == (w.dtype, w.shape, w.requires_grad)
        torch.testing.assert_close(g.double(), w.double(), atol=8 * tolerance, rtol=tolerance)
        rounding = max(torch.finfo(g.dtype).eps, 1e-6 if dtype != torch.float64 else 0)
        torch.testing.assert_close(g.double(), e, atol=max(10 * rounding, 1e-12), rtol=rounding, check_dtype=False)
    grad, wanted_grad = gradient(got, logits), gradient(wanted, logits)
    assert (grad - wanted_grad).norm() <= tolerance * wanted_grad.norm()


def test_masked_rows_are_not_read(device):
    """Ids and logits there may be anything; TRL's mask is 0 where a row is left out."""
    logits = make_logits(torch.float32, device)
    logits[:, 2] = float("nan")
    logits.requires_grad_()
    index = torch.full((B, T), 7, device=device)
    index[:, 2] = -100
    row_mask = torch.ones(B, T, dtype=torch.int64, device=device)
    row_mask[:, 2] = 0
    logp, entropy = integrations.trl.selective_log_softmax_and_entropy(logits, index, row_mask=row_mask)
    assert (logp[:, 2] == 0).all()
    assert (entropy[:, 2] == 0).all()
    (grad,) = torch.autograd.grad((logp + entropy).sum(), logits)
    assert (grad[:, 2] == 0).all()
    assert grad.isfinite().all()


def test_entropy_with_columns_that_are_off(device):
    """A padded vocabulary, column 0 included: finite, where TRL's gives NaN, and the gradient there is 0."""
    logits = make_logits(torch.float32, device)
    logits[..., [0, -1]] = float("-inf")
    exact = logits[..., 1:-1].double().requires_grad_()
    logits.requires_grad_()
    entropy = integrations.trl.entropy_from_logits(logits)
    wanted = torch.distributions.Categorical(logits=exact).entropy()
    torch.testing.assert_close(entropy.double(), wanted, atol=1e-5, rtol=1e-5)
    grad, wanted_grad = gradient((entropy,), logits), gradient((wanted,), exact)
    assert (grad[..., [0, -1]] == 0).all()
    torch.testing.assert_close(grad[..., 1:-1], wanted_grad, atol=1e-5, rtol=1e-5)


def test_a_wrong_id_is_not_a_log_probability(device):
    logits, index = make_logits(torch.float32, device), torch.zeros(B, T, dtype=torch.int64, device=device)
    index[1, 1] = -100
    if device == "cpu":
        with pytest.raises(InvalidTokenIdError, match=f"got -100 in row {T + 1}"):
            integrations.trl.selective_log_softmax(logits, index)
    else:
        logp = integrations.trl.selective_log_softmax(logits, index)
        assert logp.isnan().nonzero().tolist() == [[1, 1]]


@pytest.mark.parametrize("temperature", [0, -1.0])
def test_temperature(device, temperature):
    """TRL's ValueError is a ValueError here."""
    logits, index = make_logits(torch.float32, device), torch.zeros(B, T, dtype=torch.int64, device=device)
    with pytest.raises(ArgumentError) as error:
        integrations.trl.selective_log_softmax(logits, index, temperature=temperature)
    assert isinstance(error.value, ValueError)


def test_every_binding_is_swapped_and_restored(trl):
    """In the defining module, in trainers imported before, and in one imported while it is in place."""
    import trl.experimental.cpo.cpo_trainer as before

    sys.modules.pop("trl.experimental.orpo.orpo_trainer", None)
    original = trl.selective_log_softmax
    with integrations.trl.patch:
        import trl.experimental.orpo.orpo_trainer as inside

        for name in FUNCTIONS:
            assert getattr(trl, name) is getattr(integrations.trl, name)
        assert before.selective_log_softmax is integrations.trl.selective_log_softmax
        assert inside.selective_log_softmax is integrations.trl.selective_log_softmax
    for module in (trl, before, inside):
        assert module.selective_log_softmax is original
    ours = {getattr(integrations.trl, name) for name in FUNCTIONS}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "trl":
            assert not [a for a, v in vars(module).items() if callable(v) and v in ours], name


# ---- Real trainers.

WORDS = [f"word{i}" for i in range(20)]
STEPS = 4


def make_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", bos_token="<eos>", unk_token="<unk>"
    )


def make_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    # no biases: a key's has a gradient of rounding errors only, which Adam would scale up
    config = LlamaConfig(
        vocab_size=3 + len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.4, pad_token_id=0, eos_token_id=1,
        bos_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def make_dataset(columns):
    from datasets import Dataset

    generator = torch.Generator().manual_seed(0)

    def text():
        length = int(torch.randint(3, 7, (), generator=generator))
        return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (length,), generator=generator))

    return Dataset.from_list([{column: text() for column in columns} for _ in range(8)])


def make_trainer(name, folder, device):
    module = importlib.import_module(f"trl.experimental.{name.lower()}")
    base, config = getattr(module, f"{name}Trainer"), getattr(module, f"{name}Config")

    class Recording(base):
        """Keeps each step's loss unrounded."""

        losses = ()

        def compute_loss(self, *args, **kwargs):
            result = super().compute_loss(*args, **kwargs)
            loss = result[0] if isinstance(result, tuple) else result
            self.losses = (*self.losses, loss.item())
            return result

    options = config(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=2, learning_rate=5e-3, max_length=32,
        bf16=False, use_cpu=device == "cpu", report_to="none", save_strategy="no",
        disable_tqdm=True, seed=0,
    )  # fmt: skip
    columns = ["prompt", "chosen", "rejected"] + (["reference"] if name == "TPO" else [])
    tokenizer = make_tokenizer()
    return Recording(make_model(), options, train_dataset=make_dataset(columns), processing_class=tokenizer)


@pytest.mark.parametrize("name", ["CPO", "ORPO", "TPO"])
def test_a_trainer_has_the_same_losses(trl, drop_in_calls, ran, device, tmp_path, name):
    """Each step's loss, and the weights after the last, so the gradients are the same too."""
    plain = make_trainer(name, tmp_path / "plain", device)
    plain.train()
    assert not drop_in_calls
    assert not ran

    patched = make_trainer(name, tmp_path / "patched", device)
    with integrations.trl.patch:
        patched.train()
    assert len(drop_in_calls) == STEPS
    assert len(ran) == (0 if device == "cpu" else 2 * STEPS)  # a forward and a backward each

    assert len(plain.losses) == STEPS
    assert max(plain.losses) - min(plain.losses) > 1e-2  # it trains
    torch.testing.assert_close(patched.losses, plain.losses, atol=1e-4, rtol=0)
    for ours, theirs in zip(patched.model.parameters(), plain.model.parameters(), strict=True):
        assert ours.device.type == device
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
