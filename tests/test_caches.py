"""What a call looks up must not depend on who came before it."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from support.reference64 import assert_values, forward64, same_bits

from fused_logp_hub import ArgumentTypeError, _checks, _problem, fused_logp


@pytest.fixture(autouse=True)
def empty(monkeypatch):
    monkeypatch.setattr(_checks, "_specs", {})


def batch():
    torch.manual_seed(0)
    return torch.randn(4, 50, dtype=torch.float64).mul_(3), torch.randint(50, (4,))


@pytest.mark.parametrize("first", [np.float16(0.7), np.float32(np.float16(0.7)), Fraction(1434, 2048)], ids=repr)
def test_a_temperature_of_another_type(first):
    """Equal to the float that follows, but 1 / T of NumPy's float16 is one too."""
    x, ids = batch()
    number = float(first)
    for temperature in (first, number):
        result = fused_logp(x, ids, temperature=temperature, return_lse=True)
        assert_values("logp", result.logp, forward64(x, ids, temperature=number).logp, x.dtype)
        lse = (x / number).logsumexp(-1)
        torch.testing.assert_close(result.row_max + result.log_sum, lse)


@pytest.mark.parametrize("temperature", [Decimal(1), 1 + 0j, np.array(1.0), "1"], ids=repr)
def test_a_temperature_that_is_no_number(temperature):
    """Refused, also where it equals the default; and the default still works afterwards."""
    x, ids = batch()
    with pytest.raises(ArgumentTypeError, match=r"^temperature: expected a number"):
        fused_logp(x, ids, temperature=temperature)
    assert_values("logp", fused_logp(x, ids), forward64(x, ids).logp, x.dtype)


@pytest.mark.parametrize("make", [np.int64, np.int32, torch.tensor, np.array], ids=lambda make: make.__name__)
def test_an_ignored_id_of_another_type(make):
    """Taken by its value at the call; what happens to the object later is nothing to a later call."""
    x, ids = batch()
    ids[1] = -100
    mark = make(-100)
    plain = fused_logp(x, ids)
    assert same_bits(fused_logp(x, ids, ignore_index=mark), plain)
    if isinstance(mark, torch.Tensor):
        mark.fill_(int(ids[0]))
        changed = fused_logp(x, ids, ignore_index=mark)
        assert changed[0] == 0
        assert same_bits(changed[2:], plain[2:])
    assert len(_checks._specs) == 1 + isinstance(mark, torch.Tensor)
    assert same_bits(fused_logp(x, ids), plain)


def test_calls_are_told_apart():
    """One entry for each set of shapes, strides, dtypes and options, whatever the addresses and values."""
    x, ids = batch()
    for _ in range(2):
        fused_logp(x, ids)
        fused_logp(x.clone(), ids.flip(0))
    assert len(_checks._specs) == 1
    variants = [
        {"temperature": 0.7}, {"ignore_index": None}, {"ignore_index": 3}, {"on_invalid": "nan"},
    ]  # fmt: skip
    for options in variants:
        fused_logp(x, ids, **options)
    fused_logp(x.float(), ids)
    fused_logp(x, ids.int())
    fused_logp(x[:, :-1], ids)
    fused_logp(x[:2], ids[:2])
    fused_logp(x, ids[:, None])
    fused_logp(x.T.contiguous().T, ids)
    fused_logp(x, ids.repeat_interleave(2)[::2])
    assert len(_checks._specs) == 1 + len(variants) + 7


def test_no_more_entries_than_are_of_use():
    cache = {}
    for i in range(3 * _problem.CACHE_ENTRIES):
        _problem.remember(cache, i, i)
        assert cache[i] == i
        assert len(cache) <= _problem.CACHE_ENTRIES
