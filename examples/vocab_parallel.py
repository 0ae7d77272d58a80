"""A vocabulary over several ranks, as tensor parallelism leaves it: each holds some columns of the logits.

Run it as it is: it starts two processes, on two GPUs if there are two, else on the CPU. In a trainer the
processes and their group are there already, and `vocab_parallel_step` is all there is to it.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fused_logp_hub import fused_logp
from fused_logp_hub.distributed import vocab_parallel_logp

RANKS, TOKENS, VOCAB_SIZE = 2, 64, 50257
WIDTH = -(-VOCAB_SIZE // RANKS)  # the last rank's columns are padded to the others' width


def vocab_parallel_step(logits_shard, labels, advantages):
    """A policy-gradient loss with an entropy bonus; every rank gets the same loss and its own gradient."""
    result = vocab_parallel_logp(logits_shard, labels, vocab_size=VOCAB_SIZE, temperature=0.7, return_entropy=True)
    loss = -(result.logp * advantages).mean() - 0.01 * result.entropy.mean()
    loss.backward()
    return loss.detach()


def whole_step(logits, labels, advantages):
    """The same on one rank that has all columns."""
    result = fused_logp(logits, labels, temperature=0.7, return_entropy=True)
    loss = -(result.logp * advantages).mean() - 0.01 * result.entropy.mean()
    loss.backward()
    return loss.detach()


def run_rank(rank, folder):
    on_gpus = torch.cuda.device_count() >= RANKS
    device = f"cuda:{rank}" if on_gpus else "cpu"
    if on_gpus:
        torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("nccl" if on_gpus else "gloo", store=store, rank=rank, world_size=RANKS)

    torch.manual_seed(0)  # the same numbers on every rank
    logits = torch.randn(TOKENS, VOCAB_SIZE).to(device).requires_grad_()
    labels = torch.randint(VOCAB_SIZE, (TOKENS,)).to(device)
    labels[-1] = -100  # no target there
    advantages = torch.randn(TOKENS).to(device)

    mine = logits.detach()[:, rank * WIDTH : (rank + 1) * WIDTH]
    shard = torch.nn.functional.pad(mine, (0, WIDTH - mine.shape[-1])).requires_grad_()
    loss = vocab_parallel_step(shard, labels, advantages)

    expected = whole_step(logits, labels, advantages)
    columns = logits.grad[:, rank * WIDTH : (rank + 1) * WIDTH]
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(shard.grad[:, : columns.shape[-1]], columns, atol=1e-5, rtol=1e-5)
    assert not shard.grad[:, columns.shape[-1] :].any()
    print(f"rank {rank} on {device}: {mine.shape[-1]} columns, loss {loss:+.6f}, on one rank {expected:+.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (folder,), nprocs=RANKS)
