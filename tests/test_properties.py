"""Random problems: all features at once, on every kernel, against float64 (DESIGN section 3).

The table of cases (test_contract) holds what somebody thought of; these are the combinations that nobody did.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.cases import ALL, INF, NAN, random_ids
from support.kernels import VARIANTS, assert_ran
from support.reference64 import assert_forward, assert_gradient, backward64, forward64, same_bits

from fused_logp_hub import NoMatchingKernelError, fused_logp
from fused_logp_hub._problem import copy_reason

# Vocabularies at every alignment, and a column beside where the kernels cut tiles and segments.
VOCABULARIES = st.integers(1, 300) | st.sampled_from([1023, 4095, 4096, 4097, 8193, 17000])
LEADING = [(), (1,), (3,), (9,), (0,), (2, 3), (3, 1, 2), (2, 0), (130,)]

logits_of = st.fixed_dictionaries(
    {
        "leading": st.sampled_from(LEADING),
        "v": VOCABULARIES,
        "dtype": st.sampled_from(ALL),
        "layout": st.sampled_from(["contiguous", "offset", "transposed", "shifted", "expanded", "stride 2"]),
        "start": st.integers(0, 9),
        "values": st.sampled_from(["normal", "half -inf", "one finite", "padded", "peaked", "moved", "broken"]),
    }
)
ids_of = st.fixed_dictionaries(
    {
        "k": st.sampled_from([None, None, 1, 3, 40]),
        "dtype": st.sampled_from([torch.int32, torch.int64]),
        "strided": st.booleans(),
        "beyond": st.sampled_from([0, 2, 2**30]),
    }
)
options_of = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([1.0, 0.6, 0.7, 3, "scalar", "rows", "rows expanded"]),
        "ignore_index": st.sampled_from([-100, -1, 0, None]),
        "on_invalid": st.sampled_from(["zero", "nan"]),
        "rows": st.sampled_from(["all", "mask", "indices", "both"]),
    }
)
upstream_of = st.fixed_dictionaries(
    {
        "of": st.sampled_from(["logp", "entropy", "both"]),
        "out_dtype": st.sampled_from([None, *ALL]),
        "layout": st.sampled_from(["contiguous", "stride 0", "stride 3"]),
        "in_place": st.booleans(),
    }
)


def make_logits(device, leading, v, dtype, layout, start, values):
    if layout in ("transposed", "shifted") and len(leading) < 2:
        layout = "offset"
    shape = {
        "contiguous": (*leading, v),
        "offset": (*leading, start + v + 3),
        "transposed": (*leading[1::-1], *leading[2:], v),
        "shifted": (leading[0], leading[1] + 1, *leading[2:], v) if len(leading) > 1 else (),
        "expanded": (*(1 for _ in leading), v),
        "stride 2": (*leading, 2 * v),
    }[layout]
    x = torch.randn(shape, device=device, dtype=torch.float64).mul_(3)
    middle = x.shape[-1] // 2
    if values == "half -inf":
        x[..., middle + 1 :].masked_fill_(torch.rand_like(x[..., middle + 1 :]) < 0.7, -INF)
        x[..., :middle].masked_fill_(torch.rand_like(x[..., :middle]) < 0.3, -INF)
    elif values == "one finite":
        x[..., :middle] = x[..., middle + 2 :] = -INF  # two where every second column counts
    elif values == "padded":
        x[..., 2 * middle // 3 + 2 :] = -INF
    elif values == "peaked":
        x[..., middle] += 40
    elif values == "moved":
        x += 1000
    elif values == "broken":
        x[..., -1:].masked_fill_(torch.rand_like(x[..., -1:]) < 0.3, NAN)
        x[..., :1].masked_fill_(torch.rand_like(x[..., :1]) < 0.3, INF)
        x.masked_fill_(torch.rand_like(x[..., :1]) < 0.3, -INF)
    x = x.to(dtype)
    return {
        "contiguous": lambda: x,
        "offset": lambda: x[..., start : start + v],
        "transposed": lambda: x.transpose(0, 1),
        "shifted": lambda: x[:, :-1],
        "expanded": lambda: x.expand(*leading, v),
        "stride 2": lambda: x[..., ::2],
    }[layout]()


def make_ids(x, k, dtype, strided, beyond):
    """Some outside [0, V), some ignored, some twice in a row."""
    ids = random_ids(x, *(() if k is None else (k,)), dtype=dtype)
    if beyond:
        ids.masked_fill_(torch.rand(ids.shape, device=x.device) < 0.2, x.shape[-1] - 1 + beyond)
    ids.masked_fill_(torch.rand(ids.shape, device=x.device) < 0.2, -100)
    ids.masked_fill_(torch.rand(ids.shape, device=x.device) < 0.2, -1)
    if k is not None and k > 1:
        ids[..., 1] = ids[..., 0]
    return torch.stack([ids, ids + 1], -1)[..., 0] if strided else ids


def make_options(x, temperature, ignore_index, on_invalid, rows):
    leading, device = x.shape[:-1], x.device
    options = {"temperature": temperature, "ignore_index": ignore_index, "on_invalid": on_invalid}
    if temperature == "scalar":
        options["temperature"] = torch.tensor(0.7, device=device)
    elif temperature == "rows":
        options["temperature"] = torch.rand(leading, device=device) + 0.3
    elif temperature == "rows expanded":
        options["temperature"] = (torch.rand((*leading[:-1], 1)[: len(leading)], device=device) + 0.3).expand(leading)
    if rows in ("mask", "both"):
        options["row_mask"] = torch.rand(leading, device=device) < 0.7
    if rows in ("indices", "both"):
        n = leading.numel()
        options["row_indices"] = torch.randint(-1, n + 1, (n,), device=device)
    return options


def make_gradient(shape, dtype, device, layout):
    g = torch.randn(shape, device=device).to(dtype)
    if layout == "stride 0" and g.numel():
        return g.reshape(-1)[0].expand(shape)
    return torch.stack([g, g, g], -1)[..., 1] if layout == "stride 3" else g


def fits(variant, x):
    """Whether the kernel is to be had for these logits, or refused."""
    return x.numel() == 0 or variant.fits(x, copy_reason(x) is not None)


@pytest.fixture(params=[pytest.param(v, marks=v.marks, id=str(v)) for v in VARIANTS])
def variant(request):
    if request.param.only:
        request.getfixturevalue("only_kernel")(request.param.only, *request.param.backward)
    return request.param


@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(seed=st.integers(0, 2**20), logits=logits_of, ids=ids_of, options=options_of, upstream=upstream_of)
def test_random_problems(variant, ran, seed, logits, ids, options, upstream):
    torch.manual_seed(seed)
    x = make_logits(variant.device, **logits)
    ids = make_ids(x, **ids)
    options = make_options(x, **options)
    launches = min(1, x.shape[:-1].numel())
    ran.clear()
    if not fits(variant, x):
        with pytest.raises(NoMatchingKernelError):
            fused_logp(x, ids, kernel=variant.kernel, **options)
        return
    result = fused_logp(x, ids, kernel=variant.kernel, return_lse=True, return_entropy=True, **options)
    assert_ran(ran, variant, x.dtype, forwards=launches)
    assert_forward(forward64(x, ids, **options), x.dtype, *result)

    of, layout = upstream["of"], upstream["layout"]
    out_dtype = upstream["out_dtype"] or result.logp.dtype
    g = make_gradient(ids.shape, out_dtype, x.device, layout) if of != "entropy" else None
    h = make_gradient(x.shape[:-1], result.logp.dtype, x.device, layout) if of != "logp" else None

    def gradient(leaf, used, **more):
        ran.clear()
        r = fused_logp(used, ids, kernel=variant.kernel, return_entropy=h is not None, out_dtype=out_dtype, **more)
        logp, entropy = (r, None) if h is None else (r.logp, r.entropy)
        assert torch.equal(logp.nan_to_num(1.0), result.logp.to(out_dtype).nan_to_num(1.0))
        pairs = [(t, u) for t, u in ((logp, g), (entropy, h)) if u is not None]
        (grad,) = torch.autograd.grad([t for t, _ in pairs], leaf, [u for _, u in pairs])
        assert_ran(ran, variant, x.dtype, forwards=launches, backwards=launches)
        return grad

    leaf = x.detach().requires_grad_()
    grad = gradient(leaf, leaf, **options)
    assert_gradient(grad, backward64(g, h, x, ids, **options), x.dtype)
    if upstream["in_place"]:
        copy = leaf * 1
        if copy_reason(copy) is None and fits(variant, copy):
            again = gradient(copy, copy, inplace_backward=True, **options)
            assert same_bits(again.nan_to_num(1.0), grad.nan_to_num(1.0))
            assert again.data_ptr() == copy.data_ptr()
