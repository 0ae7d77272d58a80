"""How long calls take, with a cold cache on a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

Call = Callable[[int], object]
"""Takes 0 and 1 in turns: which of two buffers to use."""

_FLUSH_BYTES = 256 << 20
_WARM_UP = 3


def median_times(calls: Mapping[str, Call], count: int, device: torch.device) -> dict[str, float]:
    """Median microseconds of each call, taken in turns; on a GPU, the current one, with L2 flushed before each."""
    sample = _sample_gpu(calls, device) if device.type == "cuda" else _sample_cpu(calls)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(_WARM_UP + count):
        for name, microseconds in sample(turn % 2).items():
            if turn >= _WARM_UP:
                samples[name].append(microseconds)
    return {name: statistics.median(times) for name, times in samples.items()}


def _sample_gpu(calls: Mapping[str, Call], device: torch.device) -> Callable[[int], dict[str, float]]:
    written = torch.zeros(_FLUSH_BYTES // 4, dtype=torch.int32, device=device)
    read = torch.zeros_like(written)
    events = {n: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for n in calls}

    def sample(buffer: int) -> dict[str, float]:
        for name, call in calls.items():
            written.zero_()
            read.amax()  # leaves lines that need not be written back on the next call's time
            start, stop = events[name]
            start.record()
            call(buffer)
            stop.record()
        torch.cuda.synchronize(device)
        return {name: start.elapsed_time(stop) * 1e3 for name, (start, stop) in events.items()}

    return sample


def _sample_cpu(calls: Mapping[str, Call]) -> Callable[[int], dict[str, float]]:
    def sample(buffer: int) -> dict[str, float]:
        times = {}
        for name, call in calls.items():
            start = time.perf_counter()
            call(buffer)
            times[name] = (time.perf_counter() - start) * 1e6
        return times

    return sample
