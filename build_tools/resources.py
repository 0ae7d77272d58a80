"""Reads what each kernel uses from ptxas' -v report, which nvcc and NVRTC word alike."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_CUMULATIVE_STACK = re.compile(r"(\d+) bytes cumulative stack size")
_WARNING = re.compile(r"\bwarning\b", re.IGNORECASE)


@dataclass
class Resources:
    """What one kernel uses: registers a thread, the rest in bytes. Fields as in the manifest."""

    registers: int = 0
    static_shared_memory: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0


def parse_report(log: str) -> dict[str, Resources]:
    """Returns the resources of each kernel in `log`, a function it calls counted as its own."""
    report: dict[str, Resources] = {}
    kernel: Resources | None = None
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            kernel = report[entry[1]] = Resources()
        if kernel is None:
            continue
        if frame := _FRAME.search(line):
            stack, stores, loads = (int(group) for group in frame.groups())
            kernel.stack = max(kernel.stack, stack)
            kernel.spill_stores += stores
            kernel.spill_loads += loads
        if used := _USED.search(line):
            kernel.registers = max(kernel.registers, int(used[1]))
        if shared := _SHARED.search(line):
            kernel.static_shared_memory = int(shared[1])
        if cumulative := _CUMULATIVE_STACK.search(line):
            kernel.stack = max(kernel.stack, int(cumulative[1]))
    return report


def find_warnings(log: str) -> tuple[str, ...]:
    """Returns the lines of `log` that warn."""
    return tuple(line.strip() for line in log.splitlines() if _WARNING.search(line))
