"""Loads kernels.toml, checks it, and expands its rows: one kernel per dtype."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from build_tools.errors import TableError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
TABLE_PATH = Path(__file__).with_name("kernels.toml")

_ARCHITECTURE = re.compile(r"sm_(\d+)(\d)([af]?)")
_MATCH_RULES = {"": "minor", "f": "family", "a": "exact"}
_KERNEL_KEYS = {
    "op": str,
    "name": str,
    "module": str,
    "symbol": str,
    "dtypes": list,
    "threads": int,
}
_GRIDS = (
    {"blocks_per_row"},
    {"blocks_per_multiprocessor"},
    {"items_per_block"},
    {"tile_bytes", "max_tiles_per_block", "resident_blocks"},
)
_RANGE_KEYS = ("min_rows", "max_rows", "min_row_bytes", "max_row_bytes")


@dataclass(frozen=True)
class Architecture:
    """`name` as compilers take it, the capability it is for, and on which others it may run."""

    name: str
    capability: tuple[int, int]
    match: str
    family: tuple[tuple[int, int], ...] = ()
    """All it runs on, if that is a family."""

    @classmethod
    def parse(cls, name: str) -> Architecture:
        parts = _ARCHITECTURE.fullmatch(name)
        if parts is None:
            raise TableError(f"architecture: expected sm_XY, sm_XYa or sm_XYf, got {name!r}. Correct the name.")
        return cls(name, (int(parts[1]), int(parts[2])), _MATCH_RULES[parts[3]])


@dataclass(frozen=True)
class ElfRule:
    """What compilers of one range of CUDA releases write, and the oldest driver that loads it."""

    cuda: tuple[str, str]
    osabi: int
    abi: int
    min_cuda: int
    min_driver: str
    before: str | None = None
    """The first architecture that it does not hold for; None: it holds for all."""

    def covers(self, cuda: tuple[int, int], architecture: str) -> bool:
        first, last = (_release(text) for text in self.cuda)
        capability = Architecture.parse(architecture).capability
        is_before = self.before is None or capability < Architecture.parse(self.before).capability
        return first <= cuda <= last and is_before


@dataclass(frozen=True)
class CompilerPin:
    """How one compiler is found (NVRTC: by distribution name) and which flags only it takes."""

    flags: tuple[str, ...] = ()
    version: str | None = None
    distribution: str | None = None
    header_distributions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Module:
    """One source file, compiled once per architecture."""

    name: str
    source: str
    architectures: tuple[str, ...]


@dataclass(frozen=True)
class Kernel:
    """One kernel of one dtype; `row` is its row of the manifest."""

    symbols: tuple[str, ...]
    module: str
    threads: int
    row: dict[str, Any]


@dataclass(frozen=True)
class KernelTable:
    flags: tuple[str, ...]
    compilers: dict[str, CompilerPin]
    elf_rules: tuple[ElfRule, ...]
    families: dict[str, tuple[str, ...]]
    modules: tuple[Module, ...]
    kernels: tuple[Kernel, ...]

    def architecture(self, name: str) -> Architecture:
        """Returns the architecture with its family; TableError when the name is none."""
        parsed = Architecture.parse(name)
        if parsed.match != "family":
            return parsed
        listed = tuple(_release(text) for text in self.families.get(name, ()))
        return replace(parsed, family=listed or (parsed.capability,))

    def elf_rule(self, compiler_version: str, architecture: str) -> ElfRule:
        """Returns the rule for what this compiler writes; TableError when there is none."""
        for rule in self.elf_rules:
            if rule.covers(_release(compiler_version), architecture):
                return rule
        raise TableError(
            f"elf_rules: expected one that covers CUDA {compiler_version} and {architecture}, got "
            "none. Compile with a listed release, or find out what this one writes and add a row."
        )

    def symbols(self, module: str) -> dict[str, Kernel]:
        return {symbol: kernel for kernel in self.kernels if kernel.module == module for symbol in kernel.symbols}


def load_table(path: Path = TABLE_PATH) -> KernelTable:
    """Returns the table in `path`; raises TableError that names the row and key that is wrong."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise TableError(f"{path.name}: expected TOML, got {error}. Correct the file.") from error
    try:
        table = KernelTable(
            flags=tuple(data["compile"]["flags"]),
            compilers={name: CompilerPin(**_tuples(row)) for name, row in data["compilers"].items()},
            elf_rules=tuple(ElfRule(**_tuples(row)) for row in data["elf_rules"]),
            families=_tuples(data["families"]),
            modules=tuple(Module(**_tuples(row)) for row in data["modules"]),
            kernels=tuple(
                kernel
                for priority, row in enumerate(data["kernels"])
                for kernel in _expand(row, priority, data["dtypes"])
            ),
        )
    except KeyError as error:
        raise TableError(f"{path.name}: expected a key {error}, got none. Add it.") from error
    except TypeError as error:
        raise TableError(f"{path.name}: expected known keys, got {error}. Correct it.") from error
    _check(table)
    return table


def _expand(row: dict[str, Any], priority: int, suffixes: dict[str, str]) -> list[Kernel]:
    for key, kind in _KERNEL_KEYS.items():
        if not isinstance(row.get(key), kind):
            raise TableError(
                f"kernels[{priority}].{key}: expected {kind.__name__}, got {row.get(key)!r}. Correct the row."
            )
    for key in ("meant_for", "auto"):
        ranges = row.get(key, [])
        if not isinstance(ranges, list) or not all(map(_is_range, ranges)):
            raise TableError(
                f"kernels[{priority}].{key}: expected tables of integers for {', '.join(_RANGE_KEYS)}, got {ranges!r}. "
                "Correct the row."
            )
    grid = {key for kind in _GRIDS for key in kind if key in row}
    if grid not in _GRIDS:
        raise TableError(
            f"kernels[{priority}]: expected the keys of one kind of grid, got {', '.join(sorted(grid)) or 'none'}. "
            "Correct the row."
        )
    for key in ("dtype", "priority"):
        if key in row:
            raise TableError(f"kernels[{priority}].{key}: expected absent, got {row[key]!r}. The build sets it.")
    kernels = []
    for dtype in row["dtypes"]:
        if dtype != "any" and dtype not in suffixes:
            raise TableError(
                f"kernels[{priority}].dtypes: expected one of {[*suffixes, 'any']}, got {dtype!r}. "
                "Add it to [dtypes] or correct the row."
            )
        symbols: dict[str, str] = {key: row[key] for key in ("symbol", "usual_symbol") if key in row}
        for key, symbol in symbols.items():
            if (dtype == "any") == ("{dtype}" in symbol):
                raise TableError(
                    f"kernels[{priority}].{key}: expected {{dtype}} in it unless dtypes is ['any'], "
                    f"got {symbol!r} for {dtype}. Correct the row."
                )
            symbols[key] = symbol.replace("{dtype}", suffixes.get(dtype, ""))
        kept = {key: value for key, value in row.items() if key != "dtypes"}
        manifest_row = {**kept, **symbols, "dtype": dtype, "priority": priority}
        kernels.append(Kernel(tuple(symbols.values()), row["module"], row["threads"], manifest_row))
    return kernels


def _is_range(value: Any) -> bool:
    return isinstance(value, dict) and all(k in _RANGE_KEYS and type(v) is int for k, v in value.items())


def _check(table: KernelTable) -> None:
    for module in table.modules:
        for architecture in module.architectures:
            table.architecture(architecture)
    modules = [module.name for module in table.modules]
    seen: set[tuple[str, str]] = set()
    for kernel in table.kernels:
        if kernel.module not in modules:
            raise TableError(
                f"kernels[{kernel.row['priority']}].module: expected one of {modules}, "
                f"got {kernel.module!r}. Correct the row or add the module."
            )
        for symbol in kernel.symbols:
            if (kernel.module, symbol) in seen:
                raise TableError(
                    f"kernels[{kernel.row['priority']}].symbol: expected a new one, "
                    f"got {symbol!r} a second time. Correct the row."
                )
            seen.add((kernel.module, symbol))


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _tuples(row: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
