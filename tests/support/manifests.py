"""A manifest with the shape of the real one: what is shipped, by architecture, and in which order it is tried."""

from __future__ import annotations

from pathlib import Path

from fused_logp_hub._manifest import Cubin, KernelRow, Manifest, Range

DTYPES = ["bfloat16", "float16", "float32", "float64"]


def cubin(module: str, arch: str, match: str, capability: tuple[int, int], min_cuda: int, min_driver: str) -> Cubin:
    file = f"{module}.{arch}.cubin"
    family = ((10, 0), (10, 3)) if match == "family" else ()
    return Cubin(file, module, arch, match, capability, "0" * 64, 1, min_cuda, min_driver, {}, family)


def kernel(priority: int, name: str, module: str, dtype: str, op: str = "logp_forward", **more) -> KernelRow:
    fields = {"alignment": 1, "threads": 512, "shared_memory": 0, "blocks_per_row": 1, **more}
    fields.update(op=op, name=name, dtype=dtype, module=module, priority=priority)
    return KernelRow(symbol=f"{module}_{name}_{dtype}", **fields)


OLD, NEW = (12000, "525"), (12090, "575")
SYNTHETIC = Manifest(
    directory=Path("nowhere"),
    package_version="0",
    source_commit="0",
    dirty=False,
    compiler={},
    cubins=(
        cubin("generic", "sm_80", "minor", (8, 0), *OLD),
        cubin("generic", "sm_90", "minor", (9, 0), *OLD),
        cubin("generic", "sm_100f", "family", (10, 0), *NEW),
        cubin("generic", "sm_120", "minor", (12, 0), *NEW),
        cubin("cluster", "sm_90", "minor", (9, 0), *OLD),
        cubin("cluster", "sm_100f", "family", (10, 0), *NEW),
        cubin("sm90_tma", "sm_90a", "exact", (9, 0), *OLD),
    ),
    kernels=(
        *(
            row
            for dtype in DTYPES
            for row in (
                kernel(
                    0,
                    "online",
                    "cluster",
                    dtype,
                    meant_for=(Range(max_rows=128, min_row_bytes=65536),),
                    blocks_per_row=8,
                ),
                kernel(1, "tma", "sm90_tma", dtype, alignment=16),
                kernel(2, "online", "generic", dtype),
                kernel(3, "two_pass", "generic", dtype, auto=()),
                kernel(4, "backward", "generic", dtype, op="logp_backward"),
            )
        ),
        kernel(5, "scatter", "generic", "any", op="row_mask"),
    ),
)
