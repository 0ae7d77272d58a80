"""The two limits: reading the logits once (forward), copying them once (backward).

Read: one Triton program a block of int32, 16-byte loads, the xor of all of them written out so that
no load can be left out. Bytes read N * V * itemsize, written 4 a block. Block and warps are chosen
among a few by timing, per shape.
Copy: Tensor.copy_ between two contiguous buffers.
Both move exactly the bytes that the shape's rows hold, from consecutive memory.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.case import Case
from benchmarks.providers import Calls
from benchmarks.timing import Flush, sample_events

# int32 a program, warps: 1 to 4 loads of 16 bytes a thread
READ_TILES = ((1024, 4), (1024, 8), (2048, 8), (4096, 8), (4096, 16), (8192, 16))
TUNING_ROUNDS = 7


@triton.jit
def xor_blocks(data, out, count, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(data + at, mask=at < count, other=0)
    tl.store(out + block, tl.xor_sum(value, axis=0))


def words(base: Tensor, byte_count: int) -> Tensor:
    """The first bytes of a contiguous tensor as int32; whole 64 bytes, so that loads stay wide."""
    size = base.element_size()
    return base.view(-1)[: byte_count // 64 * 64 // size].view(torch.int32)


def _read(data: list[Tensor], block: int, warps: int) -> Callable[[int], Tensor]:
    count = data[0].numel()
    grid = (triton.cdiv(count, block),)
    out = torch.empty(grid, dtype=torch.int32, device=data[0].device)

    def read(i: int) -> Tensor:
        xor_blocks[grid](data[i], out, count, BLOCK=block, num_warps=warps)
        return out

    return read


def read_limit(case: Case, flush: Flush) -> Calls:
    """forward(i) reads as many bytes of buffer i as the forward must."""
    byte_count = case.shape.bytes_moved("forward")
    data = [words(base, byte_count) for base in case.bases]
    candidates = {str(tile): _read(data, *tile) for tile in READ_TILES}
    for call in candidates.values():
        call(0)
    samples = sample_events(candidates, case.count, flush, TUNING_ROUNDS)
    best = min(samples, key=lambda name: statistics.median(samples[name]))
    return Calls(candidates[best])


def copy_limit(case: Case) -> Calls:
    """backward(i) copies as many bytes of buffer i as the logits have."""
    byte_count = case.shape.rows * case.shape.row_bytes
    data = [words(base, byte_count) for base in case.bases]
    out = torch.empty_like(data[0])
    return Calls(backward=lambda i: out.copy_(data[i]))


def reads_everything(case: Case, read: Calls) -> bool:
    """Whether the read kernel's xor is that of the data, folded by PyTorch."""
    assert read.forward is not None
    data = words(case.bases[0], case.shape.bytes_moved("forward"))
    return int(fold(read.forward(0))) == int(fold(data))


def fold(values: Tensor) -> Tensor:
    """The xor of all int32 values."""
    while values.numel() > 1:
        half = values.numel() // 2
        folded = values[:half] ^ values[half : 2 * half]
        if values.numel() % 2:
            folded[0] ^= values[-1]
        values = folded
    return values.reshape(())
