"""The kernels whose distance from the limit docs/performance.md explains, each once, for a profiler.

ncu --clock-control none --kernel-name regex:logp_ python validation/profile.py
"""

from __future__ import annotations

import torch

from fused_logp_hub import fused_logp, fused_logp_backward

SHAPES = ((4096, 128256), (1024, 128256), (4096, 50257), (16384, 8192), (32, 128256))


def main() -> None:
    for rows, vocab_size in SHAPES:
        logits = torch.empty(rows, vocab_size, device="cuda", dtype=torch.bfloat16).normal_()
        ids = torch.randint(vocab_size, (rows,), device="cuda")
        result = fused_logp(logits, ids, return_lse=True)
        fused_logp_backward(torch.ones_like(result.logp), logits, ids, result.row_max, result.log_sum)
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
