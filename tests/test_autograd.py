"""fused_logp as a citizen of PyTorch: autograd, torch.compile, the registered operators (g1 to g11)."""

from __future__ import annotations

import shutil

import pytest
import torch
from support.kernels import SUFFIX
from support.reference64 import assert_gradient, assert_values, backward64, forward64

import fused_logp_hub
from fused_logp_hub import LogpResult, SecondDerivativeError, fused_logp

# Compilers and checkers warn about themselves (TF32, deprecated parts); what they run is ours.
their_warnings = pytest.mark.filterwarnings("default")
DTYPES = [torch.bfloat16, torch.float32, torch.float64]
ops = torch.ops.fused_logp_hub


def batch(device, n=6, v=37, dtype=torch.float32, seed=0):
    """V odd, so that rows lie at every alignment; small, since every line here is about plumbing."""
    torch.manual_seed(seed)
    x = torch.randn(n, v, device=device).mul_(2).to(dtype).requires_grad_()
    return x, torch.randint(v, (n,), device=device)


def assert_same_gradient(grad, upstream, x, ids, **kwargs):
    assert_gradient(grad, backward64(upstream, None, x, ids, **kwargs), x.dtype)


# ---- Upstream gradients.


@pytest.mark.parametrize("dtype", DTYPES, ids=SUFFIX.get)
def test_g1_sum(device, dtype):
    """The upstream gradient of a sum is one number of stride 0."""
    x, ids = batch(device, n=64, v=1000, dtype=dtype)
    fused_logp(x, ids).sum().backward()
    assert_same_gradient(x.grad, torch.ones(64, device=device), x, ids)


def test_g2_every_row_has_its_own_weight(device):
    x, ids = batch(device, n=64)
    g = torch.arange(64.0, device=device)
    (grad,) = torch.autograd.grad(fused_logp(x, ids), x, g)
    assert_same_gradient(grad, g, x, ids)
    assert (grad[0] == 0).all()


def test_g2_half_the_rows_ignored(device):
    x, ids = batch(device, n=64)
    ids[::2] = -100
    g = torch.randn(64, device=device)
    (grad,) = torch.autograd.grad(fused_logp(x, ids), x, g)
    assert_same_gradient(grad, g, x, ids)
    assert (grad[::2] == 0).all()
    assert (grad[1::2] != 0).any(-1).all()


def test_g3_two_losses_on_the_same_logits(device):
    """The backward never works in place behind the user's back."""
    leaf, ids = batch(device)
    x = leaf * 1.0
    before = x.detach().clone()
    first = fused_logp(x, ids).sum()
    second = fused_logp(x, ids.roll(1), temperature=0.7).mul(2).sum()
    (first + second).backward()
    assert torch.equal(x, before)
    assert torch.equal(x.argmax(-1), before.argmax(-1))
    one = torch.ones(6, device=device)
    expected = (
        backward64(one, None, leaf, ids).grad + backward64(2 * one, None, leaf, ids.roll(1), temperature=0.7).grad
    )
    torch.testing.assert_close(leaf.grad.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=SUFFIX.get)
@pytest.mark.parametrize("dtype", DTYPES, ids=SUFFIX.get)
def test_upstream_gradient_of_any_dtype(device, dtype, out_dtype):
    """It has the dtype of logp, whatever that of the logits is."""
    x, ids = batch(device, dtype=dtype)
    logp = fused_logp(x, ids, out_dtype=out_dtype)
    assert logp.dtype == out_dtype
    g = torch.randn(6, device=device).to(out_dtype)
    (grad,) = torch.autograd.grad(logp, x, g)
    assert_same_gradient(grad, g, x, ids)


@pytest.mark.parametrize("g_dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=SUFFIX.get)
@pytest.mark.parametrize("layout", ["contiguous", "stride 0", "stride 3", "transposed"])
def test_backward_function_takes_any_gradient(device, layout, g_dtype):
    """Strides and dtype of both gradients, on two leading dimensions and K ids."""
    torch.manual_seed(1)
    x = torch.randn(4, 3, 50, device=device)
    ids = torch.randint(50, (4, 3, 2), device=device)
    forward = fused_logp(x, ids, return_lse=True, return_entropy=True)
    g, h = (
        torch.randn(4, 3, 2, device=device).to(g_dtype),
        torch.randn(4, 3, device=device).to(g_dtype),
    )
    if layout == "stride 0":
        g, h = g[:1, :1, :1].expand(4, 3, 2), h[:1, :1].expand(4, 3)
    elif layout == "stride 3":
        g, h = g.repeat_interleave(3, -1)[..., ::3], h.repeat_interleave(3, -1)[..., ::3]
    elif layout == "transposed":
        g, h = g.permute(2, 1, 0).contiguous().permute(2, 1, 0), h.t().contiguous().t()
    grad = fused_logp_hub.fused_logp_backward(
        g, x, ids, forward.row_max, forward.log_sum, entropy=forward.entropy, grad_entropy=h
    )
    assert_gradient(grad, backward64(g, h, x, ids), torch.float32)


def test_gradient_that_is_negated_lazily(device):
    """As one that comes through complex numbers is."""
    x, ids = batch(device)
    weights = torch.randn(6, dtype=torch.complex64, device=device)
    negated = []

    def gradient(logp):
        logp.register_hook(lambda g: negated.append(g.is_neg()))
        loss = (torch.complex(torch.zeros_like(logp), logp).conj() * weights).real.sum()
        return torch.autograd.grad(loss, x)[0]

    expected = gradient(x.log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1))
    torch.testing.assert_close(gradient(fused_logp(x, ids)), expected)
    assert all(negated)


def test_statistics_that_are_negated_lazily(device):
    x, ids = batch(device)
    x, g = x.detach(), torch.ones(len(ids), device=device)
    r = fused_logp(x, ids, return_lse=True)
    lazy = [torch._neg_view(-t) for t in (r.row_max, r.log_sum)]
    grad = fused_logp_hub.fused_logp_backward(g, x, ids, *lazy)
    assert_same_gradient(grad, g, x, ids)


def test_gradients_of_different_dtype(device):
    """grad_logp and grad_entropy need not agree."""
    x, ids = batch(device)
    x = x.detach()
    forward = fused_logp(x, ids, return_lse=True, return_entropy=True)
    g, h = torch.randn(6, device=device).bfloat16(), torch.randn(6, device=device).double()
    grad = fused_logp_hub.fused_logp_backward(
        g, x, ids, forward.row_max, forward.log_sum, entropy=forward.entropy, grad_entropy=h
    )
    assert_gradient(grad, backward64(g, h, x, ids), torch.float32)


def test_statistics_of_other_strides(device):
    """Saved statistics may come back as views."""
    x, ids = batch(device)
    x = x.detach()
    forward = fused_logp(x, ids, return_lse=True)
    store = torch.stack([forward.row_max, forward.log_sum], -1)
    grad = fused_logp_hub.fused_logp_backward(torch.ones(6, device=device), x, ids, store[:, 0], store[:, 1])
    assert_same_gradient(grad, torch.ones(6, device=device), x, ids)


def test_gradient_reaches_the_graph_above(device):
    """Through a projection, as in a model: the gradient's layout must suit what comes before."""
    torch.manual_seed(2)
    hidden = torch.randn(2, 3, 8, device=device, requires_grad=True)
    weight = torch.randn(8, 37, device=device, requires_grad=True)
    ids = torch.randint(37, (2, 3), device=device)
    fused_logp((hidden @ weight)[:, :-1], ids[:, 1:]).mean().backward()
    ours = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    torch.log_softmax((hidden @ weight)[:, :-1], -1).gather(-1, ids[:, 1:, None]).mean().backward()
    torch.testing.assert_close(ours, (hidden.grad, weight.grad), rtol=1e-5, atol=1e-6)


# ---- Results.


def test_result_without_flags_is_a_tensor(device):
    x, ids = batch(device)
    logp = fused_logp(x, ids)
    assert type(logp) is torch.Tensor
    assert logp.requires_grad


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(("lse", "entropy"), [(True, False), (False, True), (True, True)])
def test_result_with_flags(device, lse, entropy, grad):
    x, ids = batch(device)
    result = fused_logp(x.requires_grad_(grad), ids, return_lse=lse, return_entropy=entropy)
    assert type(result) is LogpResult
    assert LogpResult._fields == ("logp", "entropy", "row_max", "log_sum")
    assert (result.entropy is None) == (not entropy)
    assert (result.row_max is None, result.log_sum is None) == (not lse, not lse)
    assert result.logp.requires_grad == grad
    if entropy:
        assert result.entropy.requires_grad == grad
    if lse:
        assert not result.row_max.requires_grad
        assert not result.log_sum.requires_grad
        lse64 = torch.logsumexp(x.detach().double(), -1)
        torch.testing.assert_close((result.row_max + result.log_sum).double(), lse64, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(device, mode):
    x, ids = batch(device)
    with mode():
        result = fused_logp(x, ids, return_lse=True, return_entropy=True)
    assert not result.logp.requires_grad
    assert not result.entropy.requires_grad
    assert_values("logp", result.logp, forward64(x, ids).logp, torch.float32)


def test_inference_tensors(device):
    """Made under inference_mode: no version counter, nothing may be saved for a backward."""
    with torch.inference_mode():
        x, ids = batch(device)
        x = x.detach()
    assert x.is_inference()
    assert_values("logp", fused_logp(x, ids), forward64(x, ids).logp, torch.float32)


def test_parameters_are_tensors(device):
    x, ids = batch(device)
    parameter = torch.nn.Parameter(x.detach())
    fused_logp(parameter, ids).sum().backward()
    assert_same_gradient(parameter.grad, torch.ones(6, device=device), parameter, ids)


def test_only_the_entropy_is_used(device):
    x, ids = batch(device)
    fused_logp(x, ids, return_entropy=True).entropy.sum().backward()
    assert_gradient(x.grad, backward64(None, torch.ones(6, device=device), x, ids), torch.float32)


def test_temperature_and_ids_get_no_gradient(device):
    x, ids = batch(device)
    t = torch.full((6,), 0.7, device=device)
    fused_logp(x, ids, temperature=t).sum().backward()
    assert t.grad is None
    assert_same_gradient(x.grad, torch.ones(6, device=device), x, ids, temperature=t)


def test_logits_changed_before_the_backward(device):
    """Autograd's own protection: saved logits that were overwritten are an error, not a wrong gradient."""
    leaf, ids = batch(device)
    x = leaf * 1.0
    loss = fused_logp(x, ids).sum()
    x.add_(1.0)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
        loss.backward()


# ---- g5: nothing to do.


def test_g5_no_rows(device):
    x = torch.empty(0, 7, device=device, requires_grad=True)
    ids = torch.empty(0, dtype=torch.int64, device=device)
    result = fused_logp(x, ids, return_lse=True, return_entropy=True)
    assert all(t.shape == (0,) for t in result)
    (result.logp.sum() + result.entropy.sum()).backward()
    assert x.grad.shape == (0, 7)
    if device == "cuda":
        torch.cuda.synchronize()
    again, ids = batch(device)
    assert_values("logp", fused_logp(again, ids), forward64(again, ids).logp, torch.float32)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_g5_no_rows_listed(device, index_dtype):
    x, ids = batch(device)
    none = torch.empty(0, dtype=index_dtype, device=device)
    result = fused_logp(x, ids, row_indices=none, return_lse=True, return_entropy=True)
    assert all((t == 0).all() for t in result)
    (grad,) = torch.autograd.grad([result.logp.sum(), result.entropy.sum()], x)
    assert (grad == 0).all()
    if device == "cuda":
        torch.cuda.synchronize()
    assert (fused_logp(x, ids) != 0).all()


# ---- g11: once only.


@pytest.mark.parametrize("of", ["logits", "upstream"])
def test_g11_second_derivative(device, of):
    """By the logits (a gradient penalty) and by the upstream gradient (a Hessian-vector product)."""
    x, ids = batch(device)
    g = torch.ones(6, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(fused_logp(x, ids), x, g, create_graph=True)
    assert_same_gradient(grad, torch.ones(6, device=device), x, ids)  # the first one is right
    with pytest.raises(SecondDerivativeError, match=r"^fused_logp: expected to be differentiated once, got a second"):
        torch.autograd.grad(grad.square().sum(), x if of == "logits" else g)


def test_g11_second_derivative_of_the_entropy(device):
    x, ids = batch(device)
    result = fused_logp(x, ids, return_entropy=True)
    (grad,) = torch.autograd.grad(result.entropy.sum(), x, create_graph=True)
    with pytest.raises(SecondDerivativeError):
        grad.sum().backward()


def test_g11_second_derivative_of_the_operator(device):
    """The same through torch.ops, which compiled code and tensor subclasses use."""
    x, ids = batch(device)
    logp, statistics, entropy = ops.logp_forward(x, ids, None, 1.0, None, -100, "zero", torch.float32, False, "auto")
    assert logp.requires_grad
    assert not statistics.requires_grad
    assert entropy.shape == (0,)
    (grad,) = torch.autograd.grad(logp.sum(), x, create_graph=True)
    with pytest.raises(SecondDerivativeError):
        grad.sum().backward()


@their_warnings
def test_g11_second_derivative_compiled(device):
    x, ids = batch(device)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: fused_logp(x, ids), backend="aot_eager", fullgraph=True)
    (grad,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"double backward|differentiated once"):
        grad.sum().backward()


# ---- Gradients against finite differences.


@their_warnings
@pytest.mark.parametrize("kwargs", [{}, {"temperature": 0.7}, {"ignore_index": 2}, {"temperature": "rows"}], ids=str)
def test_gradcheck(device, kwargs):
    x, ids = batch(device, n=4, v=7, dtype=torch.float64)
    ids = torch.stack([ids, ids, ids.roll(1)], -1)
    ids[0, 0] = 2
    if kwargs.get("temperature") == "rows":
        kwargs = {"temperature": torch.rand(4, device=device) + 0.5}

    def values(x):
        result = fused_logp(x, ids, return_entropy=True, **kwargs)
        return result.logp, result.entropy

    assert torch.autograd.gradcheck(values, (x,))


# ---- g10: torch.compile and the operators.

BACKENDS = [
    pytest.param("cpu", "aot_eager"),
    pytest.param("cuda", "aot_eager", marks=pytest.mark.gpu),
    pytest.param("cuda", "inductor", marks=pytest.mark.gpu),
]


def compile_counting(function, backend):
    """The function compiled without graph breaks for any N, and a list that grows with each compilation."""
    if backend == "inductor" and not shutil.which("cc") and not shutil.which("gcc"):
        pytest.skip("inductor needs a C compiler for its launchers")
    torch._dynamo.reset()
    compilations = []
    inner = torch._dynamo.lookup_backend(backend)

    def counting(graph, inputs):
        compilations.append(graph)
        return inner(graph, inputs)

    return torch.compile(function, backend=counting, fullgraph=True, dynamic=True), compilations


@their_warnings
@pytest.mark.parametrize(
    ("device", "backend", "kernel"),
    [
        *(pytest.param(*b.values, "auto", marks=b.marks) for b in BACKENDS),
        *(pytest.param("cuda", "aot_eager", k, marks=pytest.mark.gpu) for k in ("online", "two_pass", "tma")),
    ],
)
@pytest.mark.parametrize("form", ["ids [N]", "ids [N, K]"])
def test_g10_compile(device, backend, kernel, form, ran):
    """T = 0.7 and a different N each time: one graph, no breaks, values and gradients as the oracle's."""
    if kernel == "tma" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the bulk copy needs compute capability 9.0")
    compiled, compilations = compile_counting(
        lambda x, ids: fused_logp(x, ids, temperature=0.7, return_entropy=True, return_lse=True, kernel=kernel),
        backend,
    )
    for n in (5, 8, 300):  # 300: the kernel for many rows
        x, ids = batch(device, n=n, v=1000, dtype=torch.bfloat16, seed=n)
        if form == "ids [N, K]":
            ids = torch.stack([ids, ids.roll(1)], -1)
        result = compiled(x, ids)
        expected = forward64(x, ids, temperature=0.7)
        for name in ("logp", "entropy", "row_max", "log_sum"):
            assert_values(name, getattr(result, name), getattr(expected, name), x.dtype)
        g, h = torch.randn_like(result.logp), torch.randn_like(result.entropy)
        (grad,) = torch.autograd.grad([result.logp, result.entropy], x, [g, h])
        assert_gradient(grad, backward64(g, h, x, ids, temperature=0.7), x.dtype)
        if device == "cuda":
            assert len(ran) == 2, ran
            assert kernel in ("auto", "online") or kernel in ran[0]
            ran.clear()
    assert len(compilations) == 1


@their_warnings
@pytest.mark.parametrize(("device", "backend"), BACKENDS)
@pytest.mark.parametrize(
    "option",
    [
        "plain",
        "row_indices",
        "row_mask",
        "temperature",
        "out_dtype",
        "ignore_none",
        "nan",
        "two_dims",
        "no_grad",
        "raise",
    ],
)
def test_g10_compile_options(device, backend, option):
    """Every argument through the operator, with autograd."""
    torch.manual_seed(3)
    x = torch.randn(3, 5, 37, device=device, requires_grad=option != "no_grad")
    ids = torch.randint(37, (3, 5), device=device)
    ids[0, 0] = -100
    kwargs, reference = {}, {}
    if option == "row_indices":
        kwargs = {"row_indices": torch.tensor([1, 7, 7, 99], device=device)}
    elif option == "row_mask":
        kwargs = {"row_mask": torch.rand(3, 5, device=device) < 0.5}
    elif option == "temperature":
        kwargs = {"temperature": torch.rand(3, 5, device=device) + 0.5}
    elif option == "ignore_none":
        kwargs = {"ignore_index": None}
    elif option == "nan":
        ids[1, 1] = 37
        kwargs = {"on_invalid": "nan"}
    elif option == "two_dims":
        x = x.detach().transpose(0, 1).requires_grad_()
        ids = ids.t()
    elif option in ("out_dtype", "raise"):
        reference = {"out_dtype": torch.float64} if option == "out_dtype" else {"on_invalid": "raise"}
    compiled, _ = compile_counting(lambda x, ids, kwargs: fused_logp(x, ids, **kwargs, **reference), backend)
    logp = compiled(x, ids, kwargs)
    assert logp.dtype == reference.get("out_dtype", torch.float32)
    assert_values("logp", logp, forward64(x, ids, **kwargs).logp, torch.float32)
    if option == "no_grad":
        assert not logp.requires_grad
        return
    g = torch.randn_like(logp)
    (grad,) = torch.autograd.grad(logp, x, g)
    assert_gradient(grad, backward64(g, None, x, ids, **kwargs), torch.float32)


@their_warnings
def test_compiled_bits_are_eager_bits(device):
    x, ids = batch(device, n=16, v=1000, dtype=torch.bfloat16)
    compiled, _ = compile_counting(lambda x, ids: fused_logp(x, ids, temperature=0.7), "aot_eager")
    eager = fused_logp(x, ids, temperature=0.7)
    logp = compiled(x, ids)
    assert torch.equal(logp, eager)
    grads = [torch.autograd.grad(t.sum(), x)[0] for t in (logp, eager)]
    assert torch.equal(*grads)


@their_warnings
@pytest.mark.parametrize("shape", [(6,), (6, 1), (6, 3)], ids=str)
@pytest.mark.parametrize("entropy", [False, True])
def test_opcheck_forward(device, entropy, shape):
    x, _ = batch(device)
    ids = torch.randint(37, shape, device=device)
    mask = torch.tensor([1, 0, 1, 1, 0, 1], dtype=torch.bool, device=device)
    t = torch.rand(6, device=device) + 0.5
    for arguments in (
        (x, ids, None, 0.7, None, -100, "zero", torch.float32, entropy, "auto"),
        (x, ids, mask, 1.0, t, None, "nan", torch.bfloat16, entropy, "auto"),
        (
            x.detach().bfloat16().requires_grad_(),
            ids,
            mask,
            0.7,
            None,
            -100,
            "zero",
            torch.float32,
            entropy,
            "reference",
        ),
    ):
        torch.library.opcheck(ops.logp_forward, arguments)


@their_warnings
@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["online", "two_pass", "tma"])
def test_opcheck_kernels(kernel, ran):
    if kernel == "tma" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the bulk copy needs compute capability 9.0")
    x, ids = batch("cuda", v=64)  # rows aligned to 16 bytes
    torch.library.opcheck(ops.logp_forward, (x, ids, None, 0.7, None, -100, "zero", torch.float32, True, kernel))
    assert [s for s in ran if s.startswith("logp_forward")]


@their_warnings
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "expanded", "stride 2"])
def test_opcheck_backward(device, layout):
    """The fake gradient's strides must be those of the real one, for every layout of the logits."""
    torch.manual_seed(4)
    x = {
        "contiguous": torch.randn(3, 4, 37, device=device),
        "transposed": torch.randn(4, 3, 37, device=device).transpose(0, 1),
        "expanded": torch.randn(1, 1, 37, device=device).expand(3, 4, 37),
        "stride 2": torch.randn(3, 4, 74, device=device)[..., ::2],
    }[layout]
    ids = torch.randint(37, (3, 4, 2), device=device)
    forward = fused_logp(x, ids, return_lse=True, return_entropy=True)
    statistics = torch.stack([forward.row_max, forward.log_sum])
    g, h = torch.randn(3, 4, 2, device=device), torch.randn(3, 4, device=device)
    for entropy in (None, forward.entropy):
        arguments = (
            g,
            None if entropy is None else h,
            x,
            ids,
            statistics,
            entropy,
            None,
            0.7,
            None,
            -100,
            "zero",
            "auto",
        )
        torch.library.opcheck(ops.logp_backward, arguments)


@their_warnings
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_opcheck_row_mask(device, index_dtype):
    indices = torch.tensor([3, 0, 3, -1, 9], dtype=index_dtype, device=device)
    torch.library.opcheck(ops.row_mask_from_indices, (indices, 6))
    mask = ops.row_mask_from_indices(indices, 6)
    assert mask.tolist() == [True, False, False, True, False, False]


@their_warnings
def test_fake_tensors(device):
    """Shapes and dtypes without any data, as export and memory planners ask for them."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(4, 6, 1000, device=device, dtype=torch.bfloat16)
        ids = torch.zeros(4, 6, device=device, dtype=torch.int64)
        result = fused_logp(x, ids, return_lse=True, return_entropy=True)
    for tensor in result:
        assert tensor.shape == (4, 6)
        assert tensor.dtype == torch.float32
        assert tensor.device.type == device
