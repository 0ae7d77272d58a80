"""Every kernel on small inputs of every kind, for compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python validation/sanitizer_cases.py

Without PyTorch's caching each tensor is an allocation of its own, so that memcheck sees one byte too far.
Results are compared with the reference as well: a checker that finds nothing in wrong code proves nothing.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import torch

import fused_logp_hub
from fused_logp_hub import NoMatchingKernelError, _launch, _manifest, _recall, fused_logp
from fused_logp_hub.distributed import shard_backward, shard_statistics

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Less than a vector; several tiles and segments, the last ragged.
SHAPES = ((5, 7), (3, 20011))
FEW_SHAPES = SHAPES[1:]
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-11}


def run(logits: torch.Tensor, ids: torch.Tensor, kernel: str, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    """logp and the gradient at the logits, on the CPU."""
    x = logits.detach().requires_grad_()
    result = fused_logp(x, ids, kernel=kernel, **{"return_entropy": True, "return_lse": True, **options})
    if isinstance(result, torch.Tensor):
        logp, total = result, result.sum()
    else:
        logp, total = result.logp, result.logp.sum() + result.entropy.sum()
    total.backward()
    return logp.detach().cpu(), x.grad.cpu()


def check(logits: torch.Tensor, ids: torch.Tensor, kernel: str, **options: object) -> bool:
    """Forward and backward by a kernel, against the reference on the CPU; False if it does not fit these logits."""
    try:
        logp, grad = run(logits, ids, kernel, **options)
    except NoMatchingKernelError:
        return False
    on_cpu = {name: v.cpu() if isinstance(v, torch.Tensor) else v for name, v in options.items()}
    expected, expected_grad = run(logits.cpu(), ids.cpu(), "reference", **on_cpu)
    torch.testing.assert_close(logp, expected, atol=1e-5, rtol=1e-6)
    bound = TOLERANCE[logits.dtype]
    torch.testing.assert_close(grad, expected_grad, atol=bound, rtol=bound)
    return True


def check_shard(logits: torch.Tensor, kernel: str, vocab_size: int) -> bool:
    """The same for a shard in the middle of a vocabulary, with ids before, in and behind it."""
    n, v = logits.shape
    ids = torch.randint(-5, v + 60, (n, 2), device="cuda")
    place = {"vocab_start": 30, "vocab_size": vocab_size}

    def run(x: torch.Tensor, ids: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        packed = shard_statistics(x, ids, kernel=name, **place)
        g = torch.ones(n, 2, device=x.device)
        grad = shard_backward(g, x, ids, packed[0], packed[1], kernel=name, **place)
        return packed.cpu(), grad.cpu()

    try:
        packed, grad = run(logits, ids, kernel)
    except NoMatchingKernelError:
        return False
    expected, expected_grad = run(logits.cpu(), ids.cpu(), "reference")
    torch.testing.assert_close(packed, expected, atol=1e-5, rtol=1e-6)
    bound = TOLERANCE[logits.dtype]
    torch.testing.assert_close(grad, expected_grad, atol=bound, rtol=bound)
    return True


@contextlib.contextmanager
def only(symbol: str) -> Iterator[None]:
    """As if the package had that forward alone, for rows of any number and size."""
    shipped = _manifest.shipped()
    others = tuple(k for k in shipped.kernels if k.op != "logp_forward")
    kernels = tuple(replace(k, meant_for=None) for k in shipped.kernels if k.symbol == symbol)
    reduced = replace(shipped, kernels=kernels + others)
    caches = patch.multiple(_launch, _plans={}, launches={}, _thresholds=reduced.thresholds)
    with patch.object(_manifest, "shipped", lambda: reduced), caches, patch.object(_recall, "passed", {}):
        yield


def check_rows(logits: torch.Tensor, kernel: str) -> int:
    """Calls of every kind on these logits; how many the kernel fitted."""
    n, v = logits.shape
    ids = torch.randint(v, (n,), device="cuda")
    runs = check(logits, ids, kernel)
    runs += check(logits, ids, kernel, return_entropy=False, return_lse=False)  # a usual call
    ids[0], ids[-1] = v, -(2**40)  # nothing may be read there
    runs += check(logits, ids, kernel, ignore_index=None)
    mask = torch.arange(n, device="cuda") % 2 == 0
    runs += check(logits, ids, kernel, row_mask=mask, temperature=0.7)
    several = torch.randint(v, (n, 3), device="cuda", dtype=torch.int32)
    runs += check(logits, several, kernel, row_indices=torch.tensor([0, n, 0, -5], device="cuda"))
    runs += check_shard(logits, kernel, 30 + v + 20)
    runs += check_shard(logits, kernel, 30 + max(v - 3, 1))  # the last columns are padding
    return runs


def main(dtypes: tuple[torch.dtype, ...], shapes: tuple[tuple[int, int], ...]) -> None:
    torch.manual_seed(0)
    runs = 0
    forwards = [k for k in _manifest.shipped().kernels if k.op == "logp_forward"]
    for kernel in (k for k in forwards if getattr(torch, k.dtype) in dtypes):
        dtype = getattr(torch, kernel.dtype)
        for n, v in shapes:
            # Rows on 16-byte boundaries, and back to back.
            for columns in (v + -v % 8, v):
                logits = torch.randn(n, columns, device="cuda").to(dtype)[:, :v]
                with only(kernel.symbol):
                    runs += check_rows(logits, kernel.name)
    for dtype in dtypes:
        for v in (1027, 1032):  # more rows than the eager backward takes
            runs += check_rows(torch.randn(70, v, device="cuda").to(dtype), "online")
        # In place, and sliced to a ragged end.
        logits = torch.randn(4, 6, 1032, device="cuda").to(dtype)[:, :-1, :1031]
        ids = torch.randint(1031, (4, 5), device="cuda")
        runs += check(logits, ids, "auto")
        r = fused_logp(logits, ids, return_lse=True)
        grad = torch.ones_like(r.logp)
        expected = fused_logp_hub.fused_logp_backward(grad, logits, ids, r.row_max, r.log_sum)
        fused_logp_hub.fused_logp_backward_out(grad, logits, ids, r.row_max, r.log_sum, grad_logits=logits)
        assert torch.equal(logits, expected)
        runs += 1
    # several rows for each persistent block, of which an H200 runs 792 at once; more than the 32 it looks ahead
    many = torch.randn(30000, 264, device="cuda")
    runs += check(many, torch.randint(264, (30000,), device="cuda"), "tma")
    torch.cuda.synchronize()
    print(f"{runs} forward and backward runs agree with the reference")


if __name__ == "__main__":
    if "--few" in sys.argv:  # for the tools that slow everything down
        main(DTYPES[:1], FEW_SHAPES)
    else:
        main(DTYPES, SHAPES)
