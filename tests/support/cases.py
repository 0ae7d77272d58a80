"""The one table of inputs: every test over kernels and devices runs over these. Names n.., g.. are those of the issue list.

A builder takes (device, dtype) and returns logits, token_ids and the keyword arguments of `fused_logp`
that change the result. Sizes are small unless the reason says what a large one is for. The kernels cut a
row into vectors of 16 bytes, tiles of some KiB and segments of whole tiles, all powers of two until a row
has too many segments: so powers of two, and one column more or less, are where a cut can go wrong.
"""

# ruff: noqa: E501  (a case is a line)
from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from support.kernels import SUFFIX, VARIANTS, Variant, is_compiled

ALL = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
WIDE = (torch.float32, torch.float64)
BF16 = (torch.bfloat16,)
INF, NAN = float("inf"), float("nan")
Batch = tuple[Tensor, Tensor, dict[str, Any]]


@dataclass(frozen=True)
class Case:
    name: str
    why: str
    builder: Callable[[str, torch.dtype], Batch]
    dtypes: tuple[torch.dtype, ...] = ALL
    copied: bool = False
    """Whether the CUDA kernels cannot read the logits in place."""
    large: bool = False
    """For the GPU only: about how its kernels share out rows and columns."""

    def build(self, device: str, dtype: torch.dtype) -> Batch:
        torch.manual_seed(zlib.crc32(self.name.encode()))
        return self.builder(device, dtype)


def randn(device, dtype, *shape, std=3.0):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.randn(shape, device=device, dtype=wide).mul_(std).to(dtype)


def random_ids(x: Tensor, *tail: int, dtype=torch.int64) -> Tensor:
    return torch.randint(x.shape[-1], (*x.shape[:-1], *tail), device=x.device, dtype=dtype)


# ---- The lines of the contract's table, several rows each.


def plain(device, dtype, n=8, v=1000, **kwargs):
    x = randn(device, dtype, n, v)
    return x, random_ids(x), kwargs


def ignored(device, dtype, index=-100, **kwargs):
    x, ids, _ = plain(device, dtype)
    ids[::2] = index
    x[0] = NAN  # an ignored row is never read
    return x, ids, kwargs


def masked(device, dtype, strided=False):
    x, ids, _ = plain(device, dtype)
    mask = torch.tensor([1, 0, 0, 1, 1, 0, 1, 0], device=device, dtype=torch.bool)
    x[1], x[2] = NAN, -INF
    if strided:
        mask = mask.repeat_interleave(2)[::2]
    return x, ids, {"row_mask": mask}


def listed(device, dtype, indices, index_dtype=torch.int64, mask=None, stride=1):
    x, ids, _ = plain(device, dtype)
    kwargs = {
        "row_indices": torch.tensor(indices, device=device, dtype=index_dtype).repeat_interleave(stride)[::stride]
    }
    if mask is not None:
        kwargs["row_mask"] = torch.tensor(mask, device=device, dtype=torch.bool)
    x[7] = NAN  # no list below has row 7
    return x, ids, kwargs


def listed_of_two_dims(device, dtype):
    x = randn(device, dtype, 3, 5, 33)
    return x, random_ids(x), {"row_indices": torch.tensor([0, 4, 5, 14], device=device)}


def some_neg_inf(device, dtype, **kwargs):
    x, ids, _ = plain(device, dtype)
    x[torch.rand(x.shape, device=device) < 0.3] = -INF
    ids[:4] = torch.tensor([0, 999, 500, 7], device=device)
    rows = torch.arange(8, device=device)
    x[rows[:4], ids[:4]] = -INF  # the target itself
    x[rows[4:], ids[4:]] = 1.0
    return x, ids, kwargs


def broken(device, dtype, value, at=(0, 500, 999), **kwargs):
    """Every other row has one bad value, at the row's ends and in its middle; the last row is all -inf."""
    x, ids, _ = plain(device, dtype)
    for row, column in zip((0, 2, 4), at, strict=True):
        x[row, column] = value
    x[7] = -INF
    return x, ids, kwargs


def invalid_ids(device, dtype, id_dtype, **kwargs):
    values = [-1, 1000, 2**31 - 1, -(2**31), 2**31, -(2**40), 2**40, -(2**63)]
    if id_dtype == torch.int32:
        values = [-1, 1000, 2**31 - 1, -(2**31), -99, 1001, 1 << 20, -(1 << 20)]
    x = randn(device, dtype, 12, 1000)
    ids = random_ids(x, dtype=id_dtype)
    ids[:8] = torch.tensor(values, device=device, dtype=id_dtype)
    ids[11] = -100
    return x, ids, kwargs


# ---- Numbers.


def n5(device, dtype, v):
    """Nine rows have every alignment; the CPU, to which that is nothing, gets two."""
    return plain(device, dtype, n=2 if device == "cpu" else 9, v=v)


def n3(device, dtype):
    x = torch.full((2, 100000), -INF, device=device, dtype=dtype)
    x[:, 50000] = 1.0
    return x, torch.tensor([50000, 1], device=device), {}


def n4(device, dtype):
    x = randn(device, dtype, 6, 9000)
    x[:, -1000:] = -INF
    return x, random_ids(x[:, :-1000]), {}


def n7(device, dtype):
    x = torch.full((3, 5000), -1000.0, device=device, dtype=dtype)
    return x, random_ids(x), {}


def n8_pair(device, dtype, value):
    return (
        torch.full((1, 2), value, device=device, dtype=dtype),
        torch.zeros(1, device=device, dtype=torch.int64),
        {},
    )


def n8_shifted(device, dtype, shift, **kwargs):
    x = randn(device, dtype, 4, 1000) + shift
    return x, random_ids(x), kwargs


def n9(device, dtype):
    """One row for each place that the finite value can have: every lane of the first warps' vectors."""
    places = torch.arange(0, 1024, 16 if device == "cpu" else 1, device=device)
    x = torch.full((len(places), 1024), -INF, device=device, dtype=dtype)
    x.scatter_(1, places.unsqueeze(1), 2.0)
    return x, places, {}


def n10(device, dtype):
    x = randn(device, dtype, 8, 128256)
    ids = random_ids(x)
    x[torch.arange(8, device=device), ids] = x.float().amax(-1).add(40).to(dtype)
    return x, ids, {}


def n12_rows(device, dtype, kind):
    x = randn(device, dtype, 4, 6, 1000)
    t = torch.rand(4, 6, device=device) + 0.3
    if kind == "transposed":
        t = t.t().contiguous().t()
    elif kind == "expanded":
        t = t[:, :1].expand(4, 6)
    elif kind == "scalar":
        t = torch.tensor(0.7, device=device)
    return x, random_ids(x), {"temperature": t}


# ---- Strides.


def transposed(device, dtype, shape=(4, 2, 8)):
    x = randn(device, dtype, *shape).transpose(0, 1)
    return x, random_ids(x), {}


def sliced_time(device, dtype):
    """The usual shift by one: logits[:, :-1] against ids[:, 1:], both odd strides."""
    x = randn(device, dtype, 3, 7, 1000)
    ids = random_ids(x)
    return x[:, :-1], ids[:, 1:], {}


def sliced_vocab(device, dtype):
    x = randn(device, dtype, 6, 1024)[:, 3:1003]
    return x, random_ids(x), {}


def padded_rows(device, dtype):
    """Odd V, yet every row on a 16-byte boundary: the bulk copy's ragged tail."""
    x = randn(device, dtype, 5, 8208)[:, :8193]
    return x, random_ids(x), {}


def vocab_stride(device, dtype):
    x = randn(device, dtype, 4, 1000)[..., ::2]
    return x, random_ids(x), {}


def expanded(device, dtype):
    x = randn(device, dtype, 1, 1000).expand(5, 1000)
    return x, random_ids(x), {}


def permuted(device, dtype, shape, order):
    x = randn(device, dtype, *shape).permute(*order)
    return x, random_ids(x), {}


def one_row(device, dtype):
    x = randn(device, dtype, 33)
    return x, torch.tensor(5, device=device), {}


def odd_ids(device, dtype, id_dtype):
    """Ids of stride 3 in one dimension and an odd offset, in a tensor whose other entries are invalid."""
    x = randn(device, dtype, 4, 5, 300)
    store = torch.full((4, 16), 2**30, device=device, dtype=id_dtype)
    ids = store[:, 1::3]
    ids.copy_(random_ids(x))
    return x, ids, {}


# ---- Several ids a row.


def one_id(device, dtype):
    x, ids, _ = plain(device, dtype)
    return x, ids.unsqueeze(-1), {}


def k_ids(device, dtype, n=6, v=1000, k=5, strided=False, **kwargs):
    x = randn(device, dtype, n, v)
    ids = random_ids(x, k)
    ids[0] = ids[0, 0]  # all the same
    ids[1, 1:3] = -100  # some ignored
    ids[2] = -100  # all ignored
    ids[3, 0] = v  # one invalid
    ids[4, :2] = torch.tensor([v - 1, 0], device=device)  # the row's ends
    if strided:
        ids = ids.t().contiguous().t()
    return x, ids, kwargs


def k_ids_of_two_dims(device, dtype):
    x = randn(device, dtype, 4, 3, 200).transpose(0, 1)
    return x, random_ids(x, 4, dtype=torch.int32), {"temperature": 0.7}


def empty(device, dtype, shape, tail=(), **kwargs):
    x = torch.empty(*shape, device=device, dtype=dtype)
    return x, random_ids(x, *tail), kwargs


def empty_list(device, dtype):
    x, ids, _ = plain(device, dtype)
    return x, ids, {"row_indices": torch.empty(0, device=device, dtype=torch.int64)}


# fmt: off
CASES = [
    Case("plain", "the usual call", plain),
    Case("ignored", "id == ignore_index: 0, and NaN in the row does not matter", ignored),
    Case("ignored_pad_0", "ignore_index inside the vocabulary wins over a valid id", partial(ignored, index=0, ignore_index=0)),
    Case("ignore_none", "without the rule -100 is one more id outside [0, V)", partial(invalid_ids, id_dtype=torch.int64, ignore_index=None)),
    Case("ignore_none_nan", "and gives NaN where that is asked for", partial(invalid_ids, id_dtype=torch.int32, ignore_index=None, on_invalid="nan")),
    Case("masked", "masked-out rows are 0 and not read: they hold NaN and -inf", masked),
    Case("masked_strided", "a mask that is no contiguous tensor", partial(masked, strided=True)),
    Case("listed", "row_indices out of order, one twice", partial(listed, indices=[3, 0, 3, 5])),
    Case("listed_outside", "entries outside [0, N) are skipped, in int32 too", partial(listed, indices=[-1, 2, 8, 2**31 - 1, 2], index_dtype=torch.int32)),
    Case("listed_far_outside", "entries beyond 32 bits do not wrap round", partial(listed, indices=[2**32 + 1, 2, -(2**40)])),
    Case("listed_strided", "row_indices of stride 3", partial(listed, indices=[1, 4], stride=3)),
    Case("listed_and_masked", "both must admit a row", partial(listed, indices=[0, 1, 2, 3], mask=[1, 0, 1, 0, 1, 1, 1, 1])),
    Case("listed_of_two_dims", "row numbers are flat over [B, T]", listed_of_two_dims),
    Case("listed_none", "g5: an empty list gives zeros", empty_list),
    Case("some_neg_inf", "a target at -inf gives -inf; p = 0 there", some_neg_inf),
    Case("some_neg_inf_T", "the same under a temperature", partial(some_neg_inf, temperature=0.7)),
    Case("nan", "NaN at either end of a row or in it; a row of -inf", partial(broken, value=NAN)),
    Case("pos_inf", "+inf likewise: NaN, as torch.log_softmax", partial(broken, value=INF)),
    Case("pos_inf_T", "and under a temperature", partial(broken, value=INF, temperature=0.7)),
    Case("n3", "all -inf but one column far into the row: whole segments without a finite value", n3),
    Case("n4", "a padded vocabulary that ends in the second tile", n4),
    *(
        Case(f"n5_V{v}", f"V={v} with rows at every alignment{why}", partial(n5, v=v))
        for v, why in (
            (1, "; p is 1, gradient 0"),
            (2, ""),
            (31, ": just under a warp"),
            (33, ": just over one"),
            (1023, ""),
            (50257, ": GPT-2"),
            (151665, ": Qwen"),
        )
    ),
    *(
        Case(f"tile_V{2**k + more}", f"V=2**{k}{more:+d}: where a tile or segment of any size ends, or a column beside", partial(plain, n=2, v=2**k + more), (torch.bfloat16, torch.float32), large=True)
        for k in range(9, 18)
        for more in (-1, 0, 1)
    ),
    *(
        Case(f"n6_V{v}", f"V={v}: tilings that leave a block or segment empty", partial(plain, n=3, v=v), BF16, large=v > 151936)
        for v in (100352, 151936, 152064, 200064, 201088, 262208)
    ),
    Case("n7", "every logit -1000: -log V", n7),
    Case("n8_1e4", "[1e4, 1e4]: -log 2", partial(n8_pair, value=1e4)),
    Case("n8_1e8", "[1e8, 1e8]: -log 2", partial(n8_pair, value=1e8), (torch.bfloat16, *WIDE)),
    Case("n8_shift", "a random row moved by 1e4", partial(n8_shifted, shift=1e4), WIDE),
    Case("n8_shift_T", "the same under a temperature: row_max and log_sum stay apart", partial(n8_shifted, shift=1e4, temperature=0.7), WIDE),
    Case("n9", "one finite value at each of 1024 places; over 264 rows, so that persistent blocks take several", n9),
    Case("n10", "peaked rows: logp near 0 and never above it", n10, BF16),
    Case("n11_int64", "ids far outside, also beyond 32 bits", partial(invalid_ids, id_dtype=torch.int64)),
    Case("n11_int32", "ids far outside, at 32 bits' ends", partial(invalid_ids, id_dtype=torch.int32)),
    Case("n11_nan", "the same with on_invalid='nan'; -100 stays ignored", partial(invalid_ids, id_dtype=torch.int64, on_invalid="nan")),
    Case("n12_T0.6", "T = 0.6", partial(plain, temperature=0.6)),
    Case("n12_T0.7", "T = 0.7, odd V", partial(plain, v=1023, temperature=0.7)),
    Case("n12_T1.7", "T above 1, an integer would do as well", partial(plain, temperature=1.7)),
    Case("n12_T2_int", "T as an int", partial(plain, temperature=2)),
    *(
        Case(f"n12_rows_{kind}", f"a temperature for each row, {kind}", partial(n12_rows, kind=kind))
        for kind in ("contiguous", "transposed", "expanded", "scalar")
    ),
    Case("g4_transposed", "[4, 2, 8] transposed (0, 1), read in place", transposed),
    Case("g4_transposed_wide", "the same with an odd V of two tiles", partial(transposed, shape=(5, 3, 9001))),
    Case("g4_shifted", "x[:, :-1] against ids[:, 1:], read in place", sliced_time),
    Case("g4_vocab_slice", "x[:, 3:1003]: aligned stride, odd start", sliced_vocab),
    Case("g4_padded", "aligned rows of odd V, one column into the next tile: the copy engine's ragged tail", padded_rows),
    Case("g4_stride_2", "x[..., ::2] is copied", vocab_stride, copied=True),
    Case("g4_expand", "all rows are one row in memory", expanded),
    Case("dims_1", "no leading dimension at all", one_row),
    Case("dims_4_fold", "three leading dimensions that fold into one stride", partial(permuted, shape=(2, 3, 4, 65), order=(0, 1, 2, 3))),
    Case("dims_4_fold_2", "three leading dimensions that fold into two strides", partial(permuted, shape=(4, 2, 3, 65), order=(1, 2, 0, 3))),
    Case("dims_4_copy", "three leading dimensions in an order that does not fold", partial(permuted, shape=(2, 3, 4, 65), order=(2, 1, 0, 3)), copied=True),
    Case("dims_5_ones", "dimensions of size 1 count for nothing", partial(permuted, shape=(3, 1, 4, 1, 65), order=(2, 1, 0, 3, 4))),
    Case("ids_int64", "ids of stride 3 at an odd offset", partial(odd_ids, id_dtype=torch.int64)),
    Case("ids_int32", "the same in int32", partial(odd_ids, id_dtype=torch.int32)),
    Case("k_1", "K = 1 keeps its dimension", one_id),
    Case("k_5", "equal ids, ignored ones, an invalid one", k_ids),
    Case("k_5_strided", "the ids of a row are not neighbours", partial(k_ids, strided=True, temperature=0.7)),
    Case("k_5_none", "no ignore_index: -100 is invalid", partial(k_ids, ignore_index=None)),
    Case("k_5_nan", "an invalid id is NaN and takes the row's gradient along; ignored ones beside it stay 0", partial(k_ids, on_invalid="nan")),
    Case("k_40", "more ids than lanes of a warp, across two tiles", partial(k_ids, k=40, v=9001)),
    Case("k_1024", "as many ids as are allowed, more than columns: every column is hit", partial(k_ids, k=1024, v=500)),
    Case("k_two_dims", "[B, T, K] in int32 on transposed logits", k_ids_of_two_dims),
    Case("g5_N0", "no rows", partial(empty, shape=(0, 7))),
    Case("g5_N0_of_two_dims", "no rows in three dimensions, K ids", partial(empty, shape=(3, 0, 7), tail=(2,), temperature=0.7)),
    Case("rows_300", "more rows than the few-rows kernel takes", partial(plain, n=300, v=9001), large=True),
    Case("rows_1400", "several rows and an odd number of tiles for each persistent block, so that its ring goes round", partial(plain, n=1400, v=3 * 8192 + 8, temperature=0.7), BF16, large=True),
]
# fmt: on


def grid(variants: Iterable[Variant] = VARIANTS, cases: Iterable[Case] = CASES) -> list[Any]:
    """pytest's parameters: every case, in every dtype that it is for, with every kernel variant."""
    return [
        pytest.param(case, dtype, variant, id=f"{case.name}-{SUFFIX[dtype]}-{variant}", marks=variant.marks)
        for case in cases
        for dtype in case.dtypes
        for variant in variants
        if variant.device != "cpu" or not case.large
        if variant.only is None or is_compiled(variant.only, dtype)
    ]
