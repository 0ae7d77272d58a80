"""Samples of GPU and wall time, taken in turns so that clock drift hits all candidates alike.

Every sample starts with a cold L2: a buffer larger than it is written, then another one read (so
that no lines wait to be written back on the sample's time). Calls rotate over the case's buffers,
one buffer a round, in another order each round: what ran before leaves its address translations
behind, or others', which moved a forward at 4096 x 128256 by a quarter (H200, 2026-11-30).

    events  two CUDA events around one plain call; the flush before it hides the call's launch
    graph   a CUDA graph of many calls over all buffers, replayed; launch gaps do not count
    calls   wall time of plain calls in a row, host included, a synchronisation at the end
    cpu-dry wall time on the CPU: exercises the code and measures nothing
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

Call = Callable[[int], object]
Samples = dict[str, list[float]]
T = TypeVar("T")

GRAPH_CALLS = 16  # calls in a graph, at least
WALL_CALLS = 10


def percentiles(samples: Sequence[float], at: Sequence[int] = (20, 50, 80)) -> list[float]:
    """Nearest-rank percentiles."""
    ordered = sorted(samples)
    return [ordered[max(0, math.ceil(p / 100 * len(ordered)) - 1)] for p in at]


class Flush:
    """Evicts L2: writes one buffer, then reads another, so that what it leaves is clean."""

    def __init__(self, device: torch.device, cache_bytes: int) -> None:
        size = max(256 << 20, 4 * cache_bytes) // 4
        self._written = torch.zeros(size, dtype=torch.int32, device=device)
        self._read = torch.zeros(size, dtype=torch.int32, device=device)
        self._sink = torch.zeros((), dtype=torch.int32, device=device)

    def __call__(self) -> None:
        self._written.zero_()
        torch.amax(self._read, dim=0, out=self._sink)


def sample_events(calls: Mapping[str, Call], buffers: int, flush: Flush, rounds: int) -> Samples:
    """Microseconds of single calls between two events."""
    pairs = {name: _event_pair() for name in calls}
    samples: Samples = {name: [] for name in calls}
    for turn in range(rounds):
        for name, call in _shuffled(calls, turn):
            start, stop = pairs[name]
            flush()
            start.record()
            call(turn % buffers)
            stop.record()
        torch.cuda.synchronize()
        for name, (start, stop) in pairs.items():
            samples[name].append(start.elapsed_time(stop) * 1e3)
    return samples


def capture(call: Call, buffers: int) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of whole passes over the buffers, and its number of calls.

    The call must have run for every buffer before, on the stream that is current here (not the
    default one): what it compiles, allocates or keeps is then in place.
    """
    indices = [i for _ in range(-(-GRAPH_CALLS // buffers)) for i in range(buffers)]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        for i in indices:
            call(i)
    finally:
        graph.capture_end()
    return graph, len(indices)


def sample_graphs(graphs: Mapping[str, tuple[torch.cuda.CUDAGraph, int]], flush: Flush, rounds: int) -> Samples:
    """Microseconds a call, mean over one replay each."""
    pairs = {name: _event_pair() for name in graphs}
    samples: Samples = {name: [] for name in graphs}
    for turn in range(rounds):
        for name, (graph, _) in _shuffled(graphs, turn):
            start, stop = pairs[name]
            flush()
            start.record()
            graph.replay()
            stop.record()
        torch.cuda.synchronize()
        for name, (start, stop) in pairs.items():
            samples[name].append(start.elapsed_time(stop) * 1e3 / graphs[name][1])
    return samples


def sample_wall(calls: Mapping[str, Call], buffers: int, rounds: int) -> Samples:
    """Microseconds a call of WALL_CALLS plain calls in a row."""
    samples: Samples = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for i in range(WALL_CALLS):
                call(i % buffers)
            torch.cuda.synchronize()
            samples[name].append((time.perf_counter() - start) * 1e6 / WALL_CALLS)
    return samples


def sample_cpu(calls: Mapping[str, Call], buffers: int, rounds: int) -> Samples:
    """Microseconds of single calls on the CPU."""
    samples: Samples = {name: [] for name in calls}
    for turn in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call(turn % buffers)
            samples[name].append((time.perf_counter() - start) * 1e6)
    return samples


def rounds_within(sample: Callable[[int], object], seconds: float, least: int = 15, most: int = 100) -> int:
    """How many rounds fit into that time, from the time of one."""
    sample(1)
    start = time.perf_counter()
    sample(1)
    return max(least, min(most, int(seconds / (time.perf_counter() - start))))


def peak_bytes(call: Call) -> int:
    """The most memory that one call holds beyond what was held before it, its result included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call(0)
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def _shuffled(calls: Mapping[str, T], turn: int) -> list[tuple[str, T]]:
    order = list(calls.items())
    random.Random(turn).shuffle(order)
    return order


def _event_pair() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
