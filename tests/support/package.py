"""A package as the build writes it, with bytes in place of machine code: for what reads it."""

from __future__ import annotations

import hashlib
import json

from fused_logp_hub import __version__, _manifest

# op, kernel, module, alignment, grid; in order of priority
KERNELS = [
    ("logp_forward", "online", "cluster", 1, {"meant_for": [{"max_rows": 128}], "blocks_per_row": 8}),
    ("logp_forward", "tma", "sm90_tma", 16, {"blocks_per_multiprocessor": 2}),
    ("logp_forward", "online", "generic", 1, {"blocks_per_row": 1}),
    ("logp_backward", "backward", "generic", 1, {"tile_bytes": 8192}),
]
# file, architecture, rule, capability, smallest CUDA and driver that load it
CUBINS = [
    ("generic.sm_80", "sm_80", "minor", [8, 0], 12000, "525"),
    ("generic.sm_90", "sm_90", "minor", [9, 0], 12000, "525"),
    ("generic.sm_120", "sm_120", "minor", [12, 0], 12090, "575"),
    ("cluster.sm_90", "sm_90", "minor", [9, 0], 12000, "525"),
    ("sm90_tma.sm_90a", "sm_90a", "exact", [9, 0], 12000, "525"),
]

DTYPES = ("bfloat16", "float16", "float32", "float64")


def write_package(folder):
    """Cubins and manifest, checksums right, into a new folder."""
    folder.mkdir(parents=True)
    rows = []
    for name, arch, match, capability, min_cuda, min_driver in CUBINS:
        data = name.encode() * 100
        (folder / f"{name}.cubin").write_bytes(data)
        rows.append(
            {
                "file": f"{name}.cubin", "module": name.split(".")[0], "arch": arch, "match": match,
                "capability": capability, "family": [], "sha256": hashlib.sha256(data).hexdigest(),
                "size": len(data), "min_cuda": min_cuda, "min_driver": min_driver, "symbols": {},
            }
        )  # fmt: skip
    kernels = [
        {
            "op": op, "name": name, "module": module, "alignment": alignment, "dtype": dtype,
            "symbol": f"{op}_{module}_{dtype}", "threads": 512, "shared_memory": 0,
            "priority": priority, **grid,
        }
        for priority, (op, name, module, alignment, grid) in enumerate(KERNELS)
        for dtype in DTYPES
    ]  # fmt: skip
    manifest = {
        "format": _manifest.FORMAT, "package_version": __version__, "source_commit": "c0ffee",
        "dirty": False, "compiler": {"name": "nvrtc", "version": "12.9.86"}, "cubins": rows,
        "kernels": kernels,
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))
