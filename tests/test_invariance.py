"""Same bits (n13): a row's results depend on its values, id, V, dtype, temperature, kernel and GPU only.

Also rows beyond 2^31 elements (n1, n2), which must be the same bits as those rows alone.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.kernels import ALIGNED, AUTO, ONCE, ONLINE, SUFFIX, TMA, Variant, assert_ran, is_compiled
from support.reference64 import assert_gradient, assert_values, backward64, forward64, same_bits
from torch import Tensor

from fused_logp_hub import _manifest, fused_logp, fused_logp_backward_out

pytestmark = pytest.mark.gpu

KERNELS = {
    v.kernel: v
    for v in (
        ONLINE,
        Variant("cuda", "two_pass", ("two_pass",)),
        TMA,
        AUTO,
    )
}
# Odd V put rows at every alignment (GPT-2, Qwen), 128256 is Llama's, 8192 is whole tiles, 1000 less than one.
VOCABULARIES = [50257, 128256, 151665, 8192, 1000]
ROWS = 4096
# The ends, and rows whose neighbours differ: 132 multiprocessors' persistent blocks are shared unevenly.
CHOSEN = [0, 1, 777, 4095]
TEMPERATURE = 0.7


class Bits:
    """logp, statistics, entropy and gradient of some rows; ``g`` and ``h`` are the rows' upstream gradients."""

    def __init__(self, x: Tensor, ids: Tensor, g: Tensor, h: Tensor, kernel: str, **kwargs) -> None:
        leaf = x.detach().requires_grad_()
        kwargs = {"temperature": TEMPERATURE, **kwargs}
        r = fused_logp(leaf, ids, kernel=kernel, return_lse=True, return_entropy=True, **kwargs)
        (grad,) = torch.autograd.grad([r.logp, r.entropy], leaf, [g, h])
        self.tensors = {
            "logp": r.logp.detach(),
            "row_max": r.row_max,
            "log_sum": r.log_sum,
            "entropy": r.entropy.detach(),
            "grad": grad,
        }

    def assert_same(self, rows, other: Bits, other_rows, where: str) -> None:
        for name, tensor in self.tensors.items():
            assert same_bits(tensor[rows], other.tensors[name][other_rows]), f"{name} differs {where}"


class Rows:
    """4096 rows of one vocabulary, each on a 16-byte boundary whatever V is, so that every kernel can read them."""

    def __init__(self, v: int) -> None:
        torch.manual_seed(v)
        store = torch.randn(ROWS, v + -v % 8, device="cuda", dtype=torch.bfloat16).mul_(3)
        self.x = store[:, :v]
        self.ids = torch.randint(v, (ROWS,), device="cuda")
        self.g = torch.randn(ROWS, device="cuda")
        self.h = torch.randn(ROWS, device="cuda")
        self.whole = {}

    def bits(self, kernel: str) -> Bits:
        if kernel not in self.whole:
            self.whole[kernel] = Bits(self.x, self.ids, self.g, self.h, kernel)
        return self.whole[kernel]

    def some(self, index: Tensor, kernel: str, layout: Callable[[Tensor], Tensor] | None = None) -> Bits:
        """The listed rows in new memory: contiguous, but for `tma`, which needs them aligned."""
        if layout is None:
            layout = aligned if kernel == "tma" else torch.clone
        return Bits(layout(self.x[index]), self.ids[index], self.g[index], self.h[index], kernel)


def aligned(x: Tensor) -> Tensor:
    v = x.shape[-1]
    return torch.empty(x.shape[0], v + -v % 8, device="cuda", dtype=x.dtype)[:, :v].copy_(x)


@pytest.fixture(scope="module", params=VOCABULARIES, ids=lambda v: f"V{v}")
def rows(request):
    yield Rows(request.param)
    torch.cuda.empty_cache()


@pytest.fixture(params=KERNELS)
def kernel(request, rows):
    if not KERNELS[request.param].fits(rows.x, copied=False):
        pytest.skip("the kernel does not run here")
    return request.param


def test_the_rows_are_right(rows, kernel, ran):
    """Equal bits prove nothing if they are equally wrong."""
    whole = Bits(rows.x, rows.ids, rows.g, rows.h, kernel)
    assert_ran(ran, KERNELS[kernel], torch.bfloat16, forwards=1, backwards=1)
    part = slice(None, None, 512)
    x, ids = rows.x[part], rows.ids[part]
    expected = forward64(x, ids, temperature=TEMPERATURE)
    for name in ("logp", "row_max", "log_sum", "entropy"):
        assert_values(name, whole.tensors[name][part], getattr(expected, name), torch.bfloat16)
    gradient = backward64(rows.g[part], rows.h[part], x, ids, temperature=TEMPERATURE)
    assert_gradient(whole.tensors["grad"][part], gradient, torch.bfloat16)


def test_number_of_rows_and_place(rows, kernel, ran):
    """A row alone, and among 8, 32, 200 (block a row) and 4096, in other company and at other places."""
    whole = rows.bits(kernel)
    for row in CHOSEN:
        for n, at in ((1, 0), (8, 0), (8, 5), (32, 31), (200, 0), (200, 133), (ROWS, 2048)):
            index = torch.randperm(ROWS, device="cuda")[:n]
            index[at] = row
            ran.clear()
            batch = rows.some(index, kernel)
            assert_ran(ran, KERNELS[kernel], torch.bfloat16, forwards=1, backwards=1)
            batch.assert_same(at, whole, row, f"at {at} of {n} rows")


def test_number_of_rows_when_aligned(rows, kernel):
    """As above with rows on 16-byte boundaries, where `auto` changes from one kernel to another with N."""
    whole = rows.bits(kernel)
    for n in (1, 8, 100, 300):
        index = torch.arange(n, device="cuda") * 13
        rows.some(index, kernel, aligned).assert_same(slice(None), whole, index, f"in {n} aligned rows")


@pytest.mark.parametrize("offset", range(1, 8))
def test_alignment(rows, kernel, offset):
    """The same rows 2 to 14 bytes further: in a contiguous tensor, and in rows of an odd stride."""
    if kernel == "tma":
        pytest.skip("its rows are aligned, or it does not run")
    whole, v = rows.bits(kernel), rows.x.shape[-1]
    index = torch.tensor([*CHOSEN, 2, 3, 4, 5], device="cuda")

    def moved(x: Tensor, pad: int) -> Tensor:
        store = torch.full((offset + x.shape[0] * (v + pad),), float("nan"), device="cuda", dtype=x.dtype)
        to = store[offset:].view(x.shape[0], v + pad)[:, :v]
        return to.copy_(x)

    for pad in (0, 1, 8):
        batch = rows.some(index, kernel, lambda x, pad=pad: moved(x, pad))
        batch.assert_same(slice(None), whole, index, f"{offset} elements further, rows {pad} longer")


def test_listed_rows(rows, kernel):
    """Which other rows are listed or masked out does not matter."""
    whole = rows.bits(kernel)
    chosen = torch.tensor(CHOSEN, device="cuda")
    mask = torch.zeros(ROWS, dtype=torch.bool, device="cuda")
    mask[chosen] = True
    many = torch.rand(ROWS, device="cuda") < 0.5
    many[chosen] = True
    for kwargs in (
        {"row_indices": chosen},
        {"row_indices": chosen.flip(0).int()},
        {"row_mask": mask},
        {"row_mask": many},
        {"row_indices": many.nonzero()[:, 0], "row_mask": mask},
    ):
        some = Bits(rows.x, rows.ids, rows.g, rows.h, kernel, **kwargs)
        some.assert_same(chosen, whole, chosen, f"with {list(kwargs)}")
        assert (some.tensors["grad"][~(many | mask)] == 0).all()


def test_twice(rows, kernel):
    whole = rows.bits(kernel)
    for _ in range(2):
        again = Bits(rows.x, rows.ids, rows.g, rows.h, kernel)
        again.assert_same(slice(None), whole, slice(None), "from one run to the next")


def test_per_row_temperature(rows, kernel):
    """A tensor of equal temperatures is the number, to the last place of T."""
    whole = rows.bits(kernel)
    t = torch.full((ROWS,), TEMPERATURE, device="cuda")
    expected = forward64(rows.x[:8], rows.ids[:8], temperature=t[:8])
    some = Bits(rows.x, rows.ids, rows.g, rows.h, kernel, temperature=t)
    assert_values("logp", some.tensors["logp"][:8], expected.logp, torch.bfloat16)
    assert (some.tensors["logp"] - whole.tensors["logp"]).abs().max() < 1e-5


def test_online_and_tma_agree(rows):
    if not TMA.fits(rows.x, copied=False):
        pytest.skip("the bulk copy needs compute capability 9.0")
    rows.bits("tma").assert_same(slice(None), rows.bits("online"), slice(None), "between tma and online")


def widths(dtype: torch.dtype) -> list[int]:
    """Vocabularies around the ends of a vector, of a warp's vectors, of one tile and two, and of all numbers of
    segments, whose tiles are one, two, or in the last case up to three."""
    vector = 16 // dtype.itemsize
    tile = 128 * (2 if dtype == torch.float64 else 4) * vector
    around = (vector, 32 * vector, tile, 2 * tile)
    return [1, *(v + d for v in around for d in (-1, 0, 1)), 2 * tile + 9, *(n * tile + 7 for n in (4, 6, 10, 17, 36))]


@pytest.mark.parametrize("dtype", SUFFIX, ids=SUFFIX.get)
def test_every_forward_that_reads_once_agrees(dtype, only_kernel, ran, ran_code):
    """However many threads share a row, whatever it holds, with entropy, and without by the code for usual calls."""
    parts = [part for part in ONCE if is_compiled(part, dtype)]
    if TMA.fits(torch.empty(1, device="cuda"), False):
        parts.append("tma")
    torch.manual_seed(0)
    for v in widths(dtype):
        aligned, shifted = (torch.empty(11, w, device="cuda", dtype=dtype)[:, :v] for w in (v + -v % 8, v + 1 + v % 2))
        x = aligned.copy_(torch.randn(11, v, device="cuda") * 3)
        x[1, v // 2 :] = -torch.inf
        x[2, : v - 1] = -torch.inf
        x[3] = -torch.inf
        x[4, v // 3], x[5, v - 1] = torch.inf, torch.nan
        ids = torch.randint(v, (11,), device="cuda")
        ids[6] = -100
        shifted.copy_(x)  # each row at another alignment
        first = {}
        for want_entropy in (False, True):
            runs = [(p, x) for p in parts] + [(p, shifted) for p in parts if p not in ALIGNED]
            for part, y in runs:
                only_kernel(part)
                kernel = "tma" if part == "tma" else "online"
                r = fused_logp(y, ids, kernel=kernel, temperature=0.7, return_lse=True, return_entropy=want_entropy)
                assert ran[-1] == f"logp_forward_{part}_{SUFFIX[dtype]}"
                assert ran_code[-1] == (ran[-1] if want_entropy else usual_code(ran[-1]))
                assert r.logp[3:6].isnan().all()
                for name, tensor in r._asdict().items():
                    if tensor is not None:
                        got = tensor.nan_to_num(7.0, posinf=8.0, neginf=9.0)
                        assert same_bits(got, first.setdefault(name, got)), (
                            f"{name} by {part} differs from {parts[0]} at V = {v}, row stride {y.stride(0)}"
                        )


def usual_code(symbol: str) -> str:
    return next(k.usual_symbol or symbol for k in _manifest.shipped().kernels if k.symbol == symbol)


@pytest.mark.parametrize("dtype", SUFFIX, ids=SUFFIX.get)
def test_a_gradient_does_not_depend_on_where_its_id_lies(dtype, only_kernel, ran, ran_code):
    """Each column is some row's id, in rows of gradients at every alignment: heads, vectors and tails alike.

    Nor does it depend on which backward runs, nor on whether it is by the code for usual calls.
    """
    torch.manual_seed(0)
    v = 307
    x, ids = torch.randn(v, v, device="cuda").to(dtype), torch.arange(v, device="cuda")
    g, h = torch.randn(2, v, device="cuda")
    r = fused_logp(x, ids, return_lse=True, return_entropy=True)
    statistics = {"row_max": r.row_max, "log_sum": r.log_sum}
    with_entropy = {**statistics, "entropy": r.entropy, "grad_entropy": h}
    all_rows = {**statistics, "row_mask": torch.ones(v, dtype=torch.bool, device="cuda")}
    store = torch.empty(v, v + -v % 8, device="cuda", dtype=dtype)
    for unusual, given, weights in ((True, with_entropy, h), (True, all_rows, None), (False, statistics, None)):
        if unusual:
            expected = fused_logp_backward_out(g, x, ids, **given, grad_logits=store[:, :v]).clone()
        assert_gradient(expected, backward64(g, weights, x, ids), dtype)
        for backward in (b for b in AUTO.backward if is_compiled(b, dtype)):
            only_kernel("ring4_shifted", backward)
            for offset in range(16 // dtype.itemsize):
                to = torch.empty(offset + v * v, device="cuda", dtype=dtype)[offset:].view(v, v)
                assert same_bits(fused_logp_backward_out(g, x, ids, **given, grad_logits=to), expected)
                to.copy_(x)
                assert same_bits(fused_logp_backward_out(g, to, ids, **given, grad_logits=to), expected), "in place"
            assert ran[-1] == f"{backward}_{SUFFIX[dtype]}"
            assert ran_code[-1] == (ran[-1] if unusual else usual_code(ran[-1]))


def test_more_rows_a_block_than_it_looks_ahead(ran):
    """30000 short rows, some ignored: a persistent block of the bulk copy looks at its rows 32 at a time."""
    torch.manual_seed(0)
    x = torch.randn(30000, 264, device="cuda").bfloat16()
    if not TMA.fits(x, copied=False):
        pytest.skip("the bulk copy needs compute capability 9.0")
    ids = torch.randint(264, (30000,), device="cuda")
    ids[::7] = -100
    ids[20000:21000] = -100  # no row of a look left
    g = torch.randn(30000, device="cuda")
    tma = Bits(x, ids, g, g, "tma")
    assert_ran(ran, KERNELS["tma"], x.dtype, forwards=1, backwards=1)
    tma.assert_same(slice(None), Bits(x, ids, g, g, "online"), slice(None), "between kernels")


# ---- Beyond 2^31 elements. Built a few rows at a time, so that no other tensor is that large.

LARGE = [
    # n1: rows from 16744 on start behind 2^31 elements
    pytest.param(16800, 128256, [0, 16743, 16744, 16799], id="n1"),
    # n2: the first such row is 14134; N * V * 2 bytes are beyond 2^32 too
    pytest.param(14200, 151936, [0, 14134, 14140, 14199], id="n2"),
]


@pytest.fixture(scope="module")
def large():
    """One tensor at a time, kept between the kernels."""
    kept: dict[tuple[int, int], Tensor] = {}

    def make(n: int, v: int) -> Tensor:
        if (n, v) not in kept:
            kept.clear()
            torch.cuda.empty_cache()
            torch.manual_seed(n)
            x = torch.empty(n, v, device="cuda", dtype=torch.bfloat16)
            for part in x.split(1024):
                part.copy_(torch.randn(part.shape, device="cuda", dtype=torch.bfloat16).mul_(3))
            kept[n, v] = x
        return kept[n, v]

    yield make
    kept.clear()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("n", "v", "chosen"), LARGE)
def test_beyond_2_31_elements(n, v, chosen, kernel, large, ran):
    x = large(n, v)
    if not KERNELS[kernel].fits(x[:1], copied=False):
        pytest.skip("the bulk copy needs compute capability 9.0")
    torch.manual_seed(0)
    ids = torch.randint(v, (n,), device="cuda")
    g, h = torch.randn(n, device="cuda"), torch.randn(n, device="cuda")
    whole = Bits(x, ids, g, h, kernel)
    assert_ran(ran, KERNELS[kernel], torch.bfloat16, forwards=1, backwards=1)
    for row in chosen:
        one = slice(row, row + 1)
        alone = Bits(x[one].clone(), ids[one], g[one], h[one], kernel)
        alone.assert_same(slice(None), whole, one, f"in row {row}")
        expected = forward64(x[one], ids[one], temperature=TEMPERATURE)
        assert_values("logp", whole.tensors["logp"][one], expected.logp, torch.bfloat16)
    assert torch.isfinite(whole.tensors["logp"]).all()
