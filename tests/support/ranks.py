"""Processes of one group, each of which runs the same function and leaves what it returns in a file."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode

LIMIT = 180
"""Seconds after which a hung group is ended and the test fails."""


def run_ranks(function: Callable[[int, int, str], Any], size: int, backend: str, folder: Path) -> list[Any]:
    """function(rank, size, device) of every rank, in order; an exception of one is raised here."""
    # New processes, free of what this one did to CUDA or autograd, yet PyTorch is imported once for all of them.
    multiprocessing.set_forkserver_preload(["torch.distributed.tensor"])
    arguments = (function, size, backend, str(folder))
    context = mp.start_processes(_process, arguments, nprocs=size, join=False, start_method="forkserver")
    deadline = time.monotonic() + LIMIT
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < deadline, f"{size} processes did not end within {LIMIT} s"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _process(rank: int, function: Callable[[int, int, str], Any], size: int, backend: str, folder: str) -> None:
    torch.set_num_threads(1)
    device = "cpu"
    if backend == "nccl":
        torch.cuda.set_device(rank)
        device = f"cuda:{rank}"
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT))
    try:
        torch.save(function(rank, size, device), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


class Collectives(TorchDispatchMode):
    """The collectives that this process starts, as (name, bytes it sends)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            sent = args[1] if func.__name__.startswith("_allgather_base_") else args[0]
            self.seen.append((func.__name__.split(".")[0], sent.numel() * sent.element_size()))
        return func(*args, **(kwargs or {}))
