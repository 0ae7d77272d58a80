"""python -m build_tools: compiles, gates, writes, and prints what each kernel uses."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from build_tools.build import SOURCE_DIR, build
from build_tools.compilers import ENVIRONMENT_VARIABLE, select_compiler
from build_tools.errors import BuildError
from build_tools.kernel_table import ROOT, TABLE_PATH, load_table

_COLUMNS = ("registers", "static_shared_memory", "stack", "spill_stores", "spill_loads")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m build_tools", description=__doc__)
    parser.add_argument("--compiler", help=f"nvrtc, nvcc or the path of an nvcc (default: ${ENVIRONMENT_VARIABLE})")
    parser.add_argument("--out", type=Path, default=ROOT / "fused_logp_hub" / "cubins")
    parser.add_argument("--arch", action="append", help="only this one, sm_90a say; repeatable")
    parser.add_argument("--table", type=Path, default=TABLE_PATH)
    parser.add_argument("--sources", type=Path, default=SOURCE_DIR)
    options = parser.parse_args(arguments)
    try:
        table = load_table(options.table)
        compiler = select_compiler(table, options.compiler)
        manifest = build(
            table,
            compiler,
            options.out,
            source_dir=options.sources,
            architectures=options.arch,
        )
    except BuildError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(format_report(manifest))
    count = len(manifest["cubins"])
    print(f"\n{count} cubins by {compiler.name} {compiler.version} in {options.out}")
    return 0


def format_report(manifest: dict[str, Any]) -> str:
    """Returns a plain table: one line a kernel and architecture, bytes and registers a thread."""
    rows = [("arch", "symbol", *(column.replace("_", " ") for column in _COLUMNS))]
    for cubin in manifest["cubins"]:
        for symbol, used in sorted(cubin["symbols"].items()):
            rows.append((cubin["arch"], symbol, *(str(used[column]) for column in _COLUMNS)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for arch, symbol, *numbers in rows:
        texts = [arch.ljust(widths[0]), symbol.ljust(widths[1])]
        texts += [number.rjust(width) for number, width in zip(numbers, widths[2:], strict=True)]
        lines.append("  ".join(texts))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
