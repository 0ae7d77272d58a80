"""Writes manifest.json, the one thing the loader and the selector read. Same input, same bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from build_tools.compilers import Compilation, Compiler
from build_tools.kernel_table import Architecture, ElfRule, KernelTable, Module
from build_tools.provenance import Source

FORMAT = 1
FILE_NAME = "manifest.json"


def cubin_file_name(module: Module, architecture: Architecture) -> str:
    return f"{module.name}.{architecture.name}.cubin"


def cubin_row(module: Module, architecture: Architecture, rule: ElfRule, compilation: Compilation) -> dict[str, Any]:
    """Returns the manifest's row of one cubin that passed the gate."""
    return {
        "file": cubin_file_name(module, architecture),
        "module": module.name,
        "arch": architecture.name,
        "match": architecture.match,
        "capability": list(architecture.capability),
        "family": [list(capability) for capability in architecture.family],
        "sha256": hashlib.sha256(compilation.image).hexdigest(),
        "size": len(compilation.image),
        "elf_osabi": rule.osabi,
        "elf_abi": rule.abi,
        "min_driver": rule.min_driver,
        "min_cuda": rule.min_cuda,
        "symbols": {name: asdict(used) for name, used in compilation.resources.items()},
    }


def make_manifest(
    table: KernelTable,
    compiler: Compiler,
    cubins: Sequence[dict[str, Any]],
    version: str,
    source: Source,
) -> dict[str, Any]:
    """Returns the manifest; kernels whose module was not compiled are left out."""
    compiled = {row["module"] for row in cubins}
    return {
        "format": FORMAT,
        "package_version": version,
        "source_commit": source.commit,
        "dirty": source.dirty,
        "compiler": {
            "name": compiler.name,
            "version": compiler.version,
            "flags": [*table.flags, *table.compilers[compiler.name].flags],
        },
        "cubins": list(cubins),
        "kernels": [kernel.row for kernel in table.kernels if kernel.module in compiled],
    }


def manifest_text(manifest: dict[str, Any]) -> str:
    return json.dumps(manifest, sort_keys=True, indent=1) + "\n"
