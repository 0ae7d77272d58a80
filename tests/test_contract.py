"""The contract of the numbers (DESIGN section 3): every case, dtype and kernel against float64."""

from __future__ import annotations

import pytest
import torch
from support.cases import ALL, CASES, Case, grid
from support.kernels import AUTO, SUFFIX, Variant, assert_ran
from support.reference64 import (
    assert_forward,
    assert_gradient,
    assert_gradient_norm,
    backward64,
    forward64,
    same_bits,
)
from torch import Tensor

import fused_logp_hub
from fused_logp_hub import ArgumentError, NoMatchingKernelError, fused_logp, fused_logp_out

# The backward has one kernel, whatever the forward was; and the reference.
BACKWARD_VARIANTS = [
    Variant("cpu", "auto"),
    Variant("cuda", "reference"),
    AUTO,
]


class Run:
    """A case on a device, with the kernel forced; ``runs`` is False where that kernel must be refused."""

    def __init__(self, case: Case, dtype: torch.dtype, variant: Variant) -> None:
        self.dtype, self.variant, self.case = dtype, variant, case
        self.logits, self.ids, self.kwargs = case.build(variant.device, dtype)
        self.accumulated = torch.float64 if dtype == torch.float64 else torch.float32
        self.num_rows = self.logits.shape[:-1].numel()
        self.launches = min(self.num_rows, 1)
        self.runs = not self.num_rows or variant.fits(self.logits, case.copied)

    def forward(self, logits: Tensor | None = None, **kwargs) -> object:
        logits = self.logits if logits is None else logits
        return fused_logp(logits, self.ids, kernel=self.variant.kernel, **self.kwargs, **kwargs)

    def expected(self):
        return forward64(self.logits, self.ids, **self.kwargs)

    def upstream(self) -> tuple[Tensor, Tensor]:
        """Random gradients for logp and entropy; a few are 0."""
        g = torch.randn(self.ids.shape, device=self.logits.device, dtype=self.accumulated)
        h = torch.randn(self.logits.shape[:-1], device=self.logits.device, dtype=self.accumulated)
        if g.numel() > 6:
            g.view(-1)[5::7] = 0
        return g, h

    def refuse(self, ran: list[str]) -> None:
        with pytest.raises(NoMatchingKernelError, match=r"rows aligned to 16 bytes|exactly 9.0"):
            self.forward()
        assert not [s for s in ran if s.startswith("logp_")]


@pytest.fixture
def make_run(request):
    def make(case: Case, dtype: torch.dtype, variant: Variant) -> Run:
        if variant.only:
            request.getfixturevalue("only_kernel")(variant.only, *variant.backward)
        return Run(case, dtype, variant)

    return make


@pytest.mark.parametrize(("case", "dtype", "variant"), grid())
def test_forward(case, dtype, variant, make_run, ran):
    run = make_run(case, dtype, variant)
    if not run.runs:
        run.refuse(ran)
        return
    result = run.forward(return_lse=True, return_entropy=True)
    assert_ran(ran, variant, dtype, forwards=run.launches)
    assert_forward(run.expected(), dtype, *result)
    # which results are asked for does not change a row's bits
    assert same_bits(run.forward(), result.logp)
    alone = run.forward(return_lse=True)
    assert alone.entropy is None
    assert same_bits(alone.logp, result.logp)
    assert same_bits(alone.log_sum, result.log_sum)


def guarded(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """A contiguous tensor inside a larger one of sevens, to see writes beside it."""
    store = torch.full((shape.numel() + 64,), 7.0, dtype=dtype, device=device)
    return store[32:-32].view(shape), store


@pytest.mark.parametrize(("case", "dtype", "variant"), grid())
def test_out(case, dtype, variant, make_run, ran):
    run = make_run(case, dtype, variant)
    leading, device = run.logits.shape[:-1], run.logits.device
    out, *stores = guarded(run.ids.shape, run.accumulated, device)
    statistics = {}
    for name in ("row_max", "log_sum", "entropy"):
        statistics[name], store = guarded(leading, run.accumulated, device)
        stores.append(store)
    if not run.runs:
        with pytest.raises(NoMatchingKernelError):
            fused_logp_out(run.logits, run.ids, out=out, **statistics, kernel=variant.kernel, **run.kwargs)
        assert all((s == 7).all() for s in stores), "written although refused"
        return
    returned = fused_logp_out(run.logits, run.ids, out=out, **statistics, kernel=variant.kernel, **run.kwargs)
    assert returned is out
    assert_ran(ran, variant, dtype, forwards=run.launches)
    assert_forward(run.expected(), dtype, out, **statistics)
    for store in stores:
        assert (store[:32] == 7).all()
        assert (store[-32:] == 7).all()
    allocated = run.forward(return_lse=True, return_entropy=True)
    for name, tensor in statistics.items():
        assert same_bits(tensor.nan_to_num(1.0), getattr(allocated, name).nan_to_num(1.0)), name
    # every output but out is optional, and out may have any float dtype
    for out_dtype in ALL if run.logits.numel() < 100_000 else [torch.bfloat16]:
        out, store = guarded(run.ids.shape, out_dtype, device)
        fused_logp_out(run.logits, run.ids, out=out, kernel=variant.kernel, **run.kwargs)
        assert same_bits(out.nan_to_num(1.0), run.forward(out_dtype=out_dtype).nan_to_num(1.0))
        assert torch.equal(out.nan_to_num(1.0), run.forward().to(out_dtype).nan_to_num(1.0))
        assert (store[:32] == 7).all()
        assert (store[-32:] == 7).all()


@pytest.mark.parametrize(("case", "dtype", "variant"), grid())
def test_backward(case, dtype, variant, make_run, ran):
    run = make_run(case, dtype, variant)
    if not run.runs:
        run.refuse(ran)
        return
    x = run.logits.detach().requires_grad_()
    g, h = run.upstream()
    before = run.logits.clone()

    logp = run.forward(x)
    (grad,) = torch.autograd.grad(logp, x, g)
    assert_ran(ran, variant, dtype, forwards=run.launches, backwards=run.launches)
    assert_gradient(grad, backward64(g, None, run.logits, run.ids, **run.kwargs), dtype)

    result = run.forward(x, return_entropy=True)
    (grad,) = torch.autograd.grad(result.entropy, x, h, retain_graph=True)
    assert_gradient(grad, backward64(None, h, run.logits, run.ids, **run.kwargs), dtype)
    (grad,) = torch.autograd.grad([result.logp, result.entropy], x, [g, h])
    assert_gradient(grad, backward64(g, h, run.logits, run.ids, **run.kwargs), dtype)
    assert torch.equal(run.logits.nan_to_num(0.5), before.nan_to_num(0.5)), "the logits were changed"


def writable(logits: Tensor) -> bool:
    """Whether a gradient may lie where these logits lie: rows apart, unit stride, at most two leading strides."""
    overlaps = any(s == 0 and n > 1 for n, s in zip(logits.shape, logits.stride(), strict=True))
    return not overlaps and fused_logp_hub._problem.copy_reason(logits) is None


@pytest.mark.parametrize(("case", "dtype", "variant"), grid(BACKWARD_VARIANTS))
@pytest.mark.parametrize("with_entropy", [False, True], ids=["logp", "entropy"])
def test_backward_functions(case, dtype, variant, with_entropy, make_run, ran):
    """fused_logp_backward, into new memory, into rows of an odd stride, and in place."""
    run = make_run(case, dtype, variant)
    forward = run.forward(return_lse=True, return_entropy=True)
    g, h = run.upstream()
    expected = backward64(g, h if with_entropy else None, run.logits, run.ids, **run.kwargs)
    options = {"kernel": variant.kernel, **run.kwargs}
    if with_entropy:
        options.update(entropy=forward.entropy, grad_entropy=h)
    statistics = (run.ids, forward.row_max, forward.log_sum)

    row_max = None if "temperature" not in options else run.expected().row_max

    ran.clear()
    grad = fused_logp_hub.fused_logp_backward(g, run.logits, *statistics, **options)
    assert_ran(ran, variant, dtype, forwards=0, backwards=run.launches)
    assert_gradient(grad, expected, dtype, row_max)

    # rows three columns longer than V, at an odd offset: writes are neither aligned nor allowed beside
    v = run.logits.shape[-1]
    store = torch.full((run.num_rows * (v + 3) + 1,), 7.0, dtype=dtype, device=run.logits.device)
    rows = store[1:].view(*run.logits.shape[:-1], v + 3)
    returned = fused_logp_hub.fused_logp_backward_out(g, run.logits, *statistics, grad_logits=rows[..., :v], **options)
    assert returned.data_ptr() == rows.data_ptr()
    assert same_bits(rows[..., :v].nan_to_num(1.0), grad.nan_to_num(1.0)), "the gradient's bits depend on its address"
    assert (rows[..., v:] == 7).all()
    assert store[0] == 7

    if writable(run.logits):
        returned = fused_logp_hub.fused_logp_backward_out(g, run.logits, *statistics, grad_logits=run.logits, **options)
        assert returned is run.logits
        assert same_bits(run.logits.nan_to_num(1.0), grad.nan_to_num(1.0)), "in place gives another gradient"
    else:
        with pytest.raises(ArgumentError, match=r"^grad_logits: expected rows"):
            fused_logp_hub.fused_logp_backward_out(g, run.logits, *statistics, grad_logits=run.logits, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_explain_selection_tells_of_a_copy(case, ran):
    logits, _, _ = case.build("cuda", case.dtypes[0])
    explanation = fused_logp_hub.explain_selection(logits)
    assert bool(explanation.notes) == case.copied, explanation
    assert explanation.kernel in ("online", "tma")
    assert explanation.symbol.endswith(SUFFIX[case.dtypes[0]])
    assert not ran


@pytest.mark.parametrize("dtype", ALL, ids=SUFFIX.get)
def test_rows_without_upstream_gradient_are_not_read(device, dtype):
    """Differs from torch on purpose: NaN rows with g = 0 get 0."""
    x = torch.full((6, 50), float("nan"), device=device, dtype=dtype)
    x[::2] = 1.0
    x.requires_grad_()
    result = fused_logp(x, torch.arange(6, device=device), return_entropy=True)
    g = torch.tensor([1.0, 0, 1, 0, 1, 0], device=device, dtype=result.logp.dtype)
    (grad,) = torch.autograd.grad([result.logp, result.entropy], x, [g, g])
    assert (grad[1::2] == 0).all()
    assert (grad[::2] != 0).any(-1).all()


@pytest.mark.parametrize("dtype", ALL, ids=SUFFIX.get)
def test_gradients_that_cancel(device, dtype):
    """g = +1, -1 on two ids of a row: the softmax's share is 0, the ids' are not; on one id twice all is 0."""
    x = torch.randn(3, 9001, device=device).to(dtype).requires_grad_()
    ids = torch.tensor([[0, 9000], [5000, 4000], [7, 7]], device=device)
    g = torch.tensor([1.0, -1.0], device=device).expand(3, 2)
    logp = fused_logp(x, ids)
    (grad,) = torch.autograd.grad(logp, x, g.to(logp.dtype))
    expected = torch.zeros_like(x)
    expected[0, 0] = expected[1, 5000] = 1
    expected[0, 9000] = expected[1, 4000] = -1
    assert torch.equal(grad, expected)


@pytest.mark.parametrize("dtype", ALL, ids=SUFFIX.get)
def test_gradient_norm(device, dtype):
    """The tolerance in the logits' own dtype; 256 rows, so that chance in rounding averages out."""
    v = 50257 if device == "cuda" else 1000
    torch.manual_seed(v)
    x = torch.randn(256, v, device=device).mul_(3).to(dtype).requires_grad_()
    ids = torch.randint(v, (256,), device=device)
    (grad,) = torch.autograd.grad(fused_logp(x, ids).sum(), x)
    assert_gradient_norm(grad, backward64(torch.ones(256, device=device), None, x, ids), dtype)


@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.dtypes == ALL and c.name not in ("nan", "pos_inf", "pos_inf_T")],
    ids=lambda c: c.name,
)
def test_oracle_agrees_with_torch(case):
    """The oracle is written by hand; torch's own autograd over log_softmax has to give the same."""
    logits, ids, kwargs = case.build("cpu", torch.float64)
    kwargs = dict(kwargs)
    if kwargs.pop("on_invalid", "zero") == "nan":
        pytest.skip("NaN by contract, which torch does not have")
    ignore_index = kwargs.pop("ignore_index", -100)
    keep = torch.ones(logits.shape[:-1], dtype=torch.bool)
    keep &= kwargs.pop("row_mask", keep)
    if "row_indices" in kwargs:
        rows = kwargs.pop("row_indices")
        listed = torch.zeros(keep.numel(), dtype=torch.bool)
        listed[rows[(rows >= 0) & (rows < keep.numel())]] = True
        keep &= listed.view(keep.shape)
    temperature = kwargs.pop("temperature", 1.0)
    if isinstance(temperature, Tensor):
        temperature = temperature.double().expand(keep.shape).unsqueeze(-1)
    assert not kwargs
    wide = ids if ids.dim() == logits.dim() else ids.unsqueeze(-1)
    valid = (wide >= 0) & (wide < logits.shape[-1]) & (wide != (-2 if ignore_index is None else ignore_index))
    ignored = torch.zeros_like(valid) if ignore_index is None else wide == ignore_index
    read = keep & ~ignored.all(-1)
    x = logits.where(read.unsqueeze(-1), 0.0).requires_grad_()
    lp = torch.log_softmax(x / temperature, -1)
    logp = lp.gather(-1, wide.long().where(valid, 0)).where(valid & read.unsqueeze(-1), 0.0).view(ids.shape)
    entropy = -(lp.exp() * lp.clamp(min=-1e300)).sum(-1).where(read, 0.0)
    logsumexp = torch.logsumexp(x / temperature, -1).where(read, 0.0)
    expected = forward64(logits, ids, **case.build("cpu", torch.float64)[2])
    for name, ours, torchs in (
        ("logp", expected.logp, logp),
        ("entropy", expected.entropy, entropy),
        ("logsumexp", expected.row_max + expected.log_sum, logsumexp),
    ):
        torch.testing.assert_close(ours, torchs.detach(), rtol=1e-12, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
    if logp.numel() and torch.isfinite(logits).all():
        g, h = torch.randn_like(logp), torch.randn_like(entropy)
        (grad,) = torch.autograd.grad([logp, entropy], x, [g, h])
        ours = backward64(g, h, logits, ids, **case.build("cpu", torch.float64)[2])
        torch.testing.assert_close(ours.grad, grad, rtol=1e-10, atol=1e-11)
