"""Every wrong input gives its named error, in one form, and writes nothing (g7)."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.layouts import nested, sparse_csr
from support.manifests import SYNTHETIC
from support.process import run_python

import fused_logp_hub
from fused_logp_hub import (
    ArgumentError,
    ArgumentTypeError,
    CubinError,
    DriverError,
    FusedLogpError,
    InvalidTokenIdError,
    NoMatchingKernelError,
    _errors,
    _manifest,
    fused_logp,
    fused_logp_backward,
    fused_logp_backward_out,
    fused_logp_out,
)

N, V, K = 4, 10, 2
# `argument: expected X, got Y. What to do.`
FORM = r"{name}: expected .+, got .+[.;] .+\.$"


def arguments(device="cpu") -> dict:
    """A good call of every function; a test spoils one entry."""
    torch.manual_seed(0)
    return {
        "logits": torch.randn(N, V, device=device),
        "token_ids": torch.randint(V, (N,), device=device),
        "out": torch.full((N,), 7.0, device=device),
        "row_max": torch.full((N,), 7.0, device=device),
        "log_sum": torch.full((N,), 7.0, device=device),
        "entropy": torch.full((N,), 7.0, device=device),
        "grad_logp": torch.ones(N, device=device),
        "grad_entropy": torch.ones(N, device=device),
        "grad_logits": torch.full((N, V), 7.0, device=device),
    }


FORWARD = ["logits", "token_ids"]
OUT = [*FORWARD, "out", "row_max", "log_sum", "entropy"]
BACKWARD = ["grad_logp", "logits", "token_ids", "row_max", "log_sum", "entropy", "grad_entropy"]
FUNCTIONS = {
    fused_logp: FORWARD,
    fused_logp_out: OUT,
    fused_logp_backward: BACKWARD,
    fused_logp_backward_out: [*BACKWARD, "grad_logits"],
}


def call(function, given: dict, **options):
    return function(**{name: given[name] for name in FUNCTIONS[function]}, **options)


def written(function) -> list[str]:
    """The arguments that a function writes into."""
    return {fused_logp_out: OUT[2:], fused_logp_backward_out: ["grad_logits"]}.get(function, [])


def assert_refused(function, given, error, name, **options):
    before = {n: t.clone() for n, t in given.items() if isinstance(t, torch.Tensor)}
    with pytest.raises(error, match=r"^" + FORM.format(name=name)) as caught:
        call(function, given, **options)
    assert isinstance(caught.value, FusedLogpError)
    for n in written(function):
        if isinstance(given[n], torch.Tensor):
            assert torch.equal(given[n], before[n]), f"{n} was written although {name} is wrong"


def test_the_good_call_is_good(device):
    """So that what follows fails for its own reason."""
    given = arguments(device)
    call(fused_logp, given)
    assert call(fused_logp_out, given) is given["out"]
    for name in written(fused_logp_out):
        assert (given[name] != 7).all()
    assert call(fused_logp_backward, given).shape == (N, V)
    assert call(fused_logp_backward_out, given) is given["grad_logits"]
    assert (given["grad_logits"] != 7).all()


# ---- Arguments that every function has.

COMMON = {
    "integer logits": ("logits", lambda a: a["logits"].int(), ArgumentError),
    "complex logits": ("logits", lambda a: a["logits"].to(torch.complex64), ArgumentError),
    "float8 logits": ("logits", lambda a: a["logits"].to(torch.float8_e4m3fn), ArgumentError),
    "no columns": ("logits", lambda a: a["logits"][:, :0], ArgumentError),
    "zero-dimensional logits": ("logits", lambda a: a["logits"][0, 0], ArgumentError),
    "negated logits": ("logits", lambda a: torch._neg_view(a["logits"]), ArgumentError),
    "sparse logits": ("logits", lambda a: a["logits"].to_sparse(), ArgumentError),
    "compressed sparse logits": ("logits", lambda a: sparse_csr(a["logits"]), ArgumentError),
    "nested logits": ("logits", lambda a: nested([a["logits"], a["logits"]], torch.strided), ArgumentError),
    "jagged logits": ("logits", lambda a: nested([a["logits"], a["logits"]], torch.jagged), ArgumentError),
    "logits as a list": ("logits", lambda a: a["logits"].tolist(), ArgumentTypeError),
    "logits as an array": ("logits", lambda a: a["logits"].cpu().numpy(), ArgumentTypeError),
    "no logits": ("logits", lambda a: None, ArgumentTypeError),
    "sparse ids": ("token_ids", lambda a: a["token_ids"].to_sparse(), ArgumentError),
    "nested ids": ("token_ids", lambda a: nested([a["token_ids"]], torch.strided), ArgumentError),
    "float ids": ("token_ids", lambda a: a["token_ids"].float(), ArgumentError),
    "bool ids": ("token_ids", lambda a: a["token_ids"].bool(), ArgumentError),
    "int16 ids": ("token_ids", lambda a: a["token_ids"].short(), ArgumentError),
    "uint8 ids": ("token_ids", lambda a: a["token_ids"].byte(), ArgumentError),
    "too few ids": ("token_ids", lambda a: a["token_ids"][:3], ArgumentError),
    "one id": ("token_ids", lambda a: a["token_ids"][0], ArgumentError),
    "ids transposed": ("token_ids", lambda a: a["token_ids"].expand(2, N), ArgumentError),
    "too many dimensions of ids": (
        "token_ids",
        lambda a: a["token_ids"].view(N, 1, 1),
        ArgumentError,
    ),
    "no id a row": ("token_ids", lambda a: a["token_ids"].view(N, 1)[:, :0], ArgumentError),
    "1025 ids a row": (
        "token_ids",
        lambda a: a["token_ids"].view(N, 1).expand(N, 1025),
        ArgumentError,
    ),
    "ids as a list": ("token_ids", lambda a: a["token_ids"].tolist(), ArgumentTypeError),
    "no ids": ("token_ids", lambda a: None, ArgumentTypeError),
}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("wrong", COMMON)
def test_logits_and_ids(device, function, wrong):
    name, spoil, error = COMMON[wrong]
    given = arguments(device)
    given[name] = spoil(given)
    assert_refused(function, given, error, name)


OPTIONS = {
    "temperature 0": ("temperature", 0, ArgumentError),
    "temperature 0.0": ("temperature", 0.0, ArgumentError),
    "negative temperature": ("temperature", -1.0, ArgumentError),
    "NaN temperature": ("temperature", float("nan"), ArgumentError),
    "infinite temperature": ("temperature", float("inf"), ArgumentError),
    "temperature that overflows 1 / T": ("temperature", 1e-39, ArgumentError),
    "temperature as text": ("temperature", "0.7", ArgumentTypeError),
    "no temperature": ("temperature", None, ArgumentTypeError),
    "float64 temperatures": ("temperature", torch.ones(N, dtype=torch.float64), ArgumentError),
    "temperatures of another shape": ("temperature", torch.ones(N + 1), ArgumentError),
    "temperatures for each column": ("temperature", torch.ones(N, V), ArgumentError),
    "sparse temperatures": ("temperature", torch.ones(N).to_sparse(), ArgumentError),
    "a sparse temperature": ("temperature", torch.tensor(1.0).to_sparse(), ArgumentError),
    "temperatures that require grad": (
        "temperature",
        torch.ones(N, requires_grad=True),
        ArgumentError,
    ),
    "row_mask of another shape": ("row_mask", torch.ones(N + 1, dtype=torch.bool), ArgumentError),
    "row_mask that would broadcast": ("row_mask", torch.ones(1, dtype=torch.bool), ArgumentError),
    "row_mask of integers": ("row_mask", torch.ones(N, dtype=torch.int64), ArgumentError),
    "row_mask of floats": ("row_mask", torch.ones(N), ArgumentError),
    "sparse row_mask": ("row_mask", torch.ones(N, dtype=torch.bool).to_sparse(), ArgumentError),
    "row_mask as a list": ("row_mask", [True] * N, ArgumentTypeError),
    "sparse row_indices": ("row_indices", torch.zeros(2, dtype=torch.int64).to_sparse(), ArgumentError),
    "row_indices of two dimensions": (
        "row_indices",
        torch.zeros(2, 1, dtype=torch.int64),
        ArgumentError,
    ),
    "row_indices of floats": ("row_indices", torch.zeros(2), ArgumentError),
    "row_indices of bools": ("row_indices", torch.ones(N, dtype=torch.bool), ArgumentError),
    "row_indices as a list": ("row_indices", [0, 1], ArgumentTypeError),
    "unknown on_invalid": ("on_invalid", "ignore", ArgumentError),
    "no on_invalid": ("on_invalid", None, ArgumentError),
    "misspelt kernel": ("kernel", "two-pass", ArgumentError),
    "empty kernel": ("kernel", "", ArgumentError),
    "no kernel": ("kernel", None, ArgumentError),
    "fractional ignore_index": ("ignore_index", 0.5, ArgumentTypeError),
    "ignore_index as text": ("ignore_index", "-100", ArgumentTypeError),
    "ignore_index beyond 64 bits": ("ignore_index", 2**63, ArgumentError),
}


def to_device(value, device):
    return value.to(device) if isinstance(value, torch.Tensor) and not value.requires_grad else value


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("wrong", OPTIONS)
def test_options(device, function, wrong):
    name, value, error = OPTIONS[wrong]
    assert_refused(function, arguments(device), error, name, **{name: to_device(value, device)})


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("mask", [m for m in OPTIONS if m.startswith("row_mask")])
def test_row_mask_beside_row_indices(device, function, mask):
    """The mask is checked as it was passed, before it is combined with the indices."""
    name, value, error = OPTIONS[mask]
    rows = torch.arange(N, device=device)
    assert_refused(
        function,
        arguments(device),
        error,
        name,
        row_mask=to_device(value, device),
        row_indices=rows,
    )


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("wrong", [w for w in COMMON if w.endswith("logits")])
def test_logits_beside_row_indices(device, function, wrong):
    """They are looked at before the mask is made."""
    name, spoil, error = COMMON[wrong]
    given = arguments(device)
    given[name] = spoil(given)
    assert_refused(function, given, error, name, row_indices=torch.arange(N, device=device))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_wrong_logits_beside_row_indices(device, function):
    given = arguments(device)
    rows = torch.arange(N, device=device)
    given["logits"] = given["logits"].tolist()
    assert_refused(function, given, ArgumentTypeError, "logits", row_indices=rows)


@pytest.mark.parametrize("out_dtype", [torch.int32, torch.bool, "float32", torch.float8_e4m3fn], ids=str)
def test_out_dtype(device, out_dtype):
    assert_refused(fused_logp, arguments(device), ArgumentError, "out_dtype", out_dtype=out_dtype)


# ---- Outputs.

OUTPUTS = {
    "another shape": (lambda t: t.new_full((N + 1, *t.shape[1:]), 7), ArgumentError),
    "another dimension": (lambda t: t.new_full((*t.shape, 1), 7), ArgumentError),
    "integers": (lambda t: t.int(), ArgumentError),
    "a list": (lambda t: t.tolist(), ArgumentTypeError),
    "negated": (torch._neg_view, ArgumentError),
    "requires grad": (lambda t: t.clone().requires_grad_(), ArgumentError),
}


@pytest.mark.parametrize("name", OUT[2:])
@pytest.mark.parametrize("wrong", [*OUTPUTS, "strided", "overlapping itself"])
def test_outputs_of_the_forward(device, name, wrong):
    spoil, error = {
        **OUTPUTS,
        "strided": (lambda t: t.repeat_interleave(2)[::2], ArgumentError),
        "overlapping itself": (lambda t: t[:1].expand(N), ArgumentError),
    }[wrong]
    given = arguments(device)
    given[name] = spoil(given[name])
    assert_refused(fused_logp_out, given, error, name)


@pytest.mark.parametrize("name", OUT[3:])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_statistics_have_the_dtype_of_the_arithmetic(device, name, dtype):
    given = arguments(device)
    given[name] = given[name].to(dtype)
    assert_refused(fused_logp_out, given, ArgumentError, name)


def test_out_is_required(device):
    given = arguments(device)
    given["out"] = None
    assert_refused(fused_logp_out, given, ArgumentTypeError, "out")


def test_logits_that_require_grad_through_out(device):
    """Forward-only functions say so; under no_grad they work."""
    given = arguments(device)
    given["logits"].requires_grad_()
    for function in (fused_logp_out, fused_logp_backward, fused_logp_backward_out):
        assert_refused(function, given, ArgumentError, "logits")
        with torch.no_grad():
            call(function, given)


@pytest.mark.parametrize("wrong", [*OUTPUTS, "float64", "column stride", "rows that overlap", "one row"])
def test_grad_logits(device, wrong):
    spoil, error = {
        **OUTPUTS,
        "float64": (lambda t: t.double(), ArgumentError),
        "column stride": (lambda t: t.repeat_interleave(2, -1)[:, ::2], ArgumentError),
        "rows that overlap": (lambda t: t.view(-1).as_strided((N, V), (V - 1, 1)), ArgumentError),
        "one row": (lambda t: t[:1].expand(N, V), ArgumentError),
    }[wrong]
    given = arguments(device)
    given["grad_logits"] = spoil(given["grad_logits"])
    assert_refused(fused_logp_backward_out, given, error, "grad_logits")


@pytest.mark.parametrize("shift", [1, V, (N - 1) * V])
def test_grad_logits_overlaps_the_logits(device, shift):
    """By a column, by a row, by the last row only; apart by one element they are fine."""
    given = arguments(device)
    store = torch.randn(2 * N * V, device=device)
    given["logits"] = store[: N * V].view(N, V)
    given["grad_logits"] = store[shift : shift + N * V].view(N, V)
    assert_refused(fused_logp_backward_out, given, ArgumentError, "grad_logits")
    given["grad_logits"] = store[N * V :].view(N, V)
    call(fused_logp_backward_out, given)


def test_grad_logits_of_another_layout_over_the_logits(device):
    """The same memory, transposed: not the logits' own rows."""
    given = arguments(device)
    store = torch.randn(N, N, V, device=device)
    given["logits"] = store
    given["grad_logits"] = store.transpose(0, 1)
    for name in ("token_ids", "grad_logp"):
        given[name] = given[name].expand(N, N)
    for name in ("row_max", "log_sum", "entropy", "grad_entropy"):
        given[name] = given[name].expand(N, N)
    assert_refused(fused_logp_backward_out, given, ArgumentError, "grad_logits")


# ---- Inputs of the backward.

GRADIENTS = {
    "another shape": (lambda t: t[:3], ArgumentError),
    "another dimension": (lambda t: t.view(N, 1), ArgumentError),
    "integers": (lambda t: t.int(), ArgumentError),
    "a list": (lambda t: t.tolist(), ArgumentTypeError),
    "a number": (lambda t: 1.0, ArgumentTypeError),
}


@pytest.mark.parametrize("function", [fused_logp_backward, fused_logp_backward_out], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["grad_logp", "grad_entropy", "row_max", "log_sum", "entropy"])
@pytest.mark.parametrize("wrong", GRADIENTS)
def test_inputs_of_the_backward(device, function, name, wrong):
    spoil, error = GRADIENTS[wrong]
    given = arguments(device)
    given[name] = spoil(given[name])
    assert_refused(function, given, error, name)


@pytest.mark.parametrize("name", ["grad_logp", "grad_entropy", "row_max", "log_sum", "entropy"])
def test_sparse_vectors_of_the_backward(device, name):
    given = arguments(device)
    given[name] = given[name].to_sparse()
    assert_refused(fused_logp_backward_out, given, ArgumentError, name)


@pytest.mark.parametrize("name", ["row_max", "log_sum", "entropy"])
def test_statistics_of_the_backward_have_the_dtype_of_the_arithmetic(device, name):
    given = arguments(device)
    given[name] = given[name].double()
    assert_refused(fused_logp_backward, given, ArgumentError, name)


@pytest.mark.parametrize("absent", ["entropy", "grad_entropy"])
def test_entropy_and_its_gradient_go_together(device, absent):
    given = arguments(device)
    given[absent] = None
    assert_refused(fused_logp_backward_out, given, ArgumentError, "grad_entropy")


def test_grad_logp_of_k_ids(device):
    """With K ids a row the gradient has K as well."""
    given = arguments(device)
    given["token_ids"] = given["token_ids"].view(N, 1).expand(N, K)
    assert_refused(fused_logp_backward, given, ArgumentError, "grad_logp")


def test_grad_logp_that_requires_grad(device):
    """The plain functions do not take part in autograd, so they must not swallow a graph."""
    given = arguments(device)
    given["grad_logp"].requires_grad_()
    assert_refused(fused_logp_backward, given, ArgumentError, "grad_logp")


# ---- Invalid ids.


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("value", [-1, V, 2**40])
def test_on_invalid_raise(device, function, value):
    """The message names the value and the first bad row that counts."""
    given = arguments(device)
    given["token_ids"][1] = -100
    given["token_ids"][2:] = value
    assert_refused(function, given, InvalidTokenIdError, "token_ids", on_invalid="raise")
    with pytest.raises(IndexError, match=rf"got {value} in row 2"):
        call(function, given, on_invalid="raise")
    with pytest.raises(IndexError, match=r"got -100 in row 1"):
        call(function, given, on_invalid="raise", ignore_index=None)
    mask = torch.tensor([True, True, False, True], device=device)
    with pytest.raises(IndexError, match=rf"got {value} in row 3"):
        call(function, given, on_invalid="raise", row_mask=mask)
    with pytest.raises(IndexError, match=rf"got {value} in row 3"):
        call(function, given, on_invalid="raise", row_indices=torch.tensor([3, 0], device=device))
    call(function, given, on_invalid="raise", row_indices=torch.tensor([1, 0], device=device))


def test_on_invalid_raise_of_two_dims(device):
    """Rows are counted flat over the leading dimensions, also when those are transposed; K ids."""
    x = torch.randn(2, 3, V, device=device)
    ids = torch.zeros(2, 3, K, device=device, dtype=torch.int64)
    ids[1, 0, 1] = V
    with pytest.raises(InvalidTokenIdError, match=rf"got {V} in row 3"):
        fused_logp(x, ids, on_invalid="raise")
    with pytest.raises(InvalidTokenIdError, match=rf"got {V} in row 1"):
        fused_logp(x.transpose(0, 1), ids.transpose(0, 1), on_invalid="raise")


# ---- Kernel names.


def test_misspelt_kernel_lists_the_names():
    with pytest.raises(
        ArgumentError,
        match=r"^kernel: expected one of auto, two_pass, online, tma, reference, got 'onlin'",
    ):
        call(fused_logp, arguments(), kernel="onlin")
    with pytest.raises(ArgumentError, match=r"^kernel: expected one of auto, .*, got 'onlin'"):
        fused_logp_hub.explain_selection(torch.zeros(2, 4), kernel="onlin")


CALL = """
import torch, fused_logp_hub
x, ids = torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)
for kernel in ("auto", "reference"):
    try:
        print(fused_logp_hub.fused_logp(x, ids, kernel=kernel).tolist())
    except fused_logp_hub.ArgumentError as error:
        print(error)
"""


def test_misspelt_kernel_in_the_environment(tmp_path):
    """An error at the call, named by the variable; the import works, and an argument goes before it."""
    auto, named = run_python(CALL, tmp_path, FUSED_LOGP_HUB_KERNEL="onlin").splitlines()
    assert re.match(FORM.format(name="FUSED_LOGP_HUB_KERNEL"), auto)
    assert "got 'onlin'" in auto
    assert named.startswith("[-1.386")


def test_kernel_in_the_environment(tmp_path):
    auto, _ = run_python(CALL, tmp_path, FUSED_LOGP_HUB_KERNEL="reference").splitlines()
    assert auto.startswith("[-1.386")


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["two_pass", "online", "reference"])
def test_kernel_in_the_environment_is_the_one_that_runs(tmp_path, kernel):
    out = run_python(
        """
        import torch, fused_logp_hub
        from fused_logp_hub import _driver
        launch, ran = _driver.Function.launch, []
        _driver.Function.launch = lambda self, *a: ran.append(self.kernel.name) or launch(self, *a)
        x, ids = torch.zeros(2, 4, device="cuda"), torch.zeros(2, dtype=torch.int64, device="cuda")
        fused_logp_hub.fused_logp(x, ids)
        print(ran)
        """,
        tmp_path,
        FUSED_LOGP_HUB_KERNEL=kernel,
    )
    assert out.strip() == ("[]" if kernel == "reference" else f"['{kernel}']")


# ---- No driver (s2).


def has_libcuda() -> bool:
    import ctypes

    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.fixture
def no_libcuda():
    if has_libcuda():
        pytest.skip("this machine has the NVIDIA driver")


def test_s2_driver_requests_without_a_driver(no_libcuda):
    """What is missing and what to do, the second time as the first, within a second."""
    from fused_logp_hub import _driver

    start = time.perf_counter()
    for request in (
        _driver.libcuda,
        _driver.driver_version,
        _driver.device_count,
        lambda: _driver.device(0),
    ):
        for _ in range(2):
            with pytest.raises(DriverError, match=r"^" + FORM.format(name=r"libcuda\.so\.1")) as error:
                request()
            assert "Install the NVIDIA driver" in str(error.value)
    assert time.perf_counter() - start < 1


@pytest.fixture
def synthetic_manifest(monkeypatch):
    monkeypatch.setattr(_manifest, "shipped", lambda: SYNTHETIC)


@pytest.mark.parametrize("device", [None, 0, "cuda", "cuda:0", torch.device("cuda")], ids=repr)
def test_s2_preload_without_a_driver(no_libcuda, synthetic_manifest, device):
    """The public CUDA request: the package's own error, not one of PyTorch's or an assertion."""
    start = time.perf_counter()
    for _ in range(2):
        with pytest.raises(DriverError, match=r"Install the NVIDIA driver"):
            fused_logp_hub.preload(device)
    assert time.perf_counter() - start < 1


def test_s2_the_rest_works_without_a_driver(no_libcuda, monkeypatch):
    """CPU functions, and listing what is shipped."""
    cubins = tuple(
        replace(
            c,
            symbols={k.symbol: {"registers": 32} for k in SYNTHETIC.kernels if k.module == c.module},
        )
        for c in SYNTHETIC.cubins
    )
    monkeypatch.setattr(_manifest, "shipped", lambda: replace(SYNTHETIC, cubins=cubins))
    kernels = fused_logp_hub.available_kernels()
    assert {k.kernel for k in kernels} == {"online", "two_pass", "tma", "backward", "scatter"}
    assert all(k.usable is None for k in kernels)
    x = torch.zeros(2, 4)
    explanation = fused_logp_hub.explain_selection(x)
    assert (explanation.kernel, explanation.symbol, explanation.arch) == ("reference", None, None)
    assert "cpu tensors always run it" in str(explanation)
    assert fused_logp(x, torch.zeros(2, dtype=torch.int64)).tolist() == pytest.approx([-1.3862943] * 2)


def test_preload_of_a_device_that_is_not_cuda(synthetic_manifest):
    with pytest.raises(ArgumentError, match=r"^" + FORM.format(name="device")):
        fused_logp_hub.preload("cpu")


def test_preload_without_cubins(monkeypatch, tmp_path):
    """A source checkout that was never built says so."""
    monkeypatch.setattr(_manifest, "shipped", lambda: _manifest.load_manifest(tmp_path))
    with pytest.raises(CubinError, match=r"manifest\.json: expected the kernel manifest, got"):
        fused_logp_hub.preload(0)


def test_s2_import_does_not_need_a_driver(tmp_path):
    """Import touches neither CUDA nor the wheel's cubins, with warnings as errors."""
    run_python(
        """
        import sys, warnings
        import torch
        warnings.simplefilter("error")
        import fused_logp_hub, fused_logp_hub.rl_kernel
        from fused_logp_hub import _driver
        assert not torch.cuda.is_initialized()
        assert _driver._libcuda is None and not _driver._libraries
        """,
        tmp_path,
    )


# ---- The hierarchy and the names.


def test_hierarchy_is_as_drawn():
    """The tree in the module's docstring, line by line, against the classes."""
    tree = [line for line in _errors.__doc__.splitlines() if "Error" in line]
    stack: list[type] = []
    drawn = []
    for line in tree:
        name, builtin = re.search(r"(\w+Error)(?: \((\w+)\))?", line).groups()
        depth = (line.index(name) - tree[0].index("FusedLogpError")) // 4
        cls = getattr(_errors, name)
        del stack[depth:]
        if stack:
            assert stack[-1] in cls.__bases__, f"{name} is drawn below {stack[-1].__name__}"
        bases = [b for b in cls.__bases__ if b.__module__ == "builtins" and b is not Exception]
        assert [b.__name__ for b in bases] == ([builtin] if builtin else []), name
        stack.append(cls)
        drawn.append(name)
    classes = [n for n, c in vars(_errors).items() if inspect.isclass(c) and issubclass(c, Exception)]
    assert sorted(drawn) == sorted(classes) == sorted(_errors.__all__)


def test_all_errors_are_public():
    for name in _errors.__all__:
        assert getattr(fused_logp_hub, name) is getattr(_errors, name)


def test_all_is_complete():
    """Every public name of the package, submodules apart, and nothing else."""
    public = {n for n, v in vars(fused_logp_hub).items() if not n.startswith("_") and not inspect.ismodule(v)}
    assert set(fused_logp_hub.__all__) == public | {"__version__"}


@pytest.mark.parametrize(
    "module",
    [
        "fused_logp_hub",
        "fused_logp_hub._errors",
        "fused_logp_hub.integrations",
        "fused_logp_hub.integrations.openrlhf",
        "fused_logp_hub.integrations.trl",
        "fused_logp_hub.integrations.verl",
        "fused_logp_hub.rl_kernel",
    ],
)
def test_all_is_sorted_and_true(module):
    """What a module defines without an underscore, in order."""
    module = importlib.import_module(module)
    assert module.__all__ == sorted(set(module.__all__))
    assert all(hasattr(module, name) for name in module.__all__)
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    defined = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert {name for name in defined if not name.startswith("_")} <= set(module.__all__)


def test_public_names_are_those_of_the_design():
    assert set(fused_logp_hub.__all__) >= {
        "fused_logp",
        "fused_logp_out",
        "fused_logp_backward",
        "fused_logp_backward_out",
        "explain_selection",
        "available_kernels",
        "preload",
        "__version__",
    }
    assert issubclass(NoMatchingKernelError, RuntimeError)
