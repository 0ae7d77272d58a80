"""vocab_parallel_logp over gloo, in groups of 2 and of 3 processes, against float64 and the unsharded call."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support import vocab_parallel
from support.cases import SUFFIX
from support.ranks import run_ranks
from support.reference64 import same_bits
from torch.utils.checkpoint import checkpoint

from fused_logp_hub import ArgumentError, ArgumentTypeError, InvalidTokenIdError, SecondDerivativeError, fused_logp
from fused_logp_hub._placement import complete
from fused_logp_hub.distributed import vocab_parallel_logp


@pytest.fixture(scope="module", params=[2, 3], ids="{} ranks".format)
def ranks(request, tmp_path_factory):
    """What every rank returned; each group runs once for all tests."""
    return run_ranks(vocab_parallel.everything, request.param, "gloo", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(
    "index",
    range(len(vocab_parallel.CASES_OF["cpu"])),
    ids=[f"{case.name}-{SUFFIX[dtype]}" for case, dtype in vocab_parallel.CASES_OF["cpu"]],
)
def test_the_contract_holds(ranks, index):
    case, dtype = vocab_parallel.CASES_OF["cpu"][index]
    vocab_parallel.judge([rank["cases"][index] for rank in ranks], case, dtype, "cpu")


def test_one_small_collective(ranks):
    """Bytes a row that a rank sends, in one collective a forward and none a backward: 100 rows, float32."""
    assert [rank["counted"] for rank in ranks] == [vocab_parallel.COUNTED] * len(ranks)


def test_placement_and_memory(ranks):
    vocab_parallel.judge_placed([rank["placed"] for rank in ranks])


def test_dtensors(ranks):
    vocab_parallel.judge_dtensors([rank["dtensors"] for rank in ranks])


def test_errors(ranks):
    for rank, results in enumerate(ranks):
        errors = dict(results["errors"])
        if rank == 0:
            assert errors.pop("another's group") == "no error"
        else:
            assert "group: expected one that this process is in" in errors.pop("another's group")
        assert errors.keys() == vocab_parallel.ERRORS.keys()
        for name, expected in vocab_parallel.ERRORS.items():
            assert errors[name].startswith(f"ArgumentError: {expected}"), name


@pytest.fixture
def alone(tmp_path):
    """A group of this process only."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


LOGITS, IDS = torch.randn(4, 8), torch.tensor([1, 7, -100, 3])


@pytest.mark.usefixtures("alone")
class TestAlone:
    def test_options(self):
        """Those that do not change the values: dtype, flags, rows as indices."""
        expected = fused_logp(LOGITS, IDS, temperature=0.7, return_lse=True, row_indices=torch.tensor([3, 1]))
        result = vocab_parallel_logp(LOGITS, IDS, temperature=0.7, return_lse=True, row_indices=torch.tensor([1, 3]))
        assert result.entropy is None
        for name in ("logp", "row_max", "log_sum"):
            torch.testing.assert_close(getattr(result, name), getattr(expected, name))
        assert vocab_parallel_logp(LOGITS, IDS, out_dtype=torch.bfloat16).dtype == torch.bfloat16
        assert vocab_parallel_logp(LOGITS, IDS, return_entropy=True).row_max is None

    def test_twice_differentiated(self):
        logits = LOGITS.clone().requires_grad_()
        (grad,) = torch.autograd.grad(vocab_parallel_logp(logits, IDS).sum(), logits, create_graph=True)
        with pytest.raises(SecondDerivativeError):
            grad.sum().backward()

    def test_checkpointed(self):
        """Recomputed in the backward, with its collective, by every rank alike."""
        logits, apart = LOGITS.clone().requires_grad_(), LOGITS.clone().requires_grad_()
        checkpoint(vocab_parallel_logp, logits, IDS, use_reentrant=False).sum().backward()
        vocab_parallel_logp(apart, IDS).sum().backward()
        assert same_bits(logits.grad, apart.grad)

    @pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch.compile itself looks at it
    def test_in_a_compiled_function(self):
        """Kept out of the graph it works; in the graph it is an error that says so."""
        outside = torch.compiler.disable(vocab_parallel_logp)
        logits = LOGITS.clone().requires_grad_()
        compiled = torch.compile(lambda x: outside(x * 2, IDS) * 3, backend="eager")(logits)
        expected = vocab_parallel_logp(logits * 2, IDS) * 3
        assert same_bits(compiled, expected)
        assert same_bits(*(torch.autograd.grad(y.sum(), logits)[0] for y in (compiled, expected)))
        with pytest.raises(RuntimeError, match=r"expected a plain tensor outside torch\.compile"):
            torch.compile(vocab_parallel_logp, backend="eager", fullgraph=True)(logits, IDS)

    def test_overwritten_logits_used_again(self):
        logits = LOGITS.clone().requires_grad_()
        scaled = logits * 2.0
        squares = scaled.square()
        vocab_parallel_logp(scaled, IDS, inplace_backward=True).sum().backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            squares.sum().backward()

    @pytest.mark.parametrize(
        ("kwargs", "error", "message"),
        [
            ({"logits_shard": None}, ArgumentTypeError, r"logits_shard: expected a torch.Tensor, got NoneType"),
            ({"logits_shard": torch.tensor(1.0)}, ArgumentError, r"logits_shard: expected shape \[\.\.\., V_r\]"),
            ({"token_ids": IDS.float()}, ArgumentError, r"token_ids: expected dtype"),
            ({"vocab_start": 1, "vocab_size": 9}, ArgumentError, r"vocab_start: expected 0 on the group's first rank"),
            ({"vocab_start": 8}, ArgumentError, r"vocab_size: expected the whole vocabulary's size"),
            ({"vocab_start": "0"}, ArgumentTypeError, r"vocab_start: expected an int, got str"),
            ({"vocab_size": 8.0}, ArgumentTypeError, r"vocab_size: expected an int, got float"),
            ({"vocab_size": 9}, ArgumentError, r"vocab_start: expected this shard's first id"),
            ({"vocab_start": 0, "vocab_size": 9}, ArgumentError, r"columns to reach the vocabulary's end 9"),
            ({"out_dtype": torch.int64}, ArgumentError, r"out_dtype: expected a floating dtype"),
            ({"kernel": "fast"}, ArgumentError, r"kernel: expected one of"),
            ({"token_ids": IDS + 5, "on_invalid": "raise"}, InvalidTokenIdError, r"\[0, 8\) .* got 12 in row 1"),
            ({"logits_shard": LOGITS[:, :0], "token_ids": IDS}, ArgumentError, r"vocab_size: expected an int from 1"),
            (
                {"logits_shard": LOGITS.clone().requires_grad_(), "inplace_backward": True},
                ArgumentError,
                r"inplace_backward: expected logits that an operation computed",
            ),
        ],
    )
    def test_errors(self, kwargs, error, message):
        arguments = {"logits_shard": LOGITS, "token_ids": IDS, **kwargs}
        with pytest.raises(error, match=message):
            vocab_parallel_logp(**arguments)


def test_no_process_group():
    with pytest.raises(ArgumentError, match=r"group: expected an initialised process group, got none"):
        vocab_parallel_logp(LOGITS, IDS)


class TestComplete:
    """vocab_start and vocab_size of every rank, as far as a rank can judge them alone."""

    def test_shards_of_one_width(self):
        assert [complete(10, None, None, rank, 3) for rank in range(3)] == [(0, 30), (10, 30), (20, 30)]
        assert [complete(10, None, 28, rank, 3) for rank in range(3)] == [(0, 28), (10, 28), (20, 28)]
        assert complete(10, 20, None, 2, 3) == (20, 30)

    def test_the_last_ranks_may_be_all_padding(self):
        assert [complete(10, None, 15, rank, 3) for rank in range(3)] == [(0, 15), (10, 15), (20, 15)]

    def test_ragged(self):
        assert [complete(w, s, 27, r, 3) for r, (w, s) in enumerate([(10, 0), (0, 10), (20, 10)])] == [
            (0, 27),
            (10, 27),
            (10, 27),
        ]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((10, 5, None, 1, 3), r"vocab_size: expected the whole vocabulary's size, since rank 1's vocab_start 5"),
            ((10, None, 31, 1, 3), r"vocab_start: .* 3 shards of 10 columns do not hold 31 ids"),
            ((10, 20, 60, 0, 2), r"vocab_start: expected 0 on the group's first rank, got 20"),
            ((10, 0, 20, 1, 2), r"the last rank's columns to reach the vocabulary's end 20, got 0 with 10"),
        ],
    )
    def test_contradictions(self, arguments, message):
        with pytest.raises(ArgumentError, match=message):
            complete(*arguments)
