"""Peak memory of forward and backward at 8192 x 151936 bfloat16, with and without inplace_backward.

    python validation/peak_memory.py

The peak is what the step allocates beyond its logits. Exit code 1 unless it falls by one tensor of their size.
"""

from __future__ import annotations

import sys

import torch

from fused_logp_hub import fused_logp

ROWS, VOCAB_SIZE = 8192, 151936
SLACK = 2 << 20  # PyTorch's allocator may hand out 1 MiB more than a large tensor needs, for each


def peak(in_place: bool) -> int:
    """Bytes beyond the logits at the highest point of a forward and a backward, which frees what it need not keep."""
    leaf = torch.zeros((), device="cuda", dtype=torch.bfloat16, requires_grad=True)
    logits = torch.empty(ROWS, VOCAB_SIZE, device="cuda", dtype=torch.bfloat16).normal_().add_(leaf)
    ids = torch.randint(VOCAB_SIZE, (ROWS,), device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = fused_logp(logits, ids, inplace_backward=in_place).mean()
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.cuda.synchronize()
    assert (gradient.data_ptr() == logits.data_ptr()) == in_place
    return torch.cuda.max_memory_allocated() - before


def main() -> int:
    size = ROWS * VOCAB_SIZE * torch.bfloat16.itemsize
    new, in_place = peak(False), peak(True)
    for name, extra in (("new gradient", new), ("inplace_backward", in_place)):
        print(f"{name:16}  logits {size / 2**20:8.1f} MiB, beyond them {extra / 2**20:8.1f} MiB")
    saved = (new - in_place) / size
    print(f"saved {saved:.4f} tensors of the logits' size")
    return 0 if abs(new - in_place - size) <= SLACK else 1


if __name__ == "__main__":
    sys.exit(main())
