"""inplace_backward=True: the same gradient in the logits' memory, and an error for everyone who still needs them."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fused_logp_hub import ArgumentError, SecondDerivativeError, fused_logp


def batch(device, dtype=torch.float32, shape=(6, 1000)):
    """A leaf and logits computed from it by an operation that does not save its result."""
    torch.manual_seed(0)
    leaf = torch.randn(shape, device=device).to(dtype).requires_grad_()
    ids = torch.randint(shape[-1], shape[:-1], device=device)
    ids.view(-1)[1:2] = -100
    return leaf, leaf * 1, ids


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(6, 1000), (2, 3, 1027), (1, 1)], ids=str)  # aligned, ragged rows, one element
def test_same_bits_in_the_logits_memory(device, dtype, shape):
    grads, places = [], []
    for in_place in (False, True):
        leaf, logits, ids = batch(device, dtype, shape)
        start = logits.data_ptr()
        logits.register_hook(lambda g, start=start: places.append(g.data_ptr() == start))
        r = fused_logp(logits, ids, temperature=0.7, return_entropy=True, inplace_backward=in_place)
        (r.logp.sum() + 0.3 * r.entropy.sum()).backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)
    assert places == [False, True]


def test_no_rows(device):
    """No rows overlap, whatever strides PyTorch gives them (0 here)."""
    leaf = torch.empty(2, 0, 1, device=device, requires_grad=True)
    fused_logp(leaf * 1, torch.empty(2, 0, dtype=torch.int64, device=device), inplace_backward=True).sum().backward()
    assert leaf.grad.shape == (2, 0, 1)


def test_a_view_of_strided_rows(device):
    """Only the rows' own elements are written."""
    leaf, whole, _ = batch(device, shape=(4, 5, 64))
    before = whole.detach().clone()
    logits = whole[:, :-1, :60]
    ids = torch.zeros(4, 4, dtype=torch.int64, device=device)
    fused_logp(logits, ids, inplace_backward=True).sum().backward()
    assert torch.equal(whole[:, -1].detach(), before[:, -1])
    assert torch.equal(whole[..., 60:].detach(), before[..., 60:])
    assert leaf.grad[:, :-1, :60].abs().sum() > 0


OTHERS = {
    "another fused_logp": lambda logits, ids: fused_logp(logits, ids).sum(),
    "a product": lambda logits, ids: (logits * logits).sum(),
    "reentrant checkpoint": lambda logits, ids: checkpoint(lambda x: x.square().sum(), logits, use_reentrant=True),
    "checkpoint": lambda logits, ids: checkpoint(lambda x: x.square().sum(), logits, use_reentrant=False),
}


def test_a_view_from_an_autograd_function(device):
    """As fused heads return their logits: the memory behind the view is nobody's leaf."""

    class Head(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.new_empty(x.numel()).copy_(x.flatten()).view(x.shape)

        @staticmethod
        def backward(ctx, grad):
            return grad

    leaf, logits, ids = batch(device)
    (expected,) = torch.autograd.grad(fused_logp(logits, ids).sum(), leaf)
    (grad,) = torch.autograd.grad(fused_logp(Head.apply(leaf), ids, inplace_backward=True).sum(), leaf)
    assert torch.equal(grad, expected)


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_a_second_loss_on_the_same_logits_is_an_error(device, other):
    _, logits, ids = batch(device)
    first = fused_logp(logits, ids, inplace_backward=True).sum()
    second = other(logits, ids)
    first.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()


def test_an_operation_that_kept_its_result_is_an_error(device):
    """tanh's own backward needs the logits that it returned."""
    leaf, _, ids = batch(device)
    loss = fused_logp(leaf.tanh(), ids, inplace_backward=True).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_hooks_on_saved_tensors_are_an_error(device):
    """There PyTorch compares no versions: the product would square gradients instead of logits."""
    leaf, _, ids = batch(device)

    def both(leaf):
        logits = leaf * 1
        return logits.square().sum() + fused_logp(logits, ids, inplace_backward=True).sum()

    with pytest.raises(ArgumentError, match=r"^inplace_backward: expected no hooks on saved tensors"):
        checkpoint(both, leaf, use_reentrant=False)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        _, logits, ids = batch(device)
        with pytest.raises(ArgumentError, match=r"^inplace_backward: expected no hooks on saved tensors"):
            fused_logp(logits, ids, inplace_backward=True)
    _, logits, ids = batch(device)
    fused_logp(logits, ids, inplace_backward=True)  # the hooks are gone


def test_reentrant_checkpoint(device):
    """Its second forward is an ordinary one, so versions are compared."""
    leaf, logits, ids = batch(device)
    (expected,) = torch.autograd.grad(fused_logp(logits, ids).sum(), leaf)

    def loss(leaf):
        return fused_logp(leaf * 1, ids, inplace_backward=True).sum()

    checkpoint(loss, leaf, use_reentrant=True).backward()
    assert torch.equal(leaf.grad, expected)


def test_a_second_backward_through_it_is_an_error(device):
    _, logits, ids = batch(device)
    loss = fused_logp(logits, ids, inplace_backward=True).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_create_graph_is_an_error(device):
    _, logits, ids = batch(device)
    loss = fused_logp(logits, ids, inplace_backward=True).sum()
    with pytest.raises(SecondDerivativeError):
        torch.autograd.grad(loss, logits, create_graph=True)


def test_forward_alone_changes_nothing(device):
    leaf, logits, ids = batch(device)
    with torch.no_grad():
        fused_logp(logits, ids, inplace_backward=True)
    fused_logp(logits, ids, inplace_backward=True)
    assert torch.equal(logits, leaf)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda leaf: leaf, "leaf"),
        (lambda leaf: leaf[:, :500], "view of a leaf"),
        (lambda leaf: (leaf * 1)[:1].expand(6, 1000), "strides"),
        (lambda leaf: (leaf * 1)[:, ::2], "strides"),
    ],
    ids=["leaf", "view of a leaf", "expanded", "every second column"],
)
def test_logits_that_cannot_be_overwritten(device, make, reason):
    leaf, _, ids = batch(device)
    with pytest.raises(ArgumentError, match=rf"^inplace_backward: expected .*{reason}"):
        fused_logp(make(leaf), ids.clamp(max=400), inplace_backward=True)


def test_not_where_the_dispatcher_must_follow(device):
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    _, logits, ids = batch(device)
    with Mode(), pytest.raises(ArgumentError, match=r"^inplace_backward: expected False under torch\.compile"):
        fused_logp(logits, ids, inplace_backward=True)


@pytest.mark.gpu
def test_it_saves_one_tensor_of_the_logits_size():
    """8192 x 32000 in bfloat16, half a GB: large beside what else is allocated."""
    peaks = []
    for in_place in (False, True):
        weight = torch.ones((), device="cuda", dtype=torch.bfloat16, requires_grad=True)
        hidden = torch.randn(8192, 32000, device="cuda", dtype=torch.bfloat16)
        logits = hidden + weight
        ids = torch.zeros(8192, dtype=torch.int64, device="cuda")
        loss = fused_logp(logits, ids, inplace_backward=in_place).sum()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(loss, logits)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        size = logits.numel() * logits.element_size()
        del logits, hidden, loss
    assert peaks[0] >= size
    assert peaks[1] < size / 100
