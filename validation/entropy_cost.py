"""What entropy and statistics cost beside logp alone: 4096 x 128256 bfloat16, GPU time of one call, L2 cold.

    python validation/entropy_cost.py

Exit code 1 if the forward with everything, or the backward with both gradients, takes more than 1.05 of logp's alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for benchmarks; an installed fused_logp_hub comes first

import torch

from benchmarks.timing import Flush, sample_events
from fused_logp_hub import fused_logp, fused_logp_backward

ROUNDS = 100
LIMIT = 1.05


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--temperature", type=float, default=1.0)
    temperature = parser.parse_args().temperature
    torch.manual_seed(0)
    logits = torch.empty(4096, 128256, device="cuda", dtype=torch.bfloat16).normal_(0, 2)
    ids = torch.randint(128256, (4096,), device="cuda")
    g, h = torch.randn(2, 4096, device="cuda").unbind(0)
    saved = fused_logp(logits, ids, temperature=temperature, return_lse=True, return_entropy=True)
    lse = saved.row_max, saved.log_sum
    both = {"entropy": saved.entropy, "grad_entropy": h, "temperature": temperature}
    calls = {
        "forward, logp": lambda _: fused_logp(logits, ids, temperature=temperature),
        "forward, all": lambda _: fused_logp(
            logits, ids, temperature=temperature, return_lse=True, return_entropy=True
        ),
        "backward, logp": lambda _: fused_logp_backward(g, logits, ids, *lse, temperature=temperature),
        "backward, both": lambda _: fused_logp_backward(g, logits, ids, *lse, **both),
    }
    flush = Flush(logits.device, torch.cuda.get_device_properties(0).L2_cache_size)
    sample_events(calls, 1, flush, 10)  # warm up
    samples = sample_events(calls, 1, flush, ROUNDS)
    median = {name: statistics.median(s) for name, s in samples.items()}
    print(f"{torch.cuda.get_device_name()}, temperature {temperature}, medians of {ROUNDS} calls")
    for name, us in median.items():
        print(f"{name:16} {us:8.1f} us")
    ratios = {
        "forward": median["forward, all"] / median["forward, logp"],
        "backward": median["backward, both"] / median["backward, logp"],
    }
    for name, ratio in ratios.items():
        print(f"{name} ratio {ratio:.4f} (at most {LIMIT})")
    return 0 if max(ratios.values()) <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
