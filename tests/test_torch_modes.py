"""fused_logp under PyTorch's modes: autocast, checkpointing, saved-tensor hooks, anomaly mode, transforms, copies."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from support.reference64 import assert_gradient, assert_values, backward64, forward64, same_bits
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import fused_logp_hub
from fused_logp_hub import ArgumentError, LogpResult, fused_logp, fused_logp_backward_out, fused_logp_out


def batch(device, n=6, v=37, dtype=torch.float32):
    torch.manual_seed(0)
    x = torch.randn(n, v, device=device).mul_(2).to(dtype)
    return x, torch.randint(v, (n,), device=device)


# ---- Autocast.


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.filterwarnings("default")  # the compiler's own
def test_autocast_takes_logits_as_they_come(device, compiled):
    """bfloat16 out of a linear layer, float32 otherwise; the result is float32, and the backward follows."""
    torch._dynamo.reset()
    function = torch.compile(fused_logp, backend="aot_eager", fullgraph=True) if compiled else fused_logp
    x, ids = batch(device)
    linear = torch.nn.Linear(8, 37, device=device)
    hidden = torch.randn(6, 8, device=device, requires_grad=True)
    with torch.autocast(device, torch.bfloat16):
        logits = linear(hidden)
        logits.retain_grad()
        logp = function(logits, ids)
        wide = function(x, ids)
    assert (logits.dtype, logp.dtype, wide.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert_values("logp", logp, forward64(logits, ids).logp, torch.bfloat16)
    assert_values("logp", wide, forward64(x, ids).logp, torch.float32)
    g = torch.randn(6, device=device)
    logp.backward(g)
    assert_gradient(logits.grad, backward64(g, None, logits, ids), torch.bfloat16)
    assert hidden.grad.dtype == torch.float32


# ---- Saved tensors that are computed again, or kept elsewhere.


def model(hidden, weight, ids):
    """A loss of everything that is differentiable."""
    result = fused_logp(hidden @ weight, ids, temperature=0.7, return_entropy=True)
    return result.logp.sum() + 0.3 * result.entropy.sum()


def gradients(loss, *leaves):
    """By backward(), which reentrant checkpointing asks for."""
    for leaf in leaves:
        leaf.grad = None
    loss.backward()
    return [leaf.grad for leaf in leaves]


def leaves(device):
    torch.manual_seed(1)
    hidden = torch.randn(6, 8, device=device, requires_grad=True)
    weight = torch.randn(8, 37, device=device, requires_grad=True)
    return hidden, weight, torch.randint(37, (6, 2), device=device)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("what", ["the head too", "fused_logp alone"])
def test_checkpoint(device, reentrant, what):
    hidden, weight, ids = leaves(device)
    expected = gradients(model(hidden, weight, ids), hidden, weight)
    if what == "the head too":
        loss = checkpoint(model, hidden, weight, ids, use_reentrant=reentrant)
    else:
        result = checkpoint(
            lambda logits: tuple(fused_logp(logits, ids, temperature=0.7, return_entropy=True)[:2]),
            hidden @ weight,
            use_reentrant=reentrant,
        )
        loss = result[0].sum() + 0.3 * result[1].sum()
    for ours, plain in zip(gradients(loss, hidden, weight), expected, strict=True):
        assert torch.equal(ours, plain)


def test_saved_tensors_on_the_cpu(device):
    """Activation offloading: the backward gets copies."""
    hidden, weight, ids = leaves(device)
    expected = gradients(model(hidden, weight, ids), hidden, weight)
    with torch.autograd.graph.save_on_cpu():
        loss = model(hidden, weight, ids)
    for ours, plain in zip(gradients(loss, hidden, weight), expected, strict=True):
        assert torch.equal(ours, plain)


def test_logits_that_outlived_a_transform():
    """A tensor that leaked out of torch.func.vjp still leads to what it was computed from."""
    x, ids = batch("cpu")
    weight, kept = torch.zeros(37, requires_grad=True), []
    torch.func.vjp(lambda t: kept.append(t * 2 + weight) or t.sum(), x)
    fused_logp(kept[0], ids).sum().backward()
    expected = backward64(torch.ones(6), None, 2 * x, ids).grad.sum(0)
    torch.testing.assert_close(weight.grad.double(), expected, atol=1e-5, rtol=1e-5)


def test_a_graph_that_is_kept(device):
    """Twice through the same graph: the same bits."""
    x, ids = batch(device)
    x.requires_grad_()
    loss = fused_logp(x, ids).sum()
    first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert same_bits(first, second)


def test_saved_logits_come_back_with_other_strides(device):
    """What a first backward looked up by strides does not serve logits that a hook has copied."""
    x, ids = batch(device, 12)
    g = torch.randn(12, device=device)
    sliced = x.view(3, 4, 37)[:, :-1, :32]
    wanted = backward64(g.view(3, 4)[:, :-1], None, sliced, ids.view(3, 4)[:, :-1])
    for pack in (lambda t: t, lambda t: t.contiguous()):
        leaf = x.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            logp = fused_logp(leaf.view(3, 4, 37)[:, :-1, :32], ids.view(3, 4)[:, :-1])
        logp.backward(g.view(3, 4)[:, :-1])
        assert_gradient(leaf.grad.view(3, 4, 37)[:, :-1, :32], wanted, torch.float32)


# ---- Writing into the caller's memory is a change that autograd sees.


@pytest.mark.parametrize("written", ["out", "entropy", "the logits"])
def test_what_was_overwritten_cannot_be_differentiated(device, written):
    x, ids = batch(device)
    buffers = {"out": torch.zeros(6, device=device), "entropy": torch.zeros(6, device=device), "the logits": x}
    weight = torch.ones((), device=device, requires_grad=True)
    loss = (weight * buffers[written]).sum()  # needs the buffer in its backward
    if written == "the logits":
        r = fused_logp(x, ids, return_lse=True)
        fused_logp_backward_out(torch.ones(6, device=device), x, ids, r.row_max, r.log_sum, grad_logits=x)
    else:
        fused_logp_out(x, ids, out=buffers["out"], entropy=buffers["entropy"])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- Anomaly mode.


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.filterwarnings("ignore:Error detected in LogpFunctionBackward")  # the forward's traceback
@pytest.mark.parametrize("in_place", [False, True])
def test_anomaly_mode(device, in_place):
    """It runs, and tells of NaN rows."""
    x, ids = batch(device)
    x.requires_grad_()
    (expected,) = torch.autograd.grad(fused_logp(x, ids).sum(), x)
    with torch.autograd.detect_anomaly():
        (grad,) = torch.autograd.grad(fused_logp(x * 1, ids, inplace_backward=in_place).sum(), x)
        assert torch.equal(grad, expected)
        nan = x.detach().clone()
        nan[2, 3] = float("nan")
        loss = fused_logp(nan.requires_grad_() * 1, ids, inplace_backward=in_place).sum()
        with pytest.raises(RuntimeError, match=r"^Function 'LogpFunctionBackward' returned nan values"):
            loss.backward()


# ---- torch.func and forward mode: an error that says what to do instead, never a lost derivative.

TRANSFORMS = {
    "grad": lambda f, x, ids: torch.func.grad(lambda x: f(x, ids).sum())(x),
    "vmap over logits": lambda f, x, ids: torch.func.vmap(f)(x, ids),
    "vmap over ids": lambda f, x, ids: torch.func.vmap(lambda ids: f(x, ids))(torch.stack([ids, ids])),
    "jvp": lambda f, x, ids: torch.func.jvp(lambda x: f(x, ids), (x,), (x,)),
    "jacrev": lambda f, x, ids: torch.func.jacrev(lambda x: f(x, ids))(x),
    "hessian": lambda f, x, ids: torch.func.hessian(lambda x: f(x, ids).sum())(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_function_transforms(device, transform, requires_grad, ran):
    x, ids = batch(device)
    with pytest.raises(ArgumentError, match=r"^logits: expected a plain tensor, got one inside a transform"):
        transform(fused_logp, x.requires_grad_(requires_grad), ids)
    assert not ran
    assert_values("logp", fused_logp(x, ids), forward64(x, ids).logp, torch.float32)  # outside again


def test_forward_mode(device):
    x, ids = batch(device)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(ArgumentError, match=r"^logits: expected a plain tensor.* forward-mode tangent"):
            fused_logp(dual, ids)
        # others may be differentiated meanwhile
        assert_values("logp", fused_logp(x, ids), forward64(x, ids).logp, torch.float32)


# ---- Export.


@pytest.mark.filterwarnings("default")  # the compiler's own
def test_export(device):
    """One program for every N, with T = 0.7."""

    class Scores(torch.nn.Module):
        def forward(self, logits, ids):
            result = fused_logp(logits, ids, temperature=0.7, return_entropy=True)
            return result.logp, result.entropy  # PyTorch 2.6 cannot trace a named tuple's slice

    rows = torch.export.Dim("rows", min=2, max=1024)
    x, ids = batch(device)
    program = torch.export.export(Scores(), (x, ids), dynamic_shapes=({0: rows}, {0: rows})).module()
    for n in (3, 300):
        x, ids = batch(device, n=n)
        expected = forward64(x, ids, temperature=0.7)
        for ours, wanted in zip(program(x, ids), (expected.logp, expected.entropy), strict=True):
            assert_values("exported", ours, wanted, torch.float32)


# ---- Copies: what a checkpoint, a worker process or a debugger does to results.


def test_results_are_pickled(device):
    x, ids = batch(device)
    result = fused_logp(x, ids, return_lse=True)
    for again in (pickle.loads(pickle.dumps(result)), copy.deepcopy(result)):
        assert type(again) is LogpResult
        assert again.entropy is None
        assert all(same_bits(again[i], result[i]) for i in (0, 2, 3))
        assert again.logp.data_ptr() != result.logp.data_ptr()


def test_results_with_a_graph_are_copied_as_torch_does(device):
    """PyTorch refuses to copy a graph, and so do these; detached they can be copied."""
    x, ids = batch(device)
    logp = fused_logp(x.requires_grad_(), ids)
    with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):
        copy.deepcopy(logp)
    assert same_bits(copy.deepcopy(logp.detach()), logp)


def test_errors_and_explanations_are_pickled(device):
    """As worker processes hand them on."""
    x, ids = batch(device)
    for wrong in ({"temperature": 0.0}, {"kernel": "fast"}, {"row_indices": 1}, {"on_invalid": "raise"}):
        with pytest.raises(fused_logp_hub.FusedLogpError) as caught:
            fused_logp(x, ids + 37 if "on_invalid" in wrong else ids, **wrong)
        again = pickle.loads(pickle.dumps(caught.value))
        assert type(again) is type(caught.value)
        assert str(again) == str(caught.value)
    explanation = fused_logp_hub.explain_selection(x)
    assert pickle.loads(pickle.dumps(explanation)) == copy.deepcopy(explanation) == explanation
    kernels = fused_logp_hub.available_kernels()
    assert kernels
    assert pickle.loads(pickle.dumps(kernels)) == kernels
