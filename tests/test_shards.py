"""The parts that vocabulary-parallel log-probabilities are made of, without any process group.

Every case of the contract, cut into ragged shards the last of which is padded, must hold as for whole rows.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.cases import ALL, grid
from support.kernels import TMA, VARIANTS, assert_ran
from support.reference64 import assert_gradient, assert_values, backward64, forward64, same_bits
from support.shards import cut, cut_at, joined
from torch import Tensor

from fused_logp_hub import ArgumentError, ArgumentTypeError, InvalidTokenIdError, fused_logp
from fused_logp_hub.distributed import MergedStatistics, merge_statistics, shard_backward, shard_statistics

INF, NAN = float("inf"), float("nan")
SHARDS = 3


def merged(shards, ids, kwargs, vocab_size, kernel="auto", **more) -> MergedStatistics:
    """Statistics of each shard, as they would come from the ranks, and their merge."""
    options = {"vocab_size": vocab_size, "kernel": kernel, **kwargs, **more}
    packed = [shard_statistics(s.logits, ids, vocab_start=s.vocab_start, **options) for s in shards]
    several = ids.dim() == shards[0].logits.dim()
    return merge_statistics(
        torch.stack(packed),
        num_ids=ids.shape[-1] if several else None,
        temperature=kwargs.get("temperature", 1.0),
    )


def gradients(shards, ids, kwargs, vocab_size, rows: MergedStatistics, g, h=None, kernel="auto") -> list[Tensor]:
    more = {} if h is None else {"entropy": rows.entropy, "grad_entropy": h}
    return [
        shard_backward(
            g, s.logits, ids, rows.row_max, rows.log_sum,
            vocab_start=s.vocab_start, vocab_size=vocab_size, kernel=kernel, **more, **kwargs,
        )
        for s in shards
    ]  # fmt: skip


@pytest.mark.parametrize(("case", "dtype", "variant"), grid())
def test_the_contract_holds(case, dtype, variant, request, ran):
    if variant.only:
        request.getfixturevalue("only_kernel")(variant.only, *variant.backward)
    logits, ids, kwargs = case.build(variant.device, dtype)
    vocab_size = logits.shape[-1]
    shards = cut(logits, SHARDS, aligned=variant.aligned)
    if not all(variant.fits(s.logits, False) for s in shards):
        pytest.skip("the kernel does not run here")
    launches = sum(s.width > 0 for s in shards) * min(logits.shape[:-1].numel(), 1)
    rows = merged(shards, ids, kwargs, vocab_size, variant.kernel, return_entropy=True)
    assert_ran(ran, variant, dtype, forwards=launches)

    g, h = assert_forward(rows, logits, ids, kwargs)
    alone = merged(shards, ids, kwargs, vocab_size, variant.kernel)
    assert alone.entropy is None
    assert same_bits(alone.logp, rows.logp)
    assert same_bits(alone.log_sum, rows.log_sum)
    for grad_entropy in (None, h):
        ran.clear()
        grads = gradients(shards, ids, kwargs, vocab_size, rows, g, grad_entropy, variant.kernel)
        assert_ran(ran, variant, dtype, forwards=0, backwards=launches)
        assert_gradient(joined(grads, shards), backward64(g, grad_entropy, logits, ids, **kwargs), dtype)


def assert_forward(rows: MergedStatistics, logits: Tensor, ids: Tensor, kwargs: dict) -> tuple[Tensor, Tensor]:
    """Merged statistics against float64; returns upstream gradients for logp and entropy."""
    expected = forward64(logits, ids, **kwargs)
    assert_values("logp", rows.logp, expected.logp, logits.dtype)
    assert (rows.logp[expected.zero] == 0).all(), "logp: expected exactly 0 in rows left out and at invalid ids"
    assert not (rows.logp > 0).any()
    t = kwargs.get("temperature", 1.0)
    row_max = rows.row_max.double() / (t.double() if isinstance(t, Tensor) else t)
    for name, actual in (("entropy", rows.entropy), ("row_max", row_max), ("log_sum", rows.log_sum)):
        correct = getattr(expected, name).where(~expected.broken, 0.0)
        assert_values(name, actual.where(~expected.broken, 0.0), correct, logits.dtype)
        assert (actual[expected.left_out] == 0).all(), f"{name}: expected exactly 0 in rows left out"
    g = torch.randn(ids.shape, device=logits.device, dtype=rows.logp.dtype)
    g.view(-1)[5::7] = 0
    return g, torch.randn(logits.shape[:-1], device=logits.device, dtype=rows.logp.dtype)


problems = st.fixed_dictionaries(
    {
        "leading": st.sampled_from([(1,), (9,), (2, 3), (130,)]),
        "widths": st.lists(st.integers(0, 300) | st.sampled_from([4095, 8193]), min_size=1, max_size=5).filter(any),
        "padding": st.integers(0, 9),
        "k": st.sampled_from([None, 1, 3]),
        "dtype": st.sampled_from(ALL),
        "temperature": st.sampled_from([1.0, 0.6, 3.0]),
        "neg_inf": st.sampled_from([0.0, 0.5, 0.99]),
        "seed": st.integers(0, 2**20),
    }
)


def fuzz(device, leading, widths, padding, k, dtype, temperature, neg_inf, seed):
    torch.manual_seed(seed)
    edges = [sum(widths[:i]) for i in range(len(widths) + 1)]
    vocab_size = edges[-1]
    logits = torch.randn(*leading, vocab_size, device=device).mul_(3)
    logits = logits.masked_fill(torch.rand_like(logits) < neg_inf, -INF).to(dtype)
    logits[..., vocab_size // 2] = 0.5  # one finite value at least
    ids = torch.randint(-2, vocab_size + 2, (*leading, *(() if k is None else (k,))), device=device)
    mask = torch.rand(leading, device=device) < 0.8
    kwargs = {"row_mask": mask, "temperature": temperature, "ignore_index": -1}
    for kernel in dict.fromkeys(v.kernel for v in VARIANTS if v.device == device):
        shards = cut_at(logits, edges, padding, aligned=kernel == "tma")
        if kernel == "tma" and not all(TMA.fits(s.logits, False) for s in shards):
            continue
        rows = merged(shards, ids, kwargs, vocab_size, kernel, return_entropy=True)
        g, h = assert_forward(rows, logits, ids, kwargs)
        grads = gradients(shards, ids, kwargs, vocab_size, rows, g, h, kernel)
        assert_gradient(joined(grads, shards), backward64(g, h, logits, ids, **kwargs), dtype)


random_problems = settings(
    max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


@random_problems
@given(problems)
def test_random_problems_cpu(problem):
    fuzz("cpu", **problem)


@pytest.mark.gpu
@random_problems
@given(problems)
def test_random_problems_cuda(problem):
    fuzz("cuda", **problem)


def numbers(packed: Tensor) -> list[float]:
    return [round(x, 4) for x in packed.flatten().tolist()]


def test_what_a_shard_says(device):
    """One row at a time: maximum, log_sum, the target's logit, entropy."""
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]], device=device)
    place = {"vocab_start": 10, "vocab_size": 20, "return_entropy": True}

    def says(token_id, logits=logits, **kwargs):
        ids = torch.tensor([token_id], device=device)
        return numbers(shard_statistics(logits, ids, **{**place, **kwargs}))

    x = logits[0].double()
    log_sum, entropy = (x - 3).exp().sum().log().item(), -(x.softmax(0) * x.log_softmax(0)).sum().item()
    rest = [round(3.0, 4), round(log_sum, 4)]
    assert says(11) == [*rest, 3.0, round(entropy, 4)]
    assert says(13) == [*rest, 0.0, round(entropy, 4)]
    for elsewhere in (0, 9, 14, 19):
        assert says(elsewhere) == [*rest, -INF, round(entropy, 4)]
    for invalid in (-1, 20, 2**31, -(2**63), 2**63 - 1):
        assert says(invalid) == [*rest, INF, round(entropy, 4)]
        assert str(says(invalid, on_invalid="nan")[2]) == "nan"
    assert says(-100) == [0.0, -INF, INF, 0.0]
    assert says(12, ignore_index=12) == [0.0, -INF, INF, 0.0]
    assert says(2**63 - 1, ignore_index=2**63 - 1) == [0.0, -INF, INF, 0.0]
    assert says(11, row_mask=torch.zeros(1, dtype=torch.bool, device=device)) == [0.0, -INF, INF, 0.0]
    # a temperature divides the differences, not the maximum and not the target's logit
    halved = says(13, temperature=0.5)
    assert halved[:3] == [3.0, round((2 * (x - 3)).exp().sum().log().item(), 4), 0.0]
    # columns from vocab_size on do not exist, nor do ids
    assert says(11, vocab_size=13)[:3] == [3.0, round((x[:3] - 3).exp().sum().log().item(), 4), 3.0]
    assert says(13, vocab_size=13)[2] == INF
    assert says(5, vocab_size=10) == [-INF] * 4
    # nothing but -inf, and what cannot be
    assert says(11, logits.fill_(-INF))[:3] == [-INF, -INF, -INF]
    logits[0, 1] = INF
    assert [str(n) for n in says(11)[1:3]] == ["nan", "nan"]


def test_several_ids(device):
    logits = torch.randn(3, 8, device=device)
    ids = torch.tensor([[4, 11, 4], [0, -100, 20], [-100, -100, -100]], device=device)
    packed = shard_statistics(logits, ids, vocab_start=4, vocab_size=20)
    assert packed.shape == (5, 3)
    assert packed.is_contiguous()
    x = logits.tolist()
    expected = [[x[0][0], x[0][7], x[0][0]], [-INF, INF, INF], [INF, INF, INF]]
    assert packed[2:].t().tolist() == expected


class TestOfInfinities:
    """Shards that hold nothing but -inf beside shards that do not."""

    def whole(self, device):
        logits = torch.randn(4, 30, device=device)
        logits[:2, :10] = -INF  # all of a shard
        logits[2] = -INF
        logits[3, 25] = NAN
        return logits, torch.tensor([3, 20, 4, 2], device=device)

    def test_rows(self, device):
        logits, ids = self.whole(device)
        shards = [(logits[:, a:b], a) for a, b in ((0, 10), (10, 20), (20, 30))]
        packed = [
            shard_statistics(x, ids, vocab_start=a, vocab_size=30, temperature=0.7, return_entropy=True)
            for x, a in shards
        ]
        rows = merge_statistics(torch.stack(packed), temperature=0.7)
        expected = forward64(logits, ids, temperature=0.7)
        assert rows.logp[0] == -INF
        assert_values("logp", rows.logp, expected.logp, torch.float32)
        assert_values("entropy", rows.entropy, expected.entropy, torch.float32)
        grads = [
            shard_backward(
                torch.ones(4, device=device), x, ids, rows.row_max, rows.log_sum, vocab_start=a, vocab_size=30,
                temperature=0.7, entropy=rows.entropy, grad_entropy=torch.ones(4, device=device),
            )
            for x, a in shards
        ]  # fmt: skip
        g = torch.ones(4, device=device)
        assert_gradient(torch.cat(grads, -1), backward64(g, g, logits, ids, temperature=0.7), torch.float32)


def test_a_large_shift_costs_nothing(device):
    """The maximum stays undivided: T = 0.7 at 1e4 rounds nothing on the way to the gradient."""
    torch.manual_seed(0)
    logits = torch.randn(64, 3000, device=device) + 1e4
    ids = torch.randint(3000, (64,), device=device)
    shards = cut(logits, SHARDS)
    rows = merged(shards, ids, {"temperature": 0.7}, 3000, return_entropy=True)
    g, h = torch.randn(2, 64, device=device)
    grads = gradients(shards, ids, {"temperature": 0.7}, 3000, rows, g, h)
    assert_gradient(joined(grads, shards), backward64(g, h, logits, ids, temperature=0.7), torch.float32)


@pytest.mark.parametrize("variant", [pytest.param(v, marks=v.marks, id=str(v)) for v in VARIANTS])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_agrees_with_the_whole(variant, temperature, request, ran):
    """Logp and gradients of many rows, to 1e-5 of fused_logp by the same kernel."""
    if variant.only:
        request.getfixturevalue("only_kernel")(variant.only, *variant.backward)
    torch.manual_seed(0)
    n, v = (300, 128256) if variant.device == "cuda" else (8, 5000)
    logits = torch.randn(n, v, device=variant.device, dtype=torch.bfloat16).mul_(3).requires_grad_()
    if not variant.fits(logits, False):
        pytest.skip("the kernel does not run here")
    ids = torch.randint(v, (n,), device=variant.device)
    whole = fused_logp(logits, ids, temperature=temperature, kernel=variant.kernel, return_entropy=True)
    g, h = torch.randn(2, n, device=variant.device)
    (grad,) = torch.autograd.grad((whole.logp, whole.entropy), logits, (g, h))
    ran.clear()
    shards = cut(logits.detach(), 4, aligned=True)
    kwargs = {"temperature": temperature}
    rows = merged(shards, ids, kwargs, v, variant.kernel, return_entropy=True)
    assert_ran(ran, variant, torch.bfloat16, forwards=4)
    torch.testing.assert_close(rows.logp, whole.logp, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(rows.entropy, whole.entropy, atol=1e-5, rtol=1e-6)
    joint = joined(gradients(shards, ids, kwargs, v, rows, g, h, variant.kernel), shards)
    error = torch.linalg.vector_norm((joint - grad).double()) / torch.linalg.vector_norm(grad.double())
    assert error < 2e-3
    again = merged(shards, ids, kwargs, v, variant.kernel, return_entropy=True)
    assert all(same_bits(a, b) for a, b in zip(rows, again, strict=True))
    if variant.kernel != "reference":  # PyTorch's own sums promise nothing of the kind
        few = merged([s._replace(logits=s.logits[5:7]) for s in shards], ids[5:7], kwargs, v, variant.kernel)
        assert same_bits(few.logp, rows.logp[5:7]), "a row's bits depend on its batch"


def test_a_gap_between_shards(device):
    """An id that no shard holds is -inf, and not a plausible number."""
    logits = torch.randn(1, 10, device=device)
    ids = torch.tensor([4], device=device)
    packed = [shard_statistics(logits[:, a:b], ids, vocab_start=a, vocab_size=10) for a, b in ((0, 4), (5, 10))]
    assert merge_statistics(torch.stack(packed)).logp == -INF


def test_gradient_over_the_logits(device):
    """The gradient may overwrite the shard, padding included."""
    logits, ids = torch.randn(4, 20, device=device), torch.tensor([3, 14, 19, -100], device=device)
    shards = cut(logits, 2)
    rows = merged(shards, ids, {}, 20)
    g = torch.ones(4, device=device)
    apart = gradients(shards, ids, {}, 20, rows, g)
    for shard, expected in zip(shards, apart, strict=True):
        out = shard.logits
        returned = shard_backward(
            g, out, ids, rows.row_max, rows.log_sum, vocab_start=shard.vocab_start, vocab_size=20, grad_logits=out
        )
        assert returned is out
        assert same_bits(out, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes(dtype):
    logits, ids = torch.randn(2, 3, 8, dtype=dtype), torch.randint(8, (2, 3))
    packed = shard_statistics(logits, ids, vocab_start=0, vocab_size=8)
    assert packed.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert packed.shape == (3, 2, 3)
    assert merge_statistics(packed[None]).logp.dtype == packed.dtype
    assert merge_statistics(packed[None], out_dtype=torch.bfloat16).logp.dtype == torch.bfloat16


def test_no_rows():
    packed = shard_statistics(torch.empty(0, 8), torch.empty(0, dtype=torch.int64), vocab_start=0, vocab_size=8)
    rows = merge_statistics(torch.stack([packed, packed]))
    assert [t.shape for t in (rows.logp, rows.row_max, rows.log_sum)] == [(0,)] * 3


LOGITS, IDS = torch.randn(4, 8), torch.zeros(4, dtype=torch.int64)
PACKED = torch.zeros(2, 3, 4)


class TestErrors:
    @pytest.mark.parametrize(
        ("kwargs", "error", "message"),
        [
            ({"vocab_start": -1}, ArgumentError, r"vocab_start: expected an int from 0"),
            ({"vocab_start": 2**31}, ArgumentError, r"vocab_start: expected an int from 0"),
            ({"vocab_start": None}, ArgumentTypeError, r"vocab_start: expected an int, got NoneType"),
            ({"vocab_size": 0}, ArgumentError, r"vocab_size: expected an int from 1"),
            ({"vocab_size": 8.0}, ArgumentTypeError, r"vocab_size: expected an int, got float"),
            ({"logits_shard": [1.0]}, ArgumentTypeError, r"logits_shard: expected a torch.Tensor"),
            ({"logits_shard": torch.tensor(1.0)}, ArgumentError, r"logits_shard: expected shape \[\.\.\., V_r\]"),
            ({"logits_shard": LOGITS.clone().requires_grad_()}, ArgumentError, r"logits_shard: expected no gradient"),
            ({"logits_shard": LOGITS.int()}, ArgumentError, r"logits: expected dtype"),
            ({"token_ids": IDS[:3]}, ArgumentError, r"token_ids: expected shape"),
            ({"temperature": 0.0}, ArgumentError, r"temperature: expected a number"),
            ({"kernel": "fast"}, ArgumentError, r"kernel: expected one of"),
            ({"token_ids": IDS + 12, "on_invalid": "raise"}, InvalidTokenIdError, r"\[0, 12\) .* got 12 in row 0"),
        ],
    )
    def test_statistics(self, kwargs, error, message):
        arguments = {"logits_shard": LOGITS, "token_ids": IDS, "vocab_start": 4, "vocab_size": 12, **kwargs}
        with pytest.raises(error, match=message):
            shard_statistics(**arguments)

    def test_an_id_of_another_shard_is_no_error(self):
        packed = shard_statistics(LOGITS, IDS + 11, vocab_start=0, vocab_size=12, on_invalid="raise")
        assert (packed[2] == -INF).all()

    @pytest.mark.parametrize(
        ("gathered", "kwargs", "error", "message"),
        [
            ([PACKED], {}, ArgumentTypeError, r"gathered: expected a torch.Tensor"),
            (PACKED[0, 0], {}, ArgumentError, r"gathered: expected shape"),
            (PACKED[:0], {}, ArgumentError, r"R >= 1"),
            (PACKED, {"num_ids": 3}, ArgumentError, r"F = 5 or 6 for num_ids=3"),
            (PACKED.bfloat16(), {}, ArgumentError, r"gathered: expected dtype float32 or float64"),
            (PACKED, {"temperature": -1.0}, ArgumentError, r"temperature: expected a number"),
            (PACKED, {"temperature": torch.ones(3)}, ArgumentError, r"temperature: expected shape \[4\]"),
            (PACKED, {"out_dtype": torch.int32}, ArgumentError, r"out_dtype: expected a floating dtype"),
        ],
    )
    def test_merge(self, gathered, kwargs, error, message):
        with pytest.raises(error, match=message):
            merge_statistics(gathered, **kwargs)

    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({"vocab_start": -1}, r"vocab_start: expected an int from 0"),
            ({"grad_logp": torch.ones(3)}, r"grad_logp: expected shape"),
            ({"row_max": torch.ones(4, dtype=torch.float64)}, r"row_max: expected dtype float32"),
            ({"entropy": torch.ones(4)}, r"grad_entropy: expected both"),
            ({"grad_logits": torch.empty(4, 7)}, r"grad_logits: expected shape"),
            ({"logits_shard": LOGITS.clone().requires_grad_()}, r"logits: expected no gradient"),
        ],
    )
    def test_backward(self, kwargs, message):
        arguments = {
            "grad_logp": torch.ones(4), "logits_shard": LOGITS, "token_ids": IDS, "row_max": torch.ones(4),
            "log_sum": torch.ones(4), "vocab_start": 4, "vocab_size": 12, **kwargs,
        }  # fmt: skip
        with pytest.raises(ArgumentError, match=message):
            shard_backward(**arguments)
