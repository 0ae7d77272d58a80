"""Compiles every module for every architecture, gates each cubin, and writes a folder of them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from build_tools.compilers import Compiler
from build_tools.errors import BuildError, TableError
from build_tools.gate import check_cubin, raise_findings
from build_tools.kernel_table import ROOT, Architecture, KernelTable, Module
from build_tools.manifest import FILE_NAME, cubin_file_name, cubin_row, make_manifest, manifest_text
from build_tools.provenance import find_source, package_version

SOURCE_DIR = ROOT / "kernels_src"


def build(
    table: KernelTable,
    compiler: Compiler,
    out: Path,
    *,
    source_dir: Path = SOURCE_DIR,
    root: Path = ROOT,
    architectures: Collection[str] | None = None,
) -> dict[str, Any]:
    """Fills `out` with the cubins and manifest.json, and returns the manifest.

    Args:
        table: what to compile.
        compiler: what compiles it.
        out: the folder; cubins and the manifest of an earlier build are removed from it.
        source_dir: where the modules' sources and headers are.
        root: the folder whose version and commit the manifest states.
        architectures: compile for these only; all when None.

    Raises:
        TableError, CompilerError, GateError: nothing in `out` is touched then.
    """
    source_dir = source_dir.resolve()  # nvcc runs in another folder than this process
    targets = list(_targets(table, architectures))
    for module, _ in targets:
        if not (source_dir / module.source).is_file():
            raise TableError(
                f"{module.name}.source: expected a file in {source_dir}, got {module.source!r}. "
                "Correct kernels.toml, or name the sources' folder."
            )
    flags = [*table.flags, *table.compilers[compiler.name].flags]

    def compile_one(
        target: tuple[Module, Architecture],
    ) -> tuple[dict[str, Any], bytes] | BuildError:
        module, architecture = target
        try:
            rule = table.elf_rule(compiler.version, architecture.name)
            compilation = compiler.compile(source_dir / module.source, [source_dir], architecture.name, flags)
            check_cubin(
                compilation,
                label=cubin_file_name(module, architecture),
                architecture=architecture,
                rule=rule,
                kernels=table.symbols(module.name),
                folders=[source_dir, *compiler.folders],
            )
        except BuildError as error:
            return error
        return cubin_row(module, architecture, rule, compilation), compilation.image

    # Threads suffice: both compilers run outside the interpreter's lock.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(compile_one, targets))
    # All of them: who corrects a kernel wants to see what it does on every architecture.
    raise_findings([result for result in results if isinstance(result, BuildError)])
    compiled = [result for result in results if not isinstance(result, BuildError)]

    cubins = [row for row, _ in compiled]
    manifest = make_manifest(table, compiler, cubins, package_version(root), find_source(root))
    _write(out, {row["file"]: image for row, image in compiled}, manifest_text(manifest))
    return manifest


def _targets(table: KernelTable, architectures: Collection[str] | None) -> Iterator[tuple[Module, Architecture]]:
    known = {name for module in table.modules for name in module.architectures}
    unknown = sorted(set(architectures or ()) - known)
    if unknown:
        raise TableError(
            f"arch: expected some of {', '.join(sorted(known))}, got {', '.join(unknown)}. "
            "Correct it, or add it to a module in kernels.toml."
        )
    for module in table.modules:
        for name in module.architectures:
            if architectures is None or name in architectures:
                yield module, table.architecture(name)


def _write(out: Path, images: dict[str, bytes], manifest: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    # The manifest goes first and comes last: a folder without one is never taken for a whole build.
    (out / FILE_NAME).unlink(missing_ok=True)
    for stale in out.glob("*.cubin"):
        stale.unlink()
    for name, image in images.items():
        (out / name).write_bytes(image)
    (out / FILE_NAME).write_text(manifest, encoding="utf-8", newline="\n")
