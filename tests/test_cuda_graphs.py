"""CUDA graphs (g9): forward and backward captured and replayed with new data, for each kernel and feature."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.kernels import AUTO, ONLINE, Variant, assert_ran
from support.manifests import SYNTHETIC
from support.process import run_python
from support.reference64 import assert_gradient, assert_values, backward64, forward64

import fused_logp_hub
from fused_logp_hub import (
    ArgumentError,
    KernelUnavailableError,
    _driver,
    _launch,
    _manifest,
    _selection,
    fused_logp,
    fused_logp_backward_out,
    fused_logp_out,
)

# PyTorch 2.9 on may advise on the streams of gradient accumulators; ours to test are the launches.
stream_warnings = pytest.mark.filterwarnings("ignore:.*AccumulateGrad")
KERNELS = {
    "auto": AUTO,
    "online": ONLINE,
    "two_pass": Variant("cuda", "two_pass", ("two_pass",)),
    "tma": Variant("cuda", "tma", ("tma",)),
}


@pytest.fixture(params=KERNELS)
def variant(request):
    if request.param == "tma" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the bulk copy needs compute capability 9.0")
    return KERNELS[request.param]


def batch(leading, v, k=None, seed=0):
    torch.manual_seed(seed)
    x = torch.randn(*leading, v, device="cuda").mul_(3).bfloat16()
    ids = torch.randint(v, (*leading, *(() if k is None else (k,))), device="cuda")
    ids.view(-1)[seed : seed + 5 : 2] = torch.tensor([-1, v, -100], device="cuda")
    return x, ids


def captured(step, ran):
    """The step's graph and results, after one run of it on a side stream as PyTorch asks for."""
    fused_logp_hub.preload()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    ran.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def replayed(graph, static, new):
    """The graph once more, over other data."""
    with torch.no_grad():
        for to, values in zip(static, new, strict=True):
            to.copy_(values)
    graph.replay()
    torch.cuda.synchronize()


@pytest.mark.gpu
@stream_warnings
@pytest.mark.parametrize("n", [8, 512])  # the kernel for few rows, and those for many
def test_kernels(variant, n, ran):
    x, ids = batch((n,), 50264)  # aligned rows, for tma
    x.requires_grad_()
    g = torch.randn(n, device="cuda")

    def step():
        result = fused_logp(x, ids, temperature=0.7, return_entropy=True, kernel=variant.kernel)
        (grad,) = torch.autograd.grad([result.logp, result.entropy], x, [g, g])
        return result.logp, result.entropy, grad

    graph, (logp, entropy, grad) = captured(step, ran)
    assert_ran(ran, variant, x.dtype, forwards=1, backwards=1)
    for seed in (1, 2):
        replayed(graph, (x, ids, g), (*batch((n,), 50264, seed=seed), torch.randn_like(g)))
        expected = forward64(x, ids, temperature=0.7)
        assert_values("logp", logp, expected.logp, x.dtype)
        assert_values("entropy", entropy, expected.entropy, x.dtype)
        assert_gradient(grad, backward64(g, g, x, ids, temperature=0.7), x.dtype)
    assert_ran(ran, variant, x.dtype, forwards=1, backwards=1)  # nothing was launched outside the graph


FEATURES = {
    "row_mask": lambda: {"row_mask": torch.rand(5, 8, device="cuda") < 0.6},
    "row_indices": lambda: {"row_indices": torch.randint(-1, 41, (20,), device="cuda")},
    "temperature for each row": lambda: {"temperature": torch.rand(5, 8, device="cuda") + 0.5},
    "no ignore_index, nan": lambda: {"ignore_index": None, "on_invalid": "nan"},
}


def tensors(options):
    return [t for t in options.values() if isinstance(t, torch.Tensor)]


@pytest.mark.gpu
@stream_warnings
@pytest.mark.parametrize("feature", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("k", [None, 3])
@pytest.mark.parametrize("in_place", [False, True])
def test_features(variant, feature, k, in_place, ran):
    """The options' tensors are read when the graph is replayed, as the logits are."""
    options = feature()
    leaf, ids = batch((5, 8), 1024, k)
    leaf.requires_grad_()
    g, h = torch.randn(ids.shape, device="cuda"), torch.randn(5, 8, device="cuda")

    def step():
        x = leaf * 1
        used = {"kernel": variant.kernel, "return_entropy": True, "inplace_backward": in_place}
        result = fused_logp(x, ids, **used, **options)
        (grad,) = torch.autograd.grad([result.logp, result.entropy], leaf, [g, h])
        return result.logp, result.entropy, grad

    graph, (logp, entropy, grad) = captured(step, ran)
    assert_ran(ran, variant, leaf.dtype, forwards=1, backwards=1)
    for seed in (1, 2):
        new = (*batch((5, 8), 1024, k, seed), torch.randn_like(g), torch.randn_like(h), *tensors(feature()))
        replayed(graph, (leaf, ids, g, h, *tensors(options)), new)
        expected = forward64(leaf, ids, **options)
        assert_values("logp", logp, expected.logp, leaf.dtype)
        assert_values("entropy", entropy, expected.entropy, leaf.dtype)
        assert_gradient(grad, backward64(g, h, leaf, ids, **options), leaf.dtype)


@pytest.mark.gpu
def test_out_functions(variant, ran):
    """Memory of the caller's throughout, the gradient over the logits."""
    source, ids = batch((40,), 1024)
    x, g = torch.empty_like(source), torch.randn(40, device="cuda")
    out, row_max, log_sum = torch.empty(3, 40, device="cuda").unbind(0)

    def step():
        x.copy_(source)
        fused_logp_out(x, ids, out=out, row_max=row_max, log_sum=log_sum, kernel=variant.kernel)
        fused_logp_backward_out(g, x, ids, row_max, log_sum, grad_logits=x)

    graph, _ = captured(step, ran)
    assert_ran(ran, variant, x.dtype, forwards=1, backwards=1)
    for seed in (1, 2):
        replayed(graph, (source, ids, g), (*batch((40,), 1024, seed=seed), torch.randn_like(g)))
        assert_values("logp", out, forward64(source, ids).logp, x.dtype)
        assert_gradient(x, backward64(g, None, source, ids), x.dtype)


@pytest.mark.gpu
def test_on_invalid_raise_is_refused(ran):
    x, ids = batch((40,), 1024)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.add_(1)  # an empty graph would be warned of
        with pytest.raises(ArgumentError, match=r"^on_invalid: expected 'zero' or 'nan' while a CUDA graph"):
            fused_logp(x, ids, on_invalid="raise")
    assert not ran
    assert_values("logp", fused_logp(x, ids), forward64(x, ids).logp, x.dtype)


# ---- Loading. The driver does not allow it during a capture.

SETUP = """
import torch
import fused_logp_hub as hub
x = torch.randn(300, 1000, device="cuda", requires_grad=True)
ids = torch.randint(1000, (300,), device="cuda")
rows = torch.arange(300, device="cuda")
g = torch.ones(300, device="cuda")
side = torch.cuda.Stream()  # PyTorch's own first backward, of another operation
with torch.cuda.stream(side):
    torch.autograd.grad((x * 2).sum(), x)
torch.cuda.synchronize()

def capture_replay_and_check():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logp = hub.fused_logp(x, ids, row_indices=rows)
        (grad,) = torch.autograd.grad(logp, x, g)
    graph.replay()
    torch.cuda.synchronize()
    y = x.detach().double().requires_grad_()
    expected = torch.log_softmax(y, -1).gather(-1, ids[:, None])[:, 0]
    (expected_grad,) = torch.autograd.grad(expected.sum(), y)
    assert (logp - expected).abs().max() < 1e-5
    assert (grad - expected_grad).norm() / expected_grad.norm() < 2e-6
"""


@pytest.mark.gpu
def test_first_use_after_preload(tmp_path):
    """preload() leaves nothing to load that a capture would not allow."""
    run_python(SETUP + "hub.preload()\ncapture_replay_and_check()\n", tmp_path)


@pytest.mark.gpu
def test_first_use_without_preload(tmp_path):
    """A clear error, and the same process goes on: preload, capture, replay."""
    run_python(
        SETUP
        + """
message = ""
with torch.cuda.graph(torch.cuda.CUDAGraph()):
    x.detach().add(1)  # an empty graph would be warned of
    try:
        hub.fused_logp(x.detach(), ids)
    except hub.KernelUnavailableError as error:
        message = str(error)
assert message.startswith("CUDA graph: expected a loaded kernel") and "preload()" in message, message
hub.preload()
capture_replay_and_check()
""",
        tmp_path,
    )


@pytest.mark.parametrize("loaded", [False, True])
def test_a_capture_loads_nothing(monkeypatch, loaded):
    """Without a GPU: the driver is not asked to load while a stream is captured."""
    asked = []
    device = SimpleNamespace(has=lambda *a: loaded, function=lambda *a: asked.append(a) or "function")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(_manifest, "shipped", lambda: SYNTHETIC)
    monkeypatch.setattr(_driver, "device", lambda index: device)
    facts = _selection.Facts((9, 0), 13000, "bfloat16", 16, 8, 2000)
    if loaded:
        assert _launch._plan("logp_forward", "auto", facts, 0) == "function"
        assert len(asked) == 1
        return
    with pytest.raises(
        KernelUnavailableError, match=r"^CUDA graph: expected a loaded kernel.*preload\(\) before it\.$"
    ):
        _launch._plan("logp_forward", "auto", facts, 0)
    assert not asked
