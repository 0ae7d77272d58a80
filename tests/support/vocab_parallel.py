"""What every rank of a group does in the tests of vocab_parallel_logp, and how its results are judged.

Each rank makes the same inputs from a seed, so the parent process can compare with the whole.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fused_logp_hub import fused_logp
from fused_logp_hub.distributed import vocab_parallel_logp
from support.cases import ALL, CASES, Case
from support.ranks import Collectives
from support.reference64 import assert_gradient, assert_values, backward64, forward64, same_bits
from support.shards import Cut, cut, joined

# On the CPU one dtype is enough: the shards' own test has all.
CASES_OF = {
    "cpu": [(case, dtype) for case in CASES if not case.large for dtype in case.dtypes[-1:]],
    "cuda": [(case, dtype) for case in CASES if not case.large for dtype in case.dtypes if dtype in ALL[::2]],
}


def upstream(ids: Tensor, leading: torch.Size) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    g = torch.randn(ids.shape, generator=generator)
    g.view(-1)[5::7] = 0
    return g.to(ids.device), torch.randn(leading, generator=generator).to(ids.device)


def call(shard: Cut, ids: Tensor, vocab_size: int, kwargs: dict[str, Any], **more: Any) -> dict[str, Tensor]:
    """Everything that a rank gets: results, its gradient of logp and of both, and the same once again."""
    g, h = upstream(ids, shard.logits.shape[:-1])
    options = {"vocab_start": shard.vocab_start, "vocab_size": vocab_size, **kwargs, **more}
    logits = shard.logits.detach().requires_grad_()
    result = vocab_parallel_logp(logits, ids, return_lse=True, return_entropy=True, **options)
    g, h = g.to(result.logp.dtype), h.to(result.logp.dtype)
    (grad,) = torch.autograd.grad(result.logp, logits, g, retain_graph=True)
    (both,) = torch.autograd.grad((result.logp, result.entropy), logits, (g, h))
    again = vocab_parallel_logp(logits, ids, **options)
    (grad_again,) = torch.autograd.grad(again, logits, g)
    with torch.no_grad():
        forward_only = vocab_parallel_logp(shard.logits, ids, **options)
    tensors = {"grad": grad, "both": both, "again": again, "grad_again": grad_again, "forward_only": forward_only}
    return {name: t.detach().cpu() for name, t in (result._asdict() | tensors).items()}


def of_case(case: Case, dtype: torch.dtype, rank: int, size: int, device: str) -> dict[str, Tensor]:
    logits, ids, kwargs = case.build(device, dtype)
    return call(cut(logits, size)[rank], ids, logits.shape[-1], kwargs)


def of_all_cases(rank: int, size: int, device: str) -> list[dict[str, Tensor]]:
    return [of_case(case, dtype, rank, size, device) for case, dtype in CASES_OF[torch.device(device).type]]


def judge(results: list[dict[str, Tensor]], case: Case, dtype: torch.dtype, device: str) -> None:
    """All ranks alike, bit for bit on repeat, and right: against float64, and against fused_logp to 1e-5."""
    first = results[0]
    for other in results[1:]:
        for name in ("logp", "entropy", "row_max", "log_sum"):
            assert same_bits(first[name], other[name]), f"{name}: other bits on another rank"
    for result in results:
        assert same_bits(result["again"], result["logp"])
        assert same_bits(result["forward_only"], result["logp"])
        assert same_bits(result["grad_again"], result["grad"])
    logits, ids, kwargs = (t.cpu() if isinstance(t, Tensor) else t for t in case.build(device, dtype))
    kwargs = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in kwargs.items()}
    expected = forward64(logits, ids, **kwargs)
    assert_values("logp", first["logp"], expected.logp, dtype)
    assert (first["logp"][expected.zero] == 0).all()
    for name in ("entropy", "row_max", "log_sum"):
        correct = getattr(expected, name)
        assert_values(name, first[name].where(~expected.broken, 0.0), correct.where(~expected.broken, 0.0), dtype)
        assert (first[name][expected.left_out] == 0).all()
    whole = fused_logp(logits, ids, **kwargs)
    torch.testing.assert_close(first["logp"], whole, atol=1e-5, rtol=1e-6, equal_nan=True)
    shards = cut(logits, len(results))
    g, h = (t.to(whole.dtype) for t in upstream(ids, logits.shape[:-1]))
    for name, grad_entropy in (("grad", None), ("both", h)):
        grads = joined([result[name] for result in results], shards)
        assert_gradient(grads, backward64(g, grad_entropy, logits, ids, **kwargs), dtype)


def counted(rank: int, size: int, device: str) -> dict[str, list[tuple[str, int]]]:
    """The collectives of forward and backward for 100 rows, by what was asked for."""
    rows = 100
    shard = torch.randn(rows, 40, device=device, dtype=torch.bfloat16).requires_grad_()
    ids = torch.randint(40 * size, (rows, 5), device=device, generator=torch.Generator(device).manual_seed(0))
    seen = {}
    for name, token_ids, entropy in (
        ("one id", ids[:, 0], False),
        ("entropy", ids[:, 0], True),
        ("five ids", ids, False),
        ("five ids, entropy", ids, True),
        ("no rows", ids[:0, 0], True),
    ):
        with Collectives() as collectives:
            logits = shard[: len(token_ids)]
            result = vocab_parallel_logp(logits, token_ids, return_lse=True, return_entropy=entropy, temperature=0.7)
            loss = result.logp.sum() + (result.entropy.sum() if entropy else 0.0)
            loss.backward()
        seen[name] = collectives.seen
    return seen


def placed_inputs(size: int) -> tuple[Tensor, Tensor]:
    logits = torch.randn(6, 10 * size, generator=torch.Generator().manual_seed(0))
    return logits, torch.tensor([0, 9, 10 * size - 4, 10 * size - 1, -100, 10])


def placed(rank: int, size: int, device: str) -> dict[str, Tensor]:
    """Without vocab_start: equal shards, the last one padded; a group of this rank alone; in place."""
    logits, ids = (t.to(device) for t in placed_inputs(size))
    part = logits[:, 10 * rank : 10 * rank + 10]
    alone = None
    for r in range(size):
        made = dist.new_group([r])
        alone = made if r == rank else alone
    overwritten = part.clone().requires_grad_()
    over = overwritten * 1.0
    vocab_parallel_logp(over, ids, vocab_size=10 * size - 2, inplace_backward=True).sum().backward()
    apart = part.clone().requires_grad_()
    vocab_parallel_logp(apart, ids, vocab_size=10 * size - 2).sum().backward()
    return {
        "equal": vocab_parallel_logp(part, ids).cpu(),
        "padded": vocab_parallel_logp(part, ids, vocab_size=10 * size - 2).cpu(),
        "alone": vocab_parallel_logp(logits, ids, group=alone).cpu(),
        "overwritten": overwritten.grad.cpu(),
        "overwritten memory": over.detach().cpu(),
        "apart": apart.grad.cpu(),
    }


def of_dtensors(rank: int, size: int, device: str) -> dict[str, Any]:
    """The usual layouts: the vocabulary over all ranks, evenly or not; over one mesh dimension of two."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    kind = torch.device(device).type
    torch.manual_seed(0)
    results: dict[str, Any] = {}
    for name, shape, placements, columns in (
        ("even", (size,), (Shard(-1),), 12),
        ("ragged", (size,), (Shard(1),), 13),
        ("fewer columns than ranks", (size,), (Shard(1),), size - 1),
        ("two mesh dimensions", (1, size), (Replicate(), Shard(1)), 13),
        ("rows over the ranks", (size, 1), (Shard(0), Shard(1)), 13),
    ):
        whole, token_ids = torch.randn(6, columns), torch.randint(columns, (6,))
        mesh = init_device_mesh(kind, shape)
        logits = distribute_tensor(whole.to(device), mesh, placements).requires_grad_()
        of_ids = [Replicate() if p in (Shard(1), Shard(-1)) else p for p in placements]
        ids = distribute_tensor(token_ids.to(device), mesh, of_ids)
        logp = vocab_parallel_logp(logits, ids)
        (grad,) = torch.autograd.grad(logp.sum(), logits)  # accumulated, some versions of PyTorch replicate it
        assert same_bits(vocab_parallel_logp(logits.detach(), ids.to_local()), logp), "plain ids beside a DTensor"
        padded = vocab_parallel_logp(logits.detach(), ids, vocab_size=columns - 1) if columns > 1 else logp
        assert isinstance(grad, DTensor)
        assert grad.to_local().shape == logits.to_local().shape, grad.placements
        results[name] = {
            "logits": whole, "ids": token_ids, "logp": logp.detach().cpu(), "padded": padded.detach().cpu(),
            "grad": grad.full_tensor().cpu(),
        }  # fmt: skip
    return results


def errors(rank: int, size: int, device: str) -> dict[str, str]:
    """Messages that every rank, but the first for the last, gets before any collective."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(torch.device(device).type, (size,))
    logits, ids = torch.randn(6, 12, device=device), torch.zeros(6, dtype=torch.int64, device=device)
    split = distribute_tensor(logits, mesh, [Shard(1)])
    others = dist.new_group([0])
    ragged = logits[:, : 5 + rank]
    uneven = DTensor.from_local(ragged, mesh, [Shard(1)], shape=(6, 20), stride=(20, 1), run_check=False)
    calls = {
        "replicated": (distribute_tensor(logits, mesh, [Replicate()]), ids, {}),
        "rows": (distribute_tensor(logits, mesh, [Shard(0)]), ids, {}),
        "group": (split, ids, {"group": dist.group.WORLD}),
        "in place": (split, ids, {"inplace_backward": True}),
        "vocab_size": (split, ids, {"vocab_size": 13}),
        "ids": (split, distribute_tensor(ids, mesh, [Shard(0)]), {}),
        "uneven": (uneven, ids, {}),
        "another's group": (logits, ids, {"group": others}),
    }
    return {name: message(*call) for name, call in calls.items()}


def message(logits: Tensor, ids: Tensor, kwargs: dict[str, Any]) -> str:
    try:
        vocab_parallel_logp(logits, ids, **kwargs)
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def everything(rank: int, size: int, device: str) -> dict[str, Any]:
    return {
        "cases": of_all_cases(rank, size, device),
        "counted": counted(rank, size, device),
        "placed": placed(rank, size, device),
        "dtensors": of_dtensors(rank, size, device),
        "errors": errors(rank, size, device),
    }


class LargeBatch:
    """One batch of a training step's size on each rank's GPU, whole and sharded."""

    def __init__(self, dtype: torch.dtype, temperature: float) -> None:
        self.dtype, self.temperature = dtype, temperature

    def __call__(self, rank: int, size: int, device: str) -> dict[str, Any]:
        rows, columns = 4096, 128256
        torch.manual_seed(0)  # the same numbers on every GPU
        logits = torch.empty(rows, columns, device=device, dtype=self.dtype).normal_(std=3).requires_grad_()
        ids = torch.randint(columns, (rows,), device=device)
        g, h = torch.randn(2, rows, device=device)
        options = {"temperature": self.temperature, "return_entropy": True}
        whole = fused_logp(logits, ids, **options)
        (grad,) = torch.autograd.grad((whole.logp, whole.entropy), logits, (g, h))
        width = columns // size
        mine = slice(rank * width, (rank + 1) * width)
        shard = logits.detach()[:, mine].clone().requires_grad_()
        result = vocab_parallel_logp(shard, ids, **options)
        (part,) = torch.autograd.grad((result.logp, result.entropy), shard, (g, h))
        again = vocab_parallel_logp(shard, ids, **options)
        (part_again,) = torch.autograd.grad((again.logp, again.entropy), shard, (g, h))
        difference = (part - grad[:, mine]).float()
        norms = torch.linalg.vector_norm(difference) / torch.linalg.vector_norm(grad.float())
        return {
            "logp": (result.logp - whole.logp).abs().max().item(),
            "entropy": (result.entropy - whole.entropy).abs().max().item(),
            "gradient": difference.abs().max().item(),
            "gradient, relative norm": norms.item(),
            "repeats": same_bits(result.logp, again.logp) and same_bits(part, part_again),
            "bits": result.logp.detach().cpu(),
        }


COUNTED = {
    "one id": [("_allgather_base_", 100 * 12)],
    "entropy": [("_allgather_base_", 100 * 16)],
    "five ids": [("_allgather_base_", 100 * 28)],
    "five ids, entropy": [("_allgather_base_", 100 * 32)],
    "no rows": [],
}
ERRORS = {
    "replicated": "logits_shard: expected a DTensor sharded on its last dimension over one dimension of its mesh",
    "rows": "logits_shard: expected a DTensor sharded on its last dimension",
    "group": "logits_shard: expected no group, vocab_start or inplace_backward beside a DTensor",
    "in place": "logits_shard: expected no group, vocab_start or inplace_backward beside a DTensor",
    "vocab_size": "vocab_size: expected at most the DTensor's 12 columns, got 13",
    "ids": "token_ids: expected a plain tensor or placements (Replicate(),) on the logits' mesh",
    "uneven": "logits_shard: expected ",
}


def judge_placed(results: list[dict[str, Tensor]]) -> None:
    size = len(results)
    logits, ids = placed_inputs(size)
    vocabulary = logits[:, :-2].clone().requires_grad_()
    padded = fused_logp(vocabulary, ids)  # the last id is no longer one
    padded.sum().backward()
    for result in results:
        torch.testing.assert_close(result["equal"], fused_logp(logits, ids), atol=1e-5, rtol=1e-6)
        torch.testing.assert_close(result["alone"], fused_logp(logits, ids), atol=1e-5, rtol=1e-6)
        torch.testing.assert_close(result["padded"], padded.detach(), atol=1e-5, rtol=1e-6)
        assert same_bits(result["overwritten"], result["apart"])
        assert same_bits(result["overwritten memory"], result["apart"])
    grad = torch.cat([result["apart"] for result in results], -1)
    torch.testing.assert_close(grad, torch.nn.functional.pad(vocabulary.grad, (0, 2)), atol=1e-6, rtol=1e-5)


def judge_dtensors(results: list[dict[str, Any]]) -> None:
    for name, first in results[0].items():
        logits = first["logits"].requires_grad_()
        logp = fused_logp(logits, first["ids"])
        logp.sum().backward()
        parts = [result[name] for result in results]
        if name == "rows over the ranks":
            joint, padded = (torch.cat([part[key] for part in parts]) for key in ("logp", "padded"))
        else:
            joint, padded = first["logp"], first["padded"]
            assert all(same_bits(part["logp"], joint) for part in parts), name
        torch.testing.assert_close(joint, logp.detach(), atol=1e-5, rtol=1e-6)
        if logits.shape[-1] > 1:
            fewer = fused_logp(logits.detach()[:, :-1], first["ids"])
            torch.testing.assert_close(padded, fewer, atol=1e-5, rtol=1e-6)
        torch.testing.assert_close(first["grad"], logits.grad, atol=1e-6, rtol=1e-5)
