"""The first call in a fresh process where PyTorch has initialised CUDA: how long a user waits.

    python benchmarks/first_call.py ours      prints one line of JSON

Import and first call are timed apart. JIT caches on disk are empty: they point to a new folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROVIDERS = ("eager", "ours", "trl-triton", "liger", "flash-attn", "quack", "torch.compile")
ROWS, VOCAB = 1024, 32000
TIMEOUT = 90
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "QUACK_CACHE_DIR", "CUTE_DSL_CACHE_DIR")


def measure(provider: str) -> dict[str, object]:
    """Runs this file in a new process; a row of first_call.csv."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {name: f"{folder}/{name.lower()}" for name in CACHES}
        row: dict[str, object] = {
            "provider": provider, "shape": f"{ROWS}x{VOCAB}-bf16",
            "import_ms": None, "first_ms": None, "second_ms": None, "status": "ok",
        }  # fmt: skip
        try:
            done = subprocess.run(
                [sys.executable, __file__, provider],
                capture_output=True, text=True, timeout=TIMEOUT, env=environment, check=True,
            )  # fmt: skip
            return row | json.loads(done.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired:
            return row | {"status": f"failed: more than {TIMEOUT} s"}
        except subprocess.CalledProcessError as error:
            lines = error.stderr.strip().splitlines() or ["no message"]
            return row | {"status": f"failed: {lines[-1][:160]}"}


def _run(provider_name: str) -> dict[str, object]:
    import torch

    device = torch.device("cuda")
    logits = torch.randn(ROWS + 1, VOCAB, device=device, dtype=torch.bfloat16)[:-1]
    ids = torch.randint(VOCAB, (ROWS,), device=device)
    torch.log_softmax(logits.float(), -1).gather(-1, ids[:, None])  # PyTorch's own start-up
    torch.cuda.synchronize()

    if provider_name == "ours":
        start = time.perf_counter()
        from fused_logp_hub import fused_logp

        imported = time.perf_counter()

        def call() -> object:
            return fused_logp(logits, ids)
    else:
        from benchmarks import providers

        (provider,) = providers.select([provider_name])
        case = _case(logits, ids)
        start = time.perf_counter()
        forward = provider.prepare(case).forward  # imports the peer
        imported = time.perf_counter()

        def call() -> object:
            return forward(0)

    times = []
    for _ in range(2):
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return {
        "import_ms": (imported - start) * 1e3,
        "first_ms": times[0],
        "second_ms": times[1],
    }


def _case(logits, ids):
    """What a provider needs of a Case, over these logits."""
    from types import SimpleNamespace

    from benchmarks.shapes import Shape

    return SimpleNamespace(
        shape=Shape(ROWS, VOCAB), logits=[logits], token_ids=ids, labels=ids, row_mask=None,
        grad_logp=ids.float(), bases=[logits._base.unsqueeze(0)],
    )  # fmt: skip


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    import benchmarks  # noqa: F401  from here, whatever else has that name

    sys.path.append(sys.path.pop(0))  # an installed fused_logp_hub before the checkout's
    print(json.dumps(_run(sys.argv[1])))
