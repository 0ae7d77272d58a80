"""What the kernels are told, without a GPU: the packed parameters lead to each row's own memory.

The driver is replaced by one that keeps the bytes. For strided, sliced, expanded and folded inputs the
address of every row, computed from the bytes as kernels_src/row.cuh does, must be that row's.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch
from support.launches import record_launches

from fused_logp_hub import _checks, _launch, _ops, _params
from fused_logp_hub._problem import Shard


@pytest.fixture
def launched(monkeypatch):
    return record_launches(monkeypatch)


def row_addresses(name, fields, itemsize):
    data, (outer, inner) = fields[name], fields[f"{name}_rows"]
    rows, inner_rows = fields["num_rows"], fields["inner_rows"]
    return [data + (r // inner_rows * outer + r % inner_rows * inner) * itemsize for r in range(rows)]


def expected_addresses(tensor, depth):
    """The address of each row, over the first `depth` dimensions."""
    offsets = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(tensor.shape[:depth], tensor.stride()[:depth], strict=True):
        offsets = offsets[..., None] + torch.arange(size) * stride
    return [tensor.data_ptr() + o * tensor.element_size() for o in offsets.reshape(-1).tolist()]


base = torch.randn(4, 6, 40)
LOGITS = {
    "one row": base[0, 0],
    "rows": base[0],
    "one column": base[0, :, :1],
    "sliced": base[:, :-1],
    "transposed": base.transpose(0, 1),
    "expanded": base[:1, :1].expand(4, 6, 40),
    "a column short": base[..., :-1],
    "three dimensions that fold": base.view(2, 2, 6, 40),
    "three dimensions, the last sliced": base.view(2, 2, 6, 40)[:, :, :4],
    "no rows": base[:0],
}


@pytest.mark.parametrize("logits", LOGITS.values(), ids=LOGITS)
@pytest.mark.parametrize("ids_of", ["contiguous", "strided", "several"])
def test_rows_are_where_the_parameters_say(launched, logits, ids_of):
    leading = logits.shape[:-1]
    if ids_of == "strided":
        ids = torch.zeros((*leading, 2), dtype=torch.int64)[..., 0]
    else:
        ids = torch.zeros((*leading, 3) if ids_of == "several" else leading, dtype=torch.int32)
    temperature = torch.ones(leading)
    problem = _checks.make_problem(logits, ids, None, temperature, -100, "zero")
    logp, statistics, entropy = _ops.run_forward(problem, "auto", torch.float32, True, True)
    grad_logp = torch.ones(()).expand(ids.shape)
    grad_logits = _ops.run_backward(problem, "auto", statistics, entropy, grad_logp, entropy)
    if logits.numel() == 0:
        assert launched == []
        return
    (grid, forward), (_, backward) = launched
    depth = len(leading)
    assert grid == max(1, leading.numel())
    for fields in (forward, backward):
        assert (fields["num_rows"], fields["vocab_size"]) == (leading.numel(), logits.shape[-1])
        assert fields["num_ids"] == (3 if ids_of == "several" else 1)
        assert row_addresses("logits", fields, logits.element_size()) == expected_addresses(logits, depth)
        if depth <= 2:  # deeper ids may have been copied
            assert row_addresses("token_ids", fields, ids.element_size()) == expected_addresses(ids, depth)
        assert fields["token_ids_last"] == (1 if ids_of == "several" else 0)
        assert fields["token_id_bytes"] == ids.element_size()
        addresses = row_addresses("temperature", fields, 4)
        assert addresses == expected_addresses(temperature, depth)
        assert fields["row_max"] == statistics[0].data_ptr()
        assert fields["log_sum"] == statistics[1].data_ptr()
        assert fields["entropy"] == entropy.data_ptr()
        assert fields["row_max_is_raw"] == 1
    assert forward["logp"] == logp.data_ptr()
    assert row_addresses("grad_logits", backward, 4) == expected_addresses(grad_logits, depth)
    assert (backward["grad_logp"], backward["grad_logp_rows"]) == (grad_logp.data_ptr(), (0, 0))


def test_layouts_of_one_shape_in_turn(launched):
    """What was worked out for one is not taken for another."""
    base, ids = torch.randn(6, 4, 80), torch.zeros(4, 4, dtype=torch.int64)
    layouts = [
        base[:4, :, :40],
        base[1:5, :, 1:41],
        base[:1, :1, :40].expand(4, 4, 40),
        base[:4, :, :40].transpose(0, 1),
    ]
    for logits in layouts * 2:
        for strided in (ids, ids.T, ids.repeat(1, 2)[:, ::2]):
            problem = _checks.make_problem(logits, strided, None, 1.0, -100, "zero")
            _ops.run_forward(problem, "auto", torch.float32, False, False)
            _, fields = launched[-1]
            assert row_addresses("logits", fields, logits.element_size()) == expected_addresses(logits, 2)
            assert row_addresses("token_ids", fields, ids.element_size()) == expected_addresses(strided, 2)
    assert len(launched) == 2 * len(_launch.launches) == 2 * 3 * len(layouts)


def taken_for_known():
    """What kernels_src/usual.cuh sets: the fields' values by name, as it spells them."""
    source = Path(__file__).parent.parent / "kernels_src" / "usual.cuh"
    if not source.is_file():
        pytest.skip("needs the kernels' sources")
    return dict(re.findall(r"known\.(\w+) = ([^;]+);", source.read_text(encoding="utf-8")))


@pytest.mark.parametrize("logits", [base[0], base.view(2, 12, 40), base[:, :-1]], ids=["2-D", "3-D", "sliced"])
@pytest.mark.parametrize("entropy", [False, True], ids=["logp", "entropy"])
def test_code_for_usual_calls_runs_where_what_it_takes_for_known_holds(launched, logits, entropy):
    """And in all of these calls, forward and backward."""
    leading, vocab = logits.shape[:-1], logits.shape[-1]
    known = taken_for_known()
    values = {"1": 1, "8": 8, "0": 0, "nullptr": 0, "kFloat32": _params.DTYPE_CODES["float32"]}
    kinds = set()
    for masked, per_row, several, short, shard, dtype in itertools.product(
        *[(False, True)] * 5, (torch.float32, torch.bfloat16)
    ):
        ids = torch.zeros((*leading, 2) if several else leading, dtype=torch.int32 if short else torch.int64)
        mask = torch.ones(leading, dtype=torch.bool) if masked else None
        temperature = torch.ones(leading) if per_row else 0.7
        place = Shard(0, vocab + 8) if shard else None
        problem = _checks.make_problem(logits, ids, mask, temperature, -100, "zero", place)
        _, statistics, entropies = _ops.run_forward(problem, "auto", dtype, True, entropy)
        g = torch.ones(ids.shape, dtype=dtype)
        if not shard:
            _ops.run_backward(problem, "auto", statistics, entropies, g, entropies)
        for _, fields in launched:
            holds = [
                fields["inner_rows"] >= fields["num_rows"] if value == "~0u" else fields[name] == values[value]
                for name, value in known.items()
            ]
            assert fields["usual"] == all(holds)
            kinds.add(fields["usual"])
        launched.clear()
    assert kinds == ({False} if entropy or not logits.is_contiguous() else {False, True})


@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 8)])
def test_vocabulary_stride_is_copied_first(launched, shape):
    logits = torch.randn(*shape[:-1], 16)[..., ::2]
    _ops.run_forward(
        _checks.make_problem(logits, torch.zeros(shape[:-1], dtype=torch.int64), None, 1.0, None, "nan"),
        "auto",
        torch.bfloat16,
        False,
        False,
    )
    ((_, fields),) = launched
    assert fields["logits"] != logits.data_ptr()
    assert fields["logits_rows"][1] == shape[-1]
    assert (fields["use_ignore_index"], fields["invalid_is_nan"]) == (0, 1)
    assert (fields["row_max"], fields["log_sum"], fields["entropy"]) == (0, 0, 0)
    assert fields["logp_dtype"] == _params.DTYPE_CODES["bfloat16"]


@pytest.mark.parametrize("ignore_index", [-100, 5, -(2**63), 2**63 - 1])
def test_ids_of_a_shard(launched, ignore_index):
    """Columns beyond the vocabulary are not the kernels', and the ignored id is moved as the kernels move ids."""
    logits, ids = torch.randn(4, 40), torch.zeros(4, dtype=torch.int64)
    problem = _checks.make_problem(logits, ids, None, 1.0, ignore_index, "zero", Shard(90, 110))
    _, statistics, entropy = _ops.run_forward(problem, "auto", torch.float32, True, True)
    _ops.run_backward(problem, "auto", statistics, entropy, torch.ones(4), None)
    whole = _checks.make_problem(logits, ids, None, 1.0, ignore_index, "zero")
    _ops.run_forward(whole, "auto", torch.float32, True, True)
    *shards, (_, fields) = launched
    assert [fields[name] for name in ("vocab_start", "global_vocab_size", "is_shard")] == [0, 40, 0]
    assert fields["ignore_index"] == ignore_index
    assert len(shards) == 2
    for _, fields in shards:
        assert row_addresses("logits", fields, 4) == expected_addresses(logits, 1)
        names = ("vocab_size", "vocab_start", "global_vocab_size", "is_shard")
        assert [fields[name] for name in names] == [20, 90, 110, 1]
        assert (fields["ignore_index"] - ignore_index + 90) % 2**64 == 0


def test_padding_of_a_shard_has_no_blocks(launched):
    """A tile's worth of columns, and one of padding: the kernels count tiles without it, and so must the grid."""
    logits, ids = torch.randn(3, 2049), torch.zeros(3, dtype=torch.int64)
    problem = _checks.make_problem(logits, ids, None, 1.0, None, "zero", Shard(0, 2048))
    _, statistics, _ = _ops.run_forward(problem, "auto", torch.float32, True, False)
    _ops.run_backward(problem, "auto", statistics, None, torch.ones(3), None)
    grid, fields = launched[-1]
    assert (grid, fields["vocab_size"]) == (3, 2048)


def test_temperatures_that_are_negated_lazily(launched):
    given = torch.full((4,), -2.0)
    x, ids = torch.randn(4, 40), torch.zeros(4, dtype=torch.int64)
    problem = _checks.make_problem(x, ids, None, torch._neg_view(given), None, "zero")
    _ops.run_forward(problem, "auto", torch.float32, False, False)
    assert launched[-1][1]["temperature"] not in (0, given.data_ptr())


def test_gradients_that_are_negated_lazily(launched):
    problem = _checks.make_problem(torch.randn(4, 40), torch.zeros(4, dtype=torch.int64), None, 1.0, None, "zero")
    _, statistics, entropy = _ops.run_forward(problem, "auto", torch.float32, True, True)
    given = torch.randn(2, 4)
    lazy = torch._neg_view(given)
    assert lazy.is_neg()
    _ops.run_backward(problem, "auto", statistics, entropy, lazy[0], lazy[1])
    _, fields = launched[-1]
    own = range(given.data_ptr(), given.data_ptr() + given.nbytes)
    assert fields["grad_logp"] not in own
    assert fields["grad_entropy"] not in own


def test_tensors_that_a_hook_has_changed(launched):
    """A saved-tensor hook may give the backward ids or logits of another dtype than the forward had."""
    x, ids = torch.randn(4, 40), torch.zeros(4, dtype=torch.int64)
    problem = _checks.make_problem(x, ids, None, 1.0, None, "zero")
    _, statistics, _ = _ops.run_forward(problem, "auto", torch.float32, True, False)
    entries = len(_launch.launches)
    for changed in (problem, problem._replace(token_ids=ids.int()), problem._replace(logits=x.bfloat16())):
        for _ in range(2):
            _ops.run_backward(changed, "auto", statistics, None, torch.ones(4), None)
            assert launched[-1][1]["token_id_bytes"] == changed.token_ids.element_size()
        entries += 1
        assert len(_launch.launches) == entries
