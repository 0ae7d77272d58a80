"""Memory, streams, devices, threads and processes on a GPU (g4, g6, g8, g12, g13, s3, s8)."""

from __future__ import annotations

import gc

import pytest
import torch
from support.kernels import AUTO, assert_ran, forget_launches
from support.process import run_python
from support.reference64 import assert_gradient, assert_values, backward64, forward64, same_bits

import fused_logp_hub
from fused_logp_hub import fused_logp, fused_logp_backward_out, fused_logp_out

pytestmark = pytest.mark.gpu

KIB = 1 << 10
SLACK = 2 << 20  # PyTorch's allocator may hand out 1 MiB more than a large tensor needs


def batch(n=64, v=50257, dtype=torch.bfloat16, device="cuda", seed=0):
    """Odd V, so that rows start at every alignment; a tile and more, so that a wrong launch shows."""
    torch.manual_seed(seed)
    x = torch.randn(n, v, device=device).mul_(3).to(dtype)
    return x, torch.randint(v, (n,), device=device)


def check(x, ids, logp, **kwargs):
    assert_values("logp", logp, forward64(x, ids, **kwargs).logp, x.dtype)


# ---- Memory.


class Peak:
    """Bytes allocated beyond those at the start, at the highest point."""

    def __enter__(self):
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.before = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *_):
        torch.cuda.synchronize()
        self.bytes = torch.cuda.max_memory_allocated() - self.before


@pytest.fixture(scope="module")
def large():
    """4096 x 128256 in bfloat16, 1 GiB: beside it kilobytes are nothing, and a float32 copy would be 2 GiB."""
    yield batch(n=4096, v=128256)
    torch.cuda.empty_cache()


@pytest.mark.parametrize("kernel", ["auto", "online", "two_pass"])
def test_g12_forward_needs_kilobytes(large, kernel, ran):
    x, ids = large
    with Peak() as peak:
        result = fused_logp(x, ids, temperature=0.7, kernel=kernel, return_lse=True, return_entropy=True)
    assert len(ran) == 1
    assert peak.bytes < 128 * KIB  # four float32 results of 4096 rows are 64 KiB
    assert torch.isfinite(result.logp).all()


FEATURES = {
    "row_mask": lambda ids: {"row_mask": ids % 2 == 0},
    "temperature for each row": lambda ids: {"temperature": ids / 256512 + 0.5},
    "on_invalid": lambda ids: {"on_invalid": "nan", "ignore_index": None},
    "bfloat16 results": lambda ids: {"out_dtype": torch.bfloat16},
}


@pytest.mark.parametrize("feature", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("k", [None, 4])
@pytest.mark.parametrize("kernel", ["auto", "online", "two_pass"])
def test_g12_features_need_kilobytes(large, kernel, feature, k):
    x, ids = large
    options = feature(ids)
    ids = ids if k is None else torch.stack([ids] * k, -1)
    with Peak() as peak:
        logp = fused_logp(x, ids, kernel=kernel, return_lse=True, return_entropy=True, **options).logp
    assert peak.bytes < (192 if k else 128) * KIB  # row_max / T is one more result of the rows' own T
    assert torch.isfinite(logp).all()


def test_g12_training_needs_one_gradient(large):
    x, ids = large
    leaf = x.detach().requires_grad_()
    with Peak() as forward:
        logp = fused_logp(leaf, ids)
    assert forward.bytes < 128 * KIB
    with Peak() as backward:
        (grad,) = torch.autograd.grad(logp.sum(), leaf)
    assert backward.bytes < x.nbytes + SLACK
    assert grad.nbytes == x.nbytes


def test_out_allocates_nothing(large):
    x, ids = large
    out, row_max, log_sum = torch.empty(3, 4096, device="cuda").unbind(0)
    g = torch.ones(4096, device="cuda")
    with Peak() as peak:
        fused_logp_out(x, ids, out=out, row_max=row_max, log_sum=log_sum)
    assert peak.bytes == 0
    grad = torch.empty_like(x)
    with Peak() as peak:
        fused_logp_backward_out(g, x, ids, row_max, log_sum, grad_logits=grad)
    assert peak.bytes == 0


def test_row_indices_cost_a_mask(large):
    x, ids = large
    rows = torch.arange(0, 4096, 2, device="cuda")
    with Peak() as peak:
        fused_logp(x, ids, row_indices=rows)
    assert peak.bytes < 128 * KIB


def views(device="cuda"):
    """What is read in place, and what is copied; 100 MB each, so that a copy cannot hide."""
    x = torch.randn(4, 257, 50257, device=device, dtype=torch.bfloat16)
    return {
        "transposed": (x.transpose(0, 1), False),
        "shifted": (x[:, :-1], False),
        "expanded": (x[:1, :1].expand(4, 256, 50257), False),
        "vocabulary slice": (x[..., 1:50001], False),
        "stride 2": (x[..., ::2], True),
    }


@pytest.mark.parametrize("view", ["transposed", "shifted", "expanded", "vocabulary slice", "stride 2"])
def test_g4_views_are_read_in_place(view):
    x, copied = views()[view]
    ids = torch.randint(x.shape[-1], x.shape[:-1], device="cuda")
    with Peak() as peak:
        logp = fused_logp(x, ids)
    size = x.numel() * 2
    if copied:
        assert size <= peak.bytes < size + SLACK
    else:
        assert peak.bytes < 128 * KIB
    assert bool(fused_logp_hub.explain_selection(x).notes) == copied
    few = (slice(None), slice(0, 3))
    check(x[few], ids[few], logp[few])
    if not copied:
        leaf = x.detach().requires_grad_()
        logp = fused_logp(leaf, ids)
        with Peak() as peak:
            (grad,) = torch.autograd.grad(logp.sum(), leaf)
        assert peak.bytes < size + SLACK
        one = torch.ones(x.shape[0], 3, device="cuda")
        assert_gradient(grad[few], backward64(one, None, x[few], ids[few]), x.dtype)


# ---- Streams.

# PyTorch 2.9 on may advise on the streams of gradient accumulators; ours to test are the launches.
stream_warnings = pytest.mark.filterwarnings("ignore:.*AccumulateGrad")


@stream_warnings
def test_g8_side_stream():
    """Slow work on a side stream, then ours there: a launch on the default stream would run ahead of the fill."""
    x, ids = batch()
    g = torch.randn(64, device="cuda")
    static = torch.zeros_like(x).requires_grad_()
    stream = torch.cuda.Stream()
    for sleep in (
        1,
        1_000_000_000,
    ):  # cycles; half a second once everything is loaded and allocated
        with torch.no_grad():
            static.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(sleep)
            with torch.no_grad():
                static.copy_(x)
            logp = fused_logp(static, ids)
            (grad,) = torch.autograd.grad(logp, static, g)
            running = not stream.query()
    assert running, "the sleep was over too early to prove anything"
    stream.synchronize()
    check(x, ids, logp.detach())
    assert_gradient(grad, backward64(g, None, x, ids), x.dtype)


# ---- Devices.


def two_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")


def test_g6_another_device(ran):
    two_gpus()
    x, ids = batch(device="cuda:1")
    x.requires_grad_()
    g = torch.randn(64, device="cuda:1")
    assert torch.cuda.current_device() == 0
    logp = fused_logp(x, ids, row_indices=torch.arange(64, device="cuda:1"))
    (grad,) = torch.autograd.grad(logp, x, g)
    assert torch.cuda.current_device() == 0
    assert_ran(ran, AUTO, x.dtype, forwards=1, backwards=1)
    assert logp.device == grad.device == x.device
    assert_values("logp", logp, forward64(x, ids).logp, x.dtype)
    assert_gradient(grad, backward64(g, None, x, ids), x.dtype)
    # and the same bits on either device
    assert same_bits(fused_logp(x.detach().to("cuda:0"), ids.to("cuda:0")).cpu(), logp.cpu())


def test_g6_no_context_on_device_0(tmp_path):
    two_gpus()
    out = run_python(
        """
        import torch
        from cuda.bindings import driver
        import fused_logp_hub

        def active():
            status, _, state = driver.cuDevicePrimaryCtxGetState(0)
            assert status == driver.CUresult.CUDA_SUCCESS, status
            return state

        x = torch.randn(8, 1000, device="cuda:1", requires_grad=True)
        ids = torch.zeros(8, dtype=torch.int64, device="cuda:1")
        (x * 2).sum().backward()
        x.grad = None
        torch.cuda.synchronize(1)
        before = active()
        fused_logp_hub.fused_logp(x, ids).sum().backward()
        fused_logp_hub.preload(1)
        torch.cuda.synchronize(1)
        assert float(x.grad.abs().sum()) > 0
        print(before, active())
        """,
        tmp_path,
    )
    before, after = out.split()
    if before == "1":
        pytest.skip("PyTorch itself made a context on device 0")
    assert after == "0"


def test_g7_ids_on_another_device(ran):
    x, ids = batch(8, 1000)
    with pytest.raises(
        fused_logp_hub.ArgumentError,
        match=r"^token_ids: expected device cuda:0, where the logits are, got cpu",
    ):
        fused_logp(x, ids.cpu())
    with pytest.raises(fused_logp_hub.ArgumentError, match=r"^row_mask: expected device cuda:0"):
        fused_logp(x, ids, row_mask=torch.ones(8, dtype=torch.bool))
    with pytest.raises(fused_logp_hub.ArgumentError, match=r"^row_indices: expected device cuda:0"):
        fused_logp(x, ids, row_indices=torch.arange(8))
    with pytest.raises(fused_logp_hub.ArgumentError, match=r"^temperature: expected device cuda:0"):
        fused_logp(x, ids, temperature=torch.ones(8))
    out = torch.full((8,), 7.0)
    with pytest.raises(fused_logp_hub.ArgumentError, match=r"^out: expected device cuda:0"):
        fused_logp_out(x, ids, out=out)
    assert (out == 7).all()
    assert not ran


# ---- Threads and processes. Each prints nothing and must exit cleanly.

SETUP = """
import threading, torch, fused_logp_hub
from fused_logp_hub import fused_logp

def expected(x, ids):
    return torch.log_softmax(x.double(), -1).gather(-1, ids[:, None])[:, 0]

def check(x, ids, logp):
    assert (logp - expected(x, ids)).abs().max() < 1e-5
"""


def test_g13_first_use_in_a_fresh_thread(tmp_path):
    """A thread that never touched CUDA has no current context; the main thread uses the package later."""
    run_python(
        SETUP
        + """
x = torch.randn(8, 1000, device="cuda", requires_grad=True)
ids = torch.randint(1000, (8,), device="cuda")
failures = []

def work():
    try:
        logp = fused_logp(x, ids)
        logp.sum().backward()
        check(x, ids, logp)
    except BaseException as error:
        failures.append(error)

thread = threading.Thread(target=work)
thread.start()
thread.join()
assert not failures, failures
check(x, ids, fused_logp(x, ids))
assert float(x.grad.abs().sum()) > 0
""",
        tmp_path,
    )


def test_g13_first_use_in_the_backward_thread(tmp_path):
    """Autograd's threads have no context either: there the package loads its first kernel."""
    run_python(
        SETUP
        + """
class UsesItInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ids):
        ctx.save_for_backward(x, ids)
        return x.sum()

    @staticmethod
    def backward(ctx, g):
        x, ids = ctx.saved_tensors
        assert threading.current_thread() is not threading.main_thread()
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            logp = fused_logp(leaf, ids)
            (grad,) = torch.autograd.grad(logp.sum(), leaf)
        check(x, ids, logp)
        return grad, None

x = torch.randn(8, 1000, device="cuda", requires_grad=True)
ids = torch.randint(1000, (8,), device="cuda")
UsesItInBackward.apply(x, ids).backward()
y = x.detach().double().requires_grad_()
expected(y, ids).sum().backward()
assert (x.grad - y.grad).norm() / y.grad.norm() < 2e-6
""",
        tmp_path,
    )


def test_s3_import_touches_no_cuda(tmp_path):
    """Import, then fork, then CUDA in the child; and cuInit was not even called."""
    run_python(
        """
        import ctypes, os, torch

        def driver_status():  # 3: not initialised
            return ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(ctypes.c_int()))

        before = driver_status()
        import fused_logp_hub
        import fused_logp_hub.rl_kernel
        assert not torch.cuda.is_initialized()
        assert driver_status() == before
        child = os.fork()
        if child == 0:
            status = 1
            try:
                x = torch.randn(8, 1000, device="cuda")
                ids = torch.zeros(8, dtype=torch.int64, device="cuda")
                logp = fused_logp_hub.fused_logp(x, ids)
                assert (logp - torch.log_softmax(x.double(), -1)[:, 0]).abs().max() < 1e-5
                status = 0
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        """,
        tmp_path,
    )


def test_s8_eight_threads_load_once(tmp_path):
    """The first call from eight threads at once: each cubin is loaded by one of them, and all results are right."""
    run_python(
        SETUP
        + """
from fused_logp_hub import _driver
loads = []
load = _driver.cuda.cuLibraryLoadData

def counting(*args):
    loads.append(threading.get_ident())
    return load(*args)

_driver.cuda.cuLibraryLoadData = counting
x = torch.randn(8, 1000, device="cuda")
ids = torch.randint(1000, (8,), device="cuda")
torch.cuda.synchronize()
start = threading.Barrier(8)
results, failures = [], []

def work():
    try:
        start.wait()
        results.append(fused_logp(x, ids, kernel="two_pass"))
        torch.cuda.synchronize()
    except BaseException as error:
        failures.append(error)

threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failures, failures
assert len(results) == 8
for logp in results:
    check(x, ids, logp)
assert len(loads) == 1, loads
""",
        tmp_path,
    )


def test_preload_leaves_nothing_to_load(tmp_path):
    """After it no call loads a cubin, whatever the dtype or the kernel; a second preload does nothing."""
    run_python(
        SETUP
        + """
from fused_logp_hub import _driver
fused_logp_hub.preload()
assert _driver._libraries

def refuse(*args):
    raise AssertionError("a cubin was loaded after preload()")

_driver.cuda.cuLibraryLoadData = refuse
_driver.cuda.cuLibraryGetKernel = refuse
fused_logp_hub.preload()
fused_logp_hub.preload(0)
fused_logp_hub.preload("cuda:0")
kernels = {k.kernel for k in fused_logp_hub.available_kernels() if k.usable and k.op == "logp_forward"}
for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
    for n in (8, 300):
        for kernel in kernels:
            x = torch.randn(n, 1024, device="cuda", dtype=dtype, requires_grad=True)
            ids = torch.randint(1024, (n,), device="cuda")
            fused_logp(x, ids, kernel=kernel, row_indices=torch.arange(n, device="cuda")).sum().backward()
torch.cuda.synchronize()
""",
        tmp_path,
    )


def test_import_after_cuda_loads_at_once(tmp_path):
    """Where PyTorch already runs CUDA, import loads the kernels (and a fork is out of the question anyway)."""
    run_python(
        """
        import torch
        torch.zeros(1, device="cuda")
        import fused_logp_hub
        from fused_logp_hub import _driver
        assert _driver._libraries
        """,
        tmp_path,
    )


# ---- What is shipped, on this GPU.


def test_available_kernels():
    kernels = fused_logp_hub.available_kernels()
    usable = {(k.op, k.kernel, k.dtype) for k in kernels if k.usable}
    for dtype in ("bfloat16", "float16", "float32", "float64"):
        assert ("logp_forward", "online", dtype) in usable
        assert ("logp_forward", "two_pass", dtype) in usable
        assert ("logp_backward", "backward", dtype) in usable
        assert (("logp_forward", "tma", dtype) in usable) == (torch.cuda.get_device_capability() == (9, 0))
    assert all(k.registers > 0 for k in kernels)
    assert all(isinstance(k.usable, bool) for k in kernels)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_explanations_hold(dtype, ran):
    """What explain_selection names is what runs, forward and backward."""
    for n in (8, 300):
        for v in (1000, 1001):
            x, ids = batch(n, v, dtype)
            explained = [fused_logp_hub.explain_selection(x, op=op) for op in ("logp_forward", "logp_backward")]
            assert not ran
            fused_logp(x.requires_grad_(), ids).sum().backward()
            assert ran == [e.symbol for e in explained]
            assert all(e.symbol in str(e) and "accepted" in e.trace for e in explained)
            ran.clear()


def test_auto_never_takes_the_reference(ran, monkeypatch):
    """No match on a GPU is an error with the trace, and nothing slow runs in its place."""
    from dataclasses import replace

    from fused_logp_hub import _launch

    x, ids = batch(8, 1000)
    facts = _launch.facts_of
    forget_launches(monkeypatch)
    monkeypatch.setattr(_launch, "facts_of", lambda *a, **k: replace(facts(*a, **k), capability=(7, 5)))
    with pytest.raises(fused_logp_hub.NoMatchingKernelError, match=r"capability 7.5") as error:
        fused_logp(x, ids)
    assert "sm_90" in str(error.value)
    assert not ran


def test_driver_errors_name_call_symbol_and_device():
    """A launch that the driver refuses: a block of 0 threads."""
    from dataclasses import replace

    from fused_logp_hub import _driver, _launch, _params

    x, _ = batch(8, 1000)
    function = _launch.plan("logp_forward", "two_pass", x, 8)
    broken = _driver.Function(function.device, replace(function.kernel, threads=0), function.symbol, function.handle)
    values = (*[0] * len(_params.LOGP_ADDRESSES), _params.logp_constants())
    with pytest.raises(
        fused_logp_hub.DriverError,
        match=r"^cuLaunchKernelEx for logp_forward_two_pass_bf16 on device 0: .* got CUDA_ERROR_INVALID_VALUE",
    ):
        broken.launch(1, _launch.current_stream(0), _params.LOGP, values)
    torch.cuda.synchronize()
    x, ids = batch(8, 1000)
    check(x, ids, fused_logp(x, ids))
