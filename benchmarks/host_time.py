"""Host time of a call: 8 x 1024 bfloat16, where the GPU has next to nothing to do.

A sample is the wall time of a few calls issued in a row, after two that bring caller and data into the CPU's caches
and without the synchronisation that follows: the queue stays short, so that a call never waits for room in it.
Callers take turns. Beside them stands the least that a call from Python costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import fused_logp_hub
from benchmarks import names, providers, timing
from benchmarks.case import Case
from benchmarks.loading import Unavailable
from benchmarks.shapes import Shape
from fused_logp_hub import _driver

SHAPE = Shape(8, 1024, asserts="")
CALLS, SAMPLES, WARM_UP = 8, 200, 20
FIRST_CALLS = 2
OTHERS = ("trl-triton", "liger", "flash-attn", "quack", "torch.compile")


@dataclass(frozen=True)
class Timed:
    """One row of host.csv to be."""

    call: str
    provider: str
    run: Callable[[], object]


def rows(device: torch.device, with_peers: list[str]) -> list[dict[str, object]]:
    """p20, p50, p80 of every caller, eager PyTorch among them."""
    case = Case(SHAPE, device, cache_bytes=1)
    timed = _ours(case) + _eager(case)
    if device.type == "cuda":
        timed += _least(case)
    for provider in providers.PROVIDERS:
        if provider.name in OTHERS and provider.name in with_peers:
            timed += _peer(case, provider)
    samples = _sample(timed, SAMPLES if device.type == "cuda" else 3)
    found = []
    for t, times in zip(timed, samples, strict=True):
        p20, p50, p80 = timing.percentiles(times)
        found.append({"call": t.call, "provider": t.provider, "p20": p20, "p50": p50, "p80": p80})
    return found


def _ours(case: Case) -> list[Timed]:
    logits, ids, leaf = case.logits[0], case.token_ids, case.leaf(0)
    out = torch.empty(ids.shape, device=case.device)
    statistics = [torch.empty_like(out) for _ in range(2)]
    grad = torch.empty_like(logits)

    def forward_out() -> Tensor:
        return fused_logp_hub.fused_logp_out(logits, ids, out=out, row_max=statistics[0], log_sum=statistics[1])

    def backward_out() -> Tensor:
        return fused_logp_hub.fused_logp_backward_out(case.grad_logp, logits, ids, *statistics, grad_logits=grad)

    def forward(x: Tensor) -> Tensor:
        return fused_logp_hub.fused_logp(x, ids)

    return [
        Timed("forward, no gradient", "ours", lambda: forward(logits)),
        Timed("forward, *_out with statistics", "ours", forward_out),
        Timed("backward, *_out", "ours", backward_out),
        Timed("forward, differentiable", "ours", lambda: forward(leaf)),
        Timed(
            "forward and backward", "ours",
            lambda: torch.autograd.grad(forward(leaf), leaf, case.grad_logp),
        ),
    ]  # fmt: skip


def _eager(case: Case) -> list[Timed]:
    logits, ids, leaf = case.logits[0], case.token_ids.unsqueeze(-1), case.leaf(0)

    def forward(x: Tensor) -> Tensor:
        return torch.log_softmax(x.float(), -1).gather(-1, ids).squeeze(-1)

    return [
        Timed("forward, no gradient", "eager", lambda: forward(logits)),
        Timed("forward, differentiable", "eager", lambda: forward(leaf)),
        Timed(
            "forward and backward", "eager",
            lambda: torch.autograd.grad(forward(leaf), leaf, case.grad_logp),
        ),
    ]  # fmt: skip


def _least(case: Case) -> list[Timed]:
    """What is left without checks, look-ups and addresses: allocations, launches, and PyTorch's part of any node."""
    ids, leaf = case.token_ids, case.leaf(0)
    launches: list[tuple[Any, ...]] = []
    launch = _driver.Function.launch

    def record(*arguments: Any) -> None:
        launches.append(arguments)
        launch(*arguments)

    with patch.object(_driver.Function, "launch", record):
        logp = fused_logp_hub.fused_logp(leaf, ids)
        # what the launches write is to stay allocated
        kept = logp, torch.autograd.grad(logp, leaf, case.grad_logp, retain_graph=True)
    (function, *arguments), (backward_function, *backward_arguments) = launches

    class Node(torch.autograd.Function):
        """It allocates, saves and launches what ours does."""

        @staticmethod
        def forward(ctx: Any, leaf: Tensor) -> Tensor:
            ctx.save_for_backward(leaf, ids, torch.empty(2, len(ids), device=case.device))
            return allocate_and_launch()

        @staticmethod
        def backward(ctx: Any, grad_logp: Tensor) -> Tensor:
            fresh = torch.empty_like(ctx.saved_tensors[0])
            backward_function.launch(*backward_arguments)
            return fresh

    def allocate_and_launch(_: object = kept) -> Tensor:
        fresh = torch.empty(ids.shape, device=case.device)
        function.launch(*arguments)
        return fresh

    return [
        Timed("forward, no gradient", names.HOST_LIMIT, allocate_and_launch),
        Timed("forward, *_out with statistics", names.HOST_LIMIT, lambda: function.launch(*arguments)),
        Timed("backward, *_out", names.HOST_LIMIT, lambda: backward_function.launch(*backward_arguments)),
        Timed("forward, differentiable", names.HOST_LIMIT, lambda: Node.apply(leaf)),
        Timed(
            "forward and backward", names.HOST_LIMIT,
            lambda: torch.autograd.grad(Node.apply(leaf), leaf, case.grad_logp),
        ),
    ]  # fmt: skip


def _peer(case: Case, provider: providers.Provider) -> list[Timed]:
    try:
        calls = provider.prepare(case)
        found = []
        if calls.forward is not None:
            calls.forward(0)
            found.append(Timed("forward, no gradient", provider.name, lambda: calls.forward(0)))
        if calls.step is not None:
            calls.step(0)
            found.append(Timed("forward and backward", provider.name, lambda: calls.step(0)))
    except Unavailable:
        return []
    except Exception as error:
        print(f"host time: {provider.name}: {type(error).__name__}: {error}")
        return []
    return found


def _sample(timed: list[Timed], count: int) -> list[list[float]]:
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    samples: list[list[float]] = [[] for _ in timed]
    for turn in range(WARM_UP + count):
        for t, times in zip(timed, samples, strict=True):
            for _ in range(FIRST_CALLS):
                t.run()
            synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                t.run()
            elapsed = time.perf_counter() - start
            if turn >= WARM_UP:
                times.append(elapsed * 1e6 / CALLS)
    synchronize()
    return samples
