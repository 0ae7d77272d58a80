"""env.json: the machine, the versions and the command behind a result."""

from __future__ import annotations

import datetime
import platform
import re
import subprocess
import sys
from typing import Any

import torch

import fused_logp_hub
from benchmarks import loading
from fused_logp_hub import _manifest
from fused_logp_hub._errors import FusedLogpError

PEER_DISTRIBUTIONS = (
    "trl", "liger-kernel", "quack-kernels", "nvidia-cutlass-dsl", "flash-attn", "triton",
)  # fmt: skip


def describe(device: torch.device, options: list[str]) -> dict[str, Any]:
    """Everything one needs to repeat or to distrust the numbers."""
    found: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python benchmarks/run.py", *options]),
        "card": "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fused_logp_hub": fused_logp_hub.__version__,
        "kernels": _kernels(),
        "peers": {name: loading.version(name) for name in PEER_DISTRIBUTIONS},
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "card": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": cache_bytes(device),
            "cuda": torch.version.cuda,
            "driver": _query("driver_version"),
        }
    return found


def cache_bytes(device: torch.device) -> int:
    """Size of L2; a stand-in on the CPU."""
    if device.type != "cuda":
        return 1 << 10
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def slug(card: str) -> str:
    """A card's name as a folder's."""
    return re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")


def without_out(arguments: list[str]) -> list[str]:
    """The command line's options but for the folder that was written to."""
    kept, skip = [], False
    for argument in arguments:
        if not skip and not argument.startswith("--out"):
            kept.append(argument)
        skip = argument == "--out"
    return kept


def _kernels() -> dict[str, Any] | None:
    try:
        manifest = _manifest.shipped()
    except FusedLogpError:
        return None
    return {
        "package_version": manifest.package_version,
        "source_commit": manifest.source_commit,
        "dirty": manifest.dirty,
        "compiler": manifest.compiler,
    }


def _query(field: str) -> str | None:
    """One field of nvidia-smi; None where there is no such tool."""
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        print(f"nvidia-smi did not answer for {field}", file=sys.stderr)
        return None
    return done.stdout.splitlines()[0].strip()
