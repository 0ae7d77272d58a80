"""The contract in float64, written from DESIGN section 3 and not from the package, and its tolerances.

z = logits / T                logp[k] = z[ids[k]] - logsumexp(z)
p = softmax(z)                H = -sum p log p
grad = (sum_k g[k] one_hot(ids[k]) - p (sum_k g[k] + h (log p + H))) / T
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NAN = float("nan")


class Expected(NamedTuple):
    """float64 results of a forward; ``left_out`` and ``broken`` [...] mark rows of the table's special lines."""

    logp: Tensor
    entropy: Tensor
    row_max: Tensor
    log_sum: Tensor
    left_out: Tensor
    """Not listed, masked out, or every id ignored: all zeros, never read."""
    broken: Tensor
    """NaN or +inf in the row, or every logit -inf: logp and gradient NaN."""
    zero: Tensor
    """Shape of logp: entries that are exactly 0."""


class _Rows(NamedTuple):
    z: Tensor
    lp: Tensor
    ids: Tensor
    inv_t: Tensor
    ignored: Tensor
    valid: Tensor
    admitted: Tensor


def _rows(logits, token_ids, row_indices, row_mask, temperature, ignore_index):
    leading = logits.shape[:-1]
    ids = token_ids if token_ids.dim() == logits.dim() else token_ids.unsqueeze(-1)
    ids = ids.long()
    if isinstance(temperature, Tensor):
        t = temperature.double().expand(leading).unsqueeze(-1)
    else:
        t = torch.full((*leading, 1), float(temperature), dtype=torch.float64, device=logits.device)
    z = logits.detach().double() / t
    ignored = torch.zeros_like(ids, dtype=torch.bool) if ignore_index is None else ids == ignore_index
    valid = (ids >= 0) & (ids < logits.shape[-1]) & ~ignored
    admitted = torch.ones(leading, dtype=torch.bool, device=logits.device)
    if row_indices is not None:
        listed = {int(i) for i in row_indices.tolist()}
        flags = [i in listed for i in range(leading.numel())]
        admitted &= torch.tensor(flags, dtype=torch.bool, device=logits.device).view(leading)
    if row_mask is not None:
        admitted &= row_mask
    return _Rows(z, torch.log_softmax(z, -1), ids, 1 / t, ignored, valid, admitted)


def forward64(
    logits,
    token_ids,
    *,
    row_indices=None,
    row_mask=None,
    temperature=1.0,
    ignore_index=-100,
    on_invalid="zero",
) -> Expected:
    rows = _rows(logits, token_ids, row_indices, row_mask, temperature, ignore_index)
    left_out = ~rows.admitted | rows.ignored.all(-1)
    row_max = rows.z.amax(-1)
    log_sum = torch.log_softmax(rows.z, -1).amax(-1).neg()
    broken = log_sum.isnan() & ~left_out
    entropy = -_p_log_p(rows.lp)[1].sum(-1)
    logp = rows.lp.gather(-1, rows.ids.where(rows.valid, 0))
    logp = logp.where(rows.valid, 0.0 if on_invalid == "zero" else NAN)
    ignored = rows.ignored | ~rows.admitted.unsqueeze(-1)
    logp = logp.where(~ignored, 0.0)
    zero = ignored | (~rows.valid & (on_invalid == "zero"))
    statistics = (t.where(~left_out, 0.0) for t in (entropy, row_max, log_sum))
    shape = token_ids.shape
    return Expected(logp.view(shape), *statistics, left_out, broken, zero.view(shape))


class ExpectedGradient(NamedTuple):
    grad: Tensor
    zero: Tensor
    """Elements that are exactly 0: rows that are left out or without upstream gradient, and logits of -inf."""
    scale: Tensor
    """[...]: the size of what is added up in a row, for the rounding of differences that cancel."""
    softmax: Tensor
    """[...]: the norm of what a common factor in all p of a row multiplies."""


def backward64(
    grad_logp,
    grad_entropy,
    logits,
    token_ids,
    *,
    row_indices=None,
    row_mask=None,
    temperature=1.0,
    ignore_index=-100,
    on_invalid="zero",
) -> ExpectedGradient:
    """The gradient in float64; either upstream gradient may be None."""
    rows = _rows(logits, token_ids, row_indices, row_mask, temperature, ignore_index)
    g = torch.zeros(rows.ids.shape, dtype=torch.float64, device=logits.device)
    if grad_logp is not None:
        g = g + grad_logp.detach().double().reshape(rows.ids.shape)
    g = g.where(rows.valid, 0.0)
    if on_invalid == "nan":
        g = g.where(rows.valid | rows.ignored, NAN)
    h = torch.zeros((*logits.shape[:-1], 1), dtype=torch.float64, device=logits.device)
    if grad_entropy is not None:
        h = h + grad_entropy.detach().double().unsqueeze(-1)
    p, plp = _p_log_p(rows.lp)
    entropy = -plp.sum(-1, keepdim=True)
    grad = -(p * g.sum(-1, keepdim=True) + h * (plp + p * entropy))
    targets = torch.zeros_like(p).scatter_add_(-1, rows.ids.where(rows.valid, 0), g.where(rows.valid, 0.0))
    grad = (grad + targets) * rows.inv_t
    untouched = ~rows.admitted | rows.ignored.all(-1) | ((g == 0).all(-1) & (h.squeeze(-1) == 0))
    untouched = untouched.unsqueeze(-1)
    # log p + H: where p is near 1 both are near 0, but log_sum is that of a sum above 1, known to its ulp
    spread = h.squeeze(-1).abs() * (_norms(p * entropy - plp) + _norms(p))
    scale = g.abs().sum(-1) + spread
    softmax = g.sum(-1).abs() * _norms(p) + h.squeeze(-1).abs() * (_norms(plp + p * entropy) + _norms(p))
    scale, softmax = ((t * rows.inv_t.squeeze(-1)).nan_to_num(0.0, 0.0, 0.0) for t in (scale, softmax))
    zero = untouched | ((p == 0) & (targets == 0) & (grad == 0))  # an upstream NaN takes the -inf columns along
    return ExpectedGradient(grad.where(~untouched, 0.0), zero, scale, softmax)


def _p_log_p(lp: Tensor) -> tuple[Tensor, Tensor]:
    """p and p log p, with 0 log 0 = 0 and NaN kept."""
    p = lp.exp()
    return p, (p * lp).where(p != 0, 0.0)


def logp_tolerance(dtype: torch.dtype) -> tuple[float, float]:
    """Absolute and relative; float64 logits are computed in float64."""
    return (1e-12, 1e-12) if dtype == torch.float64 else (1e-5, 1e-6)


# Relative norm of a gradient's error over a tensor of many rows, after its one rounding.
GRAD_TOLERANCE = {
    torch.bfloat16: 2e-3,
    torch.float16: 3e-4,
    torch.float32: 2e-6,
    torch.float64: 1e-12,
}


def assert_values(name: str, actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Within the tolerance of logp; NaN where and only where NaN is expected; infinities equal."""
    assert actual.shape == expected.shape, f"{name}: shape {actual.shape}, expected {expected.shape}"
    actual = actual.detach().double()
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan), f"{name}: NaN on one side only {_where(actual.isnan() != nan)}"
    infinite = expected.isinf()
    assert torch.equal(actual.where(infinite, 0.0), expected.where(infinite, 0.0)), f"{name}: infinities differ"
    absolute, relative = logp_tolerance(dtype)
    error = (actual - expected).where(~nan & ~infinite, 0.0).abs()
    bound = absolute + relative * expected.where(~nan & ~infinite, 0.0).abs()
    assert (error <= bound).all(), f"{name}: error {_worst(error, bound)} times the tolerance {_where(error > bound)}"


def assert_forward(
    expected: Expected, dtype: torch.dtype, logp: Tensor, entropy: Tensor, row_max: Tensor, log_sum: Tensor
) -> None:
    """All results of a forward over logits of that dtype, and zeros exactly where they belong."""
    for tensor in (logp, entropy, row_max, log_sum):
        assert tensor.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert tensor.device == expected.logp.device
    assert_values("logp", logp, expected.logp, dtype)
    assert (logp[expected.zero] == 0).all(), "logp: expected exactly 0 in rows left out and at invalid ids"
    assert not (logp > 0).any(), "logp: expected at most 0"
    for name, actual in (("entropy", entropy), ("row_max", row_max), ("log_sum", log_sum)):
        # NaN is allowed in a broken row, not asked for
        wanted = getattr(expected, name).where(~expected.broken, 0.0)
        assert_values(name, actual.where(~expected.broken, 0.0), wanted, dtype)
        assert (actual[expected.left_out] == 0).all(), f"{name}: expected exactly 0 in rows left out"


def assert_gradient(
    actual: Tensor, expected: ExpectedGradient, dtype: torch.dtype, row_max: Tensor | None = None
) -> None:
    """Each row within the tolerance of the arithmetic, rounded once; zeros and NaN exactly where they belong.

    Row by row the tolerance of a 16-bit dtype would be no fair bound: the target's element dominates a row,
    and rounding alone may put it off by 3.9e-3 in bfloat16. So such a row is held to the rounding error
    that the float64 gradient would have, plus a tenth of the tolerance for the arithmetic before it. (An
    error d before rounding adds at most 2 d behind it.) `assert_gradient_norm` holds a whole tensor of many
    rows to the tolerance itself.

    A floor that no implementation gets under: the rounding of differences that cancel, such as 1 - p where
    p is near 1, four ulp of the arithmetic on the scale of what is subtracted. And where the caller hands
    over a row_max of logits / T, T not 1, that number and x / T are rounded: ``row_max`` allows for an ulp of
    each, as a factor in every p.
    """
    grad = expected.grad
    assert actual.shape == grad.shape, f"gradient: shape {actual.shape}, expected {grad.shape}"
    assert actual.dtype == dtype, f"gradient: dtype {actual.dtype}, expected {dtype}"
    actual = actual.detach().double()
    assert not (expected.zero & (actual != 0)).any(), "gradient: expected exactly 0 " + _where(
        expected.zero & (actual != 0)
    )
    nan = grad.isnan()
    assert torch.equal(actual.isnan(), nan), "gradient: NaN on one side only " + _where(actual.isnan() != nan)
    actual, grad = actual.where(~nan, 0.0), grad.where(~nan, 0.0)
    arithmetic = torch.float64 if dtype == torch.float64 else torch.float32
    eps = torch.finfo(arithmetic).eps
    floor = 4 * eps * expected.scale
    if row_max is not None:
        floor = floor + 2 * eps * row_max.abs().nan_to_num(0.0, 0.0, 0.0) * expected.softmax
    bound = GRAD_TOLERANCE[dtype] * _norms(grad) + floor
    if dtype != arithmetic:
        bound = 2 * (GRAD_TOLERANCE[dtype] / 10 * _norms(grad) + floor) + _norms(grad.to(dtype).double() - grad)
    error = _norms(actual - grad)
    assert (error <= bound).all(), (
        f"gradient: {_worst(error, bound)} times the tolerance in rows {_where(error > bound)}"
    )


def assert_gradient_norm(actual: Tensor, expected: ExpectedGradient, dtype: torch.dtype) -> None:
    """Relative norm of the error over the whole tensor, which must have many rows."""
    assert expected.grad.shape[:-1].numel() >= 64
    error = torch.linalg.vector_norm(actual.double() - expected.grad) / torch.linalg.vector_norm(expected.grad)
    assert error <= GRAD_TOLERANCE[dtype], f"gradient: relative norm of the error {error:.3g}"


def _norms(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=-1)


def _worst(error: Tensor, bound: Tensor) -> str:
    return f"{(error / bound).nan_to_num(0.0).max().item():.3g}"


def _where(flags: Tensor) -> str:
    return f"at {flags.nonzero()[:5].tolist()}"


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bit patterns, so that equality tells 0.0 from -0.0 and one NaN from another."""
    sizes = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(sizes[tensor.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))
