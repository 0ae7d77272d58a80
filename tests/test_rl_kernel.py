"""RL-Kernel's names, one for one: dtypes, rules and which of them are differentiable."""

from __future__ import annotations

import pytest
import torch
from support.kernels import SUFFIX
from support.reference64 import assert_gradient, assert_values, backward64, forward64, same_bits

from fused_logp_hub import FusedLogpError, rl_kernel

# name: (indexed, kernel's name); the arguments are (logits, token_ids[, row_indices][, output]).
ALLOCATING = {
    "fused_logp": (False, "two_pass"),
    "fused_logp_sm90": (False, "sm90"),
    "fused_logp_forward_fp32": (False, "two_pass"),
    "fused_logp_forward_indexed_fp32": (True, "two_pass"),
    "fused_logp_forward_online_fp32": (False, "online"),
    "fused_logp_forward_online_indexed_fp32": (True, "online"),
}
OUT = {
    "fused_logp_forward_out": (False, "two_pass"),
    "fused_logp_forward_indexed_out": (True, "two_pass"),
    "fused_logp_forward_online_out": (False, "online"),
    "fused_logp_forward_online_indexed_out": (True, "online"),
    "deterministic_logp_forward_out": (False, "two_pass"),
}
WITH_LSE = {
    "fused_logp_forward_with_lse": (False, "two_pass"),
    "fused_logp_forward_indexed_with_lse": (True, "two_pass"),
    "fused_logp_forward_online_with_lse": (False, "online"),
    "fused_logp_forward_online_indexed_with_lse": (True, "online"),
    "fused_logp_sm90_with_lse": (False, "sm90"),
}
DETERMINISTIC = {"deterministic_logp_forward_fp32": (False, "two_pass")}
BACKWARD = ["fused_logp_backward", "fused_logp_backward_indexed"]
FORWARDS = {**ALLOCATING, **OUT, **WITH_LSE, **DETERMINISTIC}
HALVES = [torch.bfloat16, torch.float16, torch.float32]

# Few rows and many; V of whole 16-byte rows, and odd (another kernel of the same name).
SHAPES = [(8, 1000), (2100, 2056), (8, 1001)]


class Batch:
    def __init__(self, device: str, dtype: torch.dtype, n: int = 8, v: int = 1000) -> None:
        if device == "cpu" and n > 1000:
            pytest.skip("about the GPU's kernels for many rows")
        torch.manual_seed(n + v)
        self.logits = torch.randn(n, v, device=device).mul_(3).to(dtype)
        self.ids = torch.randint(v, (n,), device=device)
        # labels outside [0, V), -100 among them, give 0 on every path
        self.ids[:4] = torch.tensor([-100, -1, v, 2**31], device=device)
        self.rows = torch.arange(1, n, 2, device=device)
        self.output = torch.full((n,), 7.0, device=device)

    def call(self, name: str, logits: torch.Tensor | None = None):
        indexed, _ = FORWARDS[name]
        args = [self.logits if logits is None else logits, self.ids]
        args += [self.rows] * indexed + [self.output] * (name in OUT)
        return getattr(rl_kernel, name)(*args)

    def expected(self, indexed: bool):
        return forward64(self.logits, self.ids, ignore_index=None, row_indices=self.rows if indexed else None)

    def gradient(self, g: torch.Tensor, indexed: bool):
        rows = self.rows if indexed else None
        return backward64(g, None, self.logits, self.ids, ignore_index=None, row_indices=rows)


def assert_logp(logp, expected, zero_rows=slice(0, 4)):
    assert_values("logp", logp, expected.logp, torch.float32)
    assert (logp[zero_rows] == 0).all()
    assert (logp[expected.left_out] == 0).all()


def assert_symbol(ran, name, dtype, logits):
    """On the GPU the named algorithm ran; "sm90" is what the package chooses, the fastest that reads once."""
    if not logits.is_cuda:
        assert not ran
        return
    _, kernel = FORWARDS[name]
    (symbol,) = [s for s in ran if s.startswith("logp_forward")]
    once = "ring4_shifted" if logits.shape[1] % 8 else "staged"
    part = "two_pass" if kernel == "two_pass" else once
    assert symbol == f"logp_forward_{part}_{SUFFIX[dtype]}"


def test_every_name_is_there():
    """And tested here: the extension's ten, the pull request's, the deterministic two."""
    assert set(rl_kernel.__all__) == {*FORWARDS, *BACKWARD}
    assert all(callable(getattr(rl_kernel, name)) for name in rl_kernel.__all__)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=SUFFIX.get)
@pytest.mark.parametrize("name", [n for n in (*ALLOCATING, *DETERMINISTIC) if n != "fused_logp"])
def test_float32_forwards(device, name, dtype, shape, ran):
    batch = Batch(device, dtype, *shape)
    logp = batch.call(name)
    assert logp.dtype == torch.float32
    assert_logp(logp, batch.expected(FORWARDS[name][0]))
    assert_symbol(ran, name, dtype, batch.logits)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=SUFFIX.get)
def test_fused_logp_has_the_dtype_of_the_logits(device, dtype, shape, ran):
    batch = Batch(device, dtype, *shape)
    logp = batch.call("fused_logp")
    assert_symbol(ran, "fused_logp", dtype, batch.logits)
    assert logp.dtype == dtype
    # the float32 result, rounded once
    assert same_bits(logp, batch.call("fused_logp_forward_fp32").to(dtype))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=SUFFIX.get)
@pytest.mark.parametrize("name", OUT)
def test_out_forwards(device, name, dtype, shape, ran):
    """The output is filled everywhere, unlisted rows included, and returned."""
    batch = Batch(device, dtype, *shape)
    assert batch.call(name) is batch.output
    assert_logp(batch.output, batch.expected(FORWARDS[name][0]))
    assert_symbol(ran, name, dtype, batch.logits)
    # the seed takes an output in the logits' dtype as well
    full, batch.output = batch.output, torch.full_like(batch.output, 7.0).to(dtype)
    assert batch.call(name) is batch.output
    assert same_bits(batch.output, full.to(dtype))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=SUFFIX.get)
@pytest.mark.parametrize("name", WITH_LSE)
def test_with_lse_and_backward(device, name, dtype, shape, ran):
    """(logp, row_max, log_sum), then the gradient from them, as the pull request composes the two."""
    batch, indexed = Batch(device, dtype, *shape), WITH_LSE[name][0]
    results = batch.call(name, batch.logits.clone().requires_grad_())
    assert type(results) is tuple
    assert all(t.dtype == torch.float32 and not t.requires_grad for t in results)
    logp, row_max, log_sum = results
    expected = batch.expected(indexed)
    assert_logp(logp, expected)
    assert_values("row_max", row_max, expected.row_max, torch.float32)
    assert_values("log_sum", log_sum, expected.log_sum, torch.float32)
    assert_symbol(ran, name, dtype, batch.logits)
    g = torch.randn(shape[0], device=device)
    if indexed:
        grad = rl_kernel.fused_logp_backward_indexed(g, batch.logits, batch.ids, row_max, log_sum, batch.rows)
        assert (grad[0::2] == 0).all()
    else:
        grad = rl_kernel.fused_logp_backward(g, batch.logits, batch.ids, row_max, log_sum)
    assert_gradient(grad, batch.gradient(g, indexed), dtype)
    assert (grad[:4] == 0).all()


@pytest.mark.parametrize("g_dtype", [torch.bfloat16, torch.float32, torch.float64], ids=SUFFIX.get)
def test_backward_takes_any_gradient(device, g_dtype):
    """Of stride 0, of any float dtype, and requiring grad itself, as autograd may pass it."""
    batch = Batch(device, torch.bfloat16)
    _, row_max, log_sum = batch.call("fused_logp_forward_with_lse")
    g = torch.full((1,), 0.3, device=device, dtype=g_dtype).expand(8).requires_grad_()
    grad = rl_kernel.fused_logp_backward(g, batch.logits.requires_grad_(), batch.ids, row_max, log_sum)
    assert not grad.requires_grad
    batch.logits.requires_grad_(False)
    assert_gradient(grad, batch.gradient(g, False), torch.bfloat16)


@pytest.mark.parametrize("dtype", HALVES, ids=SUFFIX.get)
@pytest.mark.parametrize("name", ALLOCATING)
def test_allocating_functions_are_differentiable(device, name, dtype, ran):
    batch, indexed = Batch(device, dtype), ALLOCATING[name][0]
    leaf = batch.logits.clone().requires_grad_()
    logp = batch.call(name, leaf)
    assert logp.requires_grad
    g = torch.randn(8, device=device).to(logp.dtype)
    (grad,) = torch.autograd.grad(logp, leaf, g)
    assert_gradient(grad, batch.gradient(g, indexed), dtype)
    assert (grad[:4] == 0).all()
    if indexed:
        assert (grad[0::2] == 0).all()
    if device == "cuda":
        assert ran[-1] == f"logp_backward_eager_{SUFFIX[dtype]}"


@pytest.mark.parametrize("name", ALLOCATING)
def test_no_grad_results_stay_as_they_were(device, name):
    batch = Batch(device, torch.bfloat16)
    with_grad = batch.call(name, batch.logits.clone().requires_grad_())
    with torch.no_grad():
        without = batch.call(name, batch.logits.clone().requires_grad_())
    assert not without.requires_grad
    assert same_bits(with_grad.detach(), without)


@pytest.mark.parametrize("name", [*OUT, *DETERMINISTIC])
def test_forward_only_functions(device, name, ran):
    """An error while gradients would be needed, with nothing launched or written; fine under no_grad."""
    batch = Batch(device, torch.bfloat16)
    leaf = batch.logits.clone().requires_grad_()
    with pytest.raises(FusedLogpError, match=r"^logits: expected no gradient to be required"):
        batch.call(name, leaf)
    assert not [s for s in ran if s.startswith("logp_")]
    assert (batch.output == 7).all()
    with torch.no_grad():
        logp = batch.call(name, leaf)
    assert not logp.requires_grad
    assert_logp(logp, batch.expected(FORWARDS[name][0]))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", [n for n, (indexed, _) in FORWARDS.items() if indexed])
def test_row_indices(device, name, index_dtype):
    """Duplicates count once, entries outside [0, N) are skipped, none listed gives zeros."""
    batch = Batch(device, torch.float32)
    for rows in ([5, 5, 7], [-1, 6, 8, 2**31 - 1], []):
        batch.rows = torch.tensor(rows, device=device, dtype=index_dtype)
        result = batch.call(name)
        assert_logp(result[0] if name in WITH_LSE else result, batch.expected(True))


@pytest.mark.parametrize("name", FORWARDS)
def test_labels_of_either_width(device, name):
    """int32 labels, and every label outside: all 0, and -100 is no special case."""
    batch = Batch(device, torch.bfloat16)
    batch.ids = torch.tensor([0, 999, 1000, -1, -100, 2**31 - 1, -(2**31), 5], device=device, dtype=torch.int32)
    result = batch.call(name)
    logp = result[0] if name in WITH_LSE else result
    expected = batch.expected(FORWARDS[name][0]).logp
    assert (logp[2:7] == 0).all()
    torch.testing.assert_close(logp.double(), expected, rtol=1e-2 if name == "fused_logp" else 1e-6, atol=1e-5)


@pytest.mark.parametrize("name", FORWARDS)
def test_only_two_dimensions(device, name):
    """The seed's functions take [N, V]; other shapes are an error, not a guess."""
    batch = Batch(device, torch.float32)
    batch.logits, batch.ids = batch.logits.unsqueeze(0), batch.ids.unsqueeze(0)
    with pytest.raises(ValueError, match=r"^logits: expected logits"):
        batch.call(name)
