"""A call that passed before is not checked again, and is told apart from every call that would end otherwise."""

from __future__ import annotations

import gc
import random
import weakref

import numpy as np
import pytest
import torch
from support.launches import record_launches
from support.layouts import nested
from torch.autograd import forward_ad

from fused_logp_hub import (
    ArgumentError,
    FusedLogpError,
    InvalidTokenIdError,
    _checks,
    _params,
    _recall,
    fused_logp,
    fused_logp_out,
)

ROWS, VOCAB = 4, 40


@pytest.fixture
def launched(monkeypatch):
    return record_launches(monkeypatch)


@pytest.fixture
def checked(monkeypatch):
    """The problems that were checked in full or in part."""
    problems = []
    make = _checks.make_problem
    monkeypatch.setattr(_checks, "make_problem", lambda *arguments: problems.append(arguments) or make(*arguments))
    return problems


def arguments():
    return {"logits": torch.randn(ROWS, VOCAB), "token_ids": torch.zeros(ROWS, dtype=torch.int64)}


def memory():
    return {"out": torch.empty(ROWS), "row_max": torch.empty(ROWS), "log_sum": torch.empty(ROWS)}


def told(launch):
    """Grid and fields without the addresses."""
    grid, fields = launch
    return grid, {name: value for name, value in fields.items() if name not in _params.LOGP_ADDRESSES}


@pytest.mark.parametrize("options", [{}, {"temperature": 0.5, "ignore_index": None, "on_invalid": "nan"}], ids=str)
def test_second_call_is_not_checked(launched, checked, options):
    for function, more in ((fused_logp, dict), (fused_logp_out, memory)):
        results = []
        for _ in range(3):
            tensors = {**arguments(), **more()}
            results.append(function(**tensors, **options))
            _, fields = launched[-1]
            assert fields["logits"] == tensors["logits"].data_ptr()
            assert fields["token_ids"] == tensors["token_ids"].data_ptr()
            assert fields["logp"] == results[-1].data_ptr()
            for name in ("row_max", "log_sum"):
                assert fields[name] == (tensors[name].data_ptr() if name in tensors else 0)
        assert {(r.shape, r.dtype) for r in results} == {((ROWS,), torch.float32)}
        assert told(launched[-1]) == told(launched[-2]) == told(launched[-3])
    assert len(checked) == 2
    assert len(launched) == 6


def test_several_ids_and_another_dtype(launched, checked):
    x, ids = torch.randn(2, 3, VOCAB), torch.zeros(2, 3, 5, dtype=torch.int32)
    for _ in range(2):
        logp = fused_logp(x, ids, out_dtype=torch.bfloat16)
        assert (logp.shape, logp.dtype) == (ids.shape, torch.bfloat16)
        assert fused_logp(x, ids).dtype == torch.float32
        assert fused_logp(x.double(), ids).dtype == torch.float64
    assert len(checked) == 3


def test_outputs_are_new_versions(launched):
    outputs = memory()
    for expected in (1, 2, 3):
        fused_logp_out(**arguments(), **outputs)
        assert {tensor._version for tensor in outputs.values()} == {expected}


OTHERS = {
    "temperature": {"temperature": 0.5},
    "temperature by row": {"temperature": torch.full((ROWS,), 2.0)},
    "scalar temperature": {"temperature": torch.tensor(2.0)},
    "temperature of NumPy": {"temperature": np.float64(1.0)},
    "ignored id": {"ignore_index": 3},
    "no ignored id": {"ignore_index": None},
    "ignored id of NumPy": {"ignore_index": np.int64(-100)},
    "invalid": {"on_invalid": "nan"},
    "raise": {"on_invalid": "raise"},
    "row mask": {"row_mask": torch.ones(ROWS, dtype=torch.bool)},
    "int32": {"token_ids": torch.zeros(ROWS, dtype=torch.int32)},
    "several ids": {"token_ids": torch.zeros(ROWS, 1, dtype=torch.int64)},
    "logits' dtype": {"logits": torch.randn(ROWS, VOCAB).bfloat16()},
    "fewer rows": {"logits": torch.randn(2, VOCAB), "token_ids": torch.zeros(2, dtype=torch.int64)},
    "a row's stride": {"logits": torch.randn(ROWS, VOCAB)[:, :-4]},
    "logits' strides": {"logits": torch.randn(ROWS, 2 * VOCAB)[:, :VOCAB]},
    "logits' alignment": {"logits": torch.randn(ROWS * VOCAB + 1)[1:].view(ROWS, VOCAB)},
    "logits to copy": {"logits": torch.randn(VOCAB, ROWS).T},
    "ids' strides": {"token_ids": torch.zeros(ROWS, 2, dtype=torch.int64)[:, 0]},
    "kernel": {"kernel": "online"},
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_another_call_is_checked(launched, checked, change):
    """Also after one that it might be taken for, and it launches what it launches alone."""
    fused_logp(**{**arguments(), **change})
    alone = told(launched[-1])
    _recall.passed.clear()
    fused_logp(**arguments())
    del checked[:]
    for _ in range(2):
        tensors = {**arguments(), **change}
        fused_logp(**tensors)
        assert checked
        assert told(launched[-1]) == alone
        logits = tensors["logits"]
        assert (launched[-1][1]["logits"] == logits.data_ptr()) == (logits.stride(-1) == 1)


def bad(name, **change):
    return pytest.param(change, f"^{name}: ", id=f"{name} {next(iter(change))}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        bad("out", out=torch.empty(ROWS + 1)),
        bad("out", out=torch.empty(ROWS, dtype=torch.int32)),
        bad("out", out=torch.empty(ROWS, 2)[:, 0]),
        bad("out", out=torch.empty(ROWS, requires_grad=True)),
        bad("out", out=[0.0] * ROWS),
        bad("out", out=torch.empty(ROWS).to_sparse()),
        bad("out", out=nested([torch.empty(2), torch.empty(2)], torch.jagged)),
        bad("out", out=nested([torch.empty(2), torch.empty(2)], torch.strided)),
        bad("out", out=torch.empty(ROWS).to_mkldnn()),
        bad("row_max", row_max=torch.empty(ROWS, dtype=torch.float64)),
        bad("log_sum", log_sum=torch.empty(2, 2)),
        bad("log_sum", log_sum=nested([torch.empty(2), torch.empty(2)], torch.strided)),
        bad("logits", logits=torch.randn(ROWS, VOCAB, requires_grad=True)),
        bad("logits", logits=torch.randn(ROWS, VOCAB).int()),
        bad("logits", logits=None),
        bad("logits", logits=nested([torch.empty(2, VOCAB), torch.empty(2, VOCAB)], torch.strided)),
        bad("token_ids", token_ids=torch.zeros(ROWS)),
        bad("token_ids", token_ids=torch.zeros(ROWS, dtype=torch.int64).to_sparse()),
        bad("token_ids", token_ids=torch.zeros(2, 2, dtype=torch.int64)),
        bad("token_ids", token_ids=torch.zeros(ROWS + 1, dtype=torch.int64)),
        bad("token_ids", token_ids=[0] * ROWS),
        bad("token_ids", token_ids=nested([torch.zeros(2, dtype=torch.int64)] * 2, torch.strided)),
        bad("temperature", temperature=0.0),
        bad("temperature", temperature=float("nan")),
        bad("temperature", temperature="1.0"),
        bad("temperature", temperature=np.array(1.0)),
        bad("ignore_index", ignore_index=-100.0),
        bad("on_invalid", on_invalid="one"),
        bad("on_invalid", on_invalid=[]),
        bad("kernel", kernel="none"),
    ],
)
def test_errors_after_a_call_that_passed(launched, change, message):
    one_id = torch.zeros((), dtype=torch.int64).expand(ROWS)  # has the strides that PyTorch gives sparse tensors
    for _ in range(2):
        fused_logp_out(**arguments(), **memory())
        fused_logp_out(**{**arguments(), "token_ids": one_id}, **memory())
        before = len(launched)
        with pytest.raises(FusedLogpError, match=message):
            fused_logp_out(**{**arguments(), **memory(), **change})
        assert len(launched) == before


def test_ids_to_raise_for_are_looked_at_each_time(launched):
    for _ in range(2):
        fused_logp(**arguments(), on_invalid="raise")
        with pytest.raises(InvalidTokenIdError):
            fused_logp(torch.randn(ROWS, VOCAB), torch.full((ROWS,), VOCAB), on_invalid="raise")


def test_gradients_and_transforms_after_a_call_that_passed(launched):
    x, ids = arguments().values()
    fused_logp(x, ids)
    leaf = torch.randn(ROWS, VOCAB, requires_grad=True)
    assert fused_logp(leaf, ids).requires_grad
    with torch.no_grad():
        assert not fused_logp(leaf, ids).requires_grad
    with pytest.raises(ArgumentError, match=r"^logits: expected a plain tensor"):
        torch.vmap(lambda row: fused_logp(row[None], ids[:1]))(x)
    with forward_ad.dual_level():
        with pytest.raises(ArgumentError, match=r"^logits: expected a plain tensor"):
            fused_logp(forward_ad.make_dual(x, torch.ones_like(x)), ids)
        fused_logp(x, ids)


@pytest.mark.gpu
def test_devices_after_a_call_that_passed():
    x, ids = (tensor.cuda() for tensor in arguments().values())
    outputs = {name: tensor.cuda() for name, tensor in memory().items()}
    for _ in range(2):
        for logits in (x, x.flip(0)):
            expected = logits.log_softmax(-1)[:, 0]
            torch.testing.assert_close(fused_logp(logits, ids), expected)
            torch.testing.assert_close(fused_logp_out(logits, ids, **outputs), expected)
            torch.testing.assert_close(outputs["row_max"] + outputs["log_sum"], logits.logsumexp(-1))
        with pytest.raises(ArgumentError, match=r"^token_ids: expected device"):
            fused_logp(x, ids.cpu())
        for name, tensor in memory().items():
            with pytest.raises(ArgumentError, match=rf"^{name}: expected device"):
                fused_logp_out(x, ids, **{**outputs, name: tensor})
        torch.testing.assert_close(fused_logp(x.cpu(), ids.cpu()), x.cpu().log_softmax(-1)[:, 0])


def test_calls_in_turns_are_all_known(launched, checked):
    """Same shape of the logits, yet different: neither makes the other be checked again."""
    calls = [
        arguments(),
        {**arguments(), "logits": torch.randn(ROWS, VOCAB).bfloat16()},
        {**arguments(), "logits": torch.randn(ROWS, 2 * VOCAB)[:, :VOCAB]},
        {**arguments(), "token_ids": torch.zeros(ROWS, 3, dtype=torch.int64)},
    ]
    for _ in range(3):
        for call in calls:
            fused_logp(**call)
    assert len(checked) == len(calls)
    fused_logp(**{**arguments(), "token_ids": torch.zeros(ROWS, dtype=torch.int32)})
    assert {len(found) for found in _recall.passed.values()} == {len(calls)}  # and no more


def test_a_pytorch_without_these_guards(launched, checked, monkeypatch):
    """Every call is checked, and launches the same."""
    fused_logp(**arguments())
    monkeypatch.setattr(_recall, "_TensorGuards", None)
    _recall.passed.clear()
    for _ in range(2):
        fused_logp(**arguments())
    assert len(checked) == len(launched) == 3
    assert told(launched[0]) == told(launched[1]) == told(launched[2])
    assert not _recall.passed


def test_no_tensor_is_kept(launched):
    """Of a call that passed only what its tensors are like is remembered, not their memory."""
    tensors = {**arguments(), **memory()}
    fused_logp_out(**tensors)
    fused_logp(tensors["logits"], tensors["token_ids"])
    assert len(_recall.passed) == 2
    kept = [weakref.ref(tensor) for tensor in tensors.values()]
    del tensors
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)


def random_calls(generator):
    """Calls that have most in common with the one before, some of them to be refused."""
    store, several = torch.randn(2 * ROWS * VOCAB + 8), torch.empty(2 * ROWS)
    x = store[: ROWS * VOCAB].view(ROWS, VOCAB)
    ids = torch.zeros(2 * ROWS, dtype=torch.int64)
    outputs = [torch.empty(ROWS), torch.empty(ROWS, dtype=torch.float64), several, several[::2], torch.empty(ROWS, 2)]
    pools = {
        "logits": [
            x, x.double(), x.half(), x.clone().requires_grad_(), store[: 2 * ROWS * VOCAB].view(-1, VOCAB),
            store[1 : ROWS * VOCAB + 1].view(ROWS, VOCAB), store[: 2 * ROWS * VOCAB].view(ROWS, -1)[:, :VOCAB],
        ],
        "token_ids": [ids[:ROWS], ids, ids[::2], ids[:ROWS].int(), ids[:ROWS, None], ids.view(ROWS, 2)],
        "out": [None, *outputs], "row_max": [None, *outputs], "log_sum": [None, *outputs],
        "entropy": [None, outputs[0]],
        "temperature": [1.0, 0.5], "ignore_index": [-100, None, 0], "on_invalid": ["zero", "nan"],
        "kernel": ["auto", "online"],
    }  # fmt: skip
    call = {name: pool[0] for name, pool in pools.items()}
    for _ in range(400):
        for name in generator.sample(list(pools), generator.choice((0, 1, 1, 2))):
            call[name] = generator.choice(pools[name])
        yield dict(call)


def outcome(launched, out, row_max, log_sum, entropy, **call):
    """What a call launched and gave, or how it was refused; without ``out`` in new memory."""
    try:
        if out is not None:
            fused_logp_out(**call, out=out, row_max=row_max, log_sum=log_sum, entropy=entropy)
            return launched.pop()
        logp = fused_logp(**call)
        grid, fields = launched.pop()
        assert fields.pop("logp") == logp.data_ptr()
        assert (fields.pop("row_max") == fields.pop("log_sum") == 0) is not logp.requires_grad
        return logp.shape, logp.dtype, logp.requires_grad, grid, fields
    except FusedLogpError as error:
        return str(error)
    finally:
        assert launched == []


@pytest.mark.parametrize("seed", range(5))
def test_random_calls_end_as_if_all_were_checked(launched, checked, monkeypatch, seed):
    calls = list(random_calls(random.Random(seed)))
    recalled = [outcome(launched, **call) for call in calls]
    assert len(checked) < len(calls)
    del checked[:]
    monkeypatch.setattr(_recall, "_TensorGuards", None)
    _recall.passed.clear()
    assert [outcome(launched, **call) for call in calls] == recalled
    assert {str, tuple} == {type(found) for found in recalled}


def test_no_rows(launched):
    for _ in range(2):
        assert fused_logp(torch.randn(0, VOCAB), torch.zeros(0, dtype=torch.int64)).shape == (0,)
    assert launched == []
