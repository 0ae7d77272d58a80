"""vocab_parallel_logp over NCCL: the same as over gloo, with a GPU for each rank, and one large batch.

These need two GPUs of one host and skip on fewer: pytest --require-gpu tests/test_distributed_nccl.py
"""

from __future__ import annotations

import pytest
import torch
from support import vocab_parallel
from support.cases import SUFFIX
from support.ranks import run_ranks
from support.reference64 import GRAD_TOLERANCE, same_bits

RANKS = 2
CASES = vocab_parallel.CASES_OF["cuda"]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} CUDA devices"),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(vocab_parallel.everything, RANKS, "nccl", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("index", range(len(CASES)), ids=[f"{case.name}-{SUFFIX[dtype]}" for case, dtype in CASES])
def test_the_contract_holds(ranks, index):
    case, dtype = CASES[index]
    vocab_parallel.judge([rank["cases"][index] for rank in ranks], case, dtype, "cuda:0")


def test_one_small_collective(ranks):
    assert [rank["counted"] for rank in ranks] == [vocab_parallel.COUNTED] * RANKS


def test_placement_and_memory(ranks):
    vocab_parallel.judge_placed([rank["placed"] for rank in ranks])


def test_dtensors(ranks):
    vocab_parallel.judge_dtensors([rank["dtensors"] for rank in ranks])


@pytest.mark.parametrize(("dtype", "temperature"), [(torch.float32, 0.7), (torch.bfloat16, 1.0)])
def test_a_large_batch(dtype, temperature, tmp_path):
    """4096 rows of 128256 columns: within 1e-5 of the unsharded call on one GPU, and the same bits twice."""
    results = run_ranks(vocab_parallel.LargeBatch(dtype, temperature), RANKS, "nccl", tmp_path)
    for result in results:
        assert result["repeats"], "other bits the second time"
        assert result["logp"] <= 1e-5
        assert result["entropy"] <= 1e-5
        assert result["gradient, relative norm"] <= GRAD_TOLERANCE[dtype]
        if dtype == torch.float32:  # bfloat16 rounds some of the elements to the other side
            assert result["gradient"] <= 1e-5
    assert same_bits(results[0]["bits"], results[1]["bits"])
