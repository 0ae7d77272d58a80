"""What the wheel ships: the manifest that the build wrote beside the cubins, as data.

Standard library only: it is read, and selection over it is tested, on machines without CUDA or PyTorch.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from fused_logp_hub._errors import CubinError
from fused_logp_hub._version import __version__

if TYPE_CHECKING:
    from importlib.abc import Traversable

FORMAT = 1
CUBIN_DIR: Traversable = files(__name__.rpartition(".")[0]) / "cubins"  # a folder, or inside a zip archive
REINSTALL = "Reinstall fused-logp-hub."
_CLOSEST_FIRST = ("exact", "family", "minor")


@dataclass(frozen=True)
class Cubin:
    """One file of machine code for one architecture."""

    file: str
    module: str
    arch: str
    match: str
    """minor: same major and at least this minor; family: what `family` lists; exact: this capability only."""
    capability: tuple[int, int]
    sha256: str
    size: int
    min_cuda: int
    """Smallest cuDriverGetVersion that loads this ELF ABI, such as 12000."""
    min_driver: str
    symbols: dict[str, dict[str, int]]
    family: tuple[tuple[int, int], ...] = ()

    def mismatch(self, capability: tuple[int, int]) -> str | None:
        """Why this cubin does not run on a device of that capability; None if it does."""
        major, minor = self.capability
        if self.match == "exact":
            fits = capability == self.capability
            rule = f"exactly {major}.{minor}"
        elif self.match == "family":
            fits = capability in self.family
            rule = " or ".join(f"{a}.{b}" for a, b in self.family)
        else:
            fits = capability[0] == major and capability[1] >= minor
            rule = f"{major}.x with x >= {minor}"
        return None if fits else f"{self.arch} runs on capability {rule}"

    def runs_on(self, capability: tuple[int, int], driver_cuda: int) -> bool:
        """Whether a device of that capability loads and runs it under that driver."""
        return self.mismatch(capability) is None and driver_cuda >= self.min_cuda


@dataclass(frozen=True)
class Range:
    """Numbers of rows and sizes of a row, limits included."""

    min_rows: int = 0
    max_rows: int | None = None
    min_row_bytes: int = 0
    max_row_bytes: int | None = None

    def holds(self, rows: int, row_bytes: int) -> bool:
        return (
            rows >= self.min_rows
            and (self.max_rows is None or rows <= self.max_rows)
            and row_bytes >= self.min_row_bytes
            and (self.max_row_bytes is None or row_bytes <= self.max_row_bytes)
        )

    def __str__(self) -> str:
        rows = _between(self.min_rows, self.max_rows) or "any number of"
        size = _between(self.min_row_bytes, self.max_row_bytes)
        return f"{rows} rows" + (f" of {size} bytes" if size else "")


def _between(low: int, high: int | None) -> str:
    """Words for the limits that there are."""
    if high is None:
        return f"at least {low}" if low else ""
    return f"{low} to {high}" if low else f"at most {high}"


@dataclass(frozen=True)
class KernelRow:
    """One kernel as data; see build_tools/kernels.toml for the meaning of each field."""

    op: str
    name: str
    dtype: str
    symbol: str
    module: str
    alignment: int
    threads: int
    shared_memory: int
    priority: int
    usual_symbol: str | None = None
    """Its machine code for usual calls alone."""
    meant_for: tuple[Range, ...] | None = None
    auto: tuple[Range, ...] | None = None
    blocks_per_row: int | None = None
    blocks_per_multiprocessor: int | None = None
    tile_bytes: int | None = None
    max_tiles_per_block: int | None = None
    resident_blocks: int | None = None
    items_per_block: int | None = None

    def grid(self, rows: int, row_bytes: int, multiprocessors: int) -> tuple[int, int]:
        """Blocks to launch for that many rows (or items) of that many bytes, and tiles per block."""
        if self.blocks_per_row is not None:
            return rows * self.blocks_per_row, 0
        if self.blocks_per_multiprocessor is not None:
            return min(rows, multiprocessors * self.blocks_per_multiprocessor), 0
        if self.tile_bytes is not None and self.max_tiles_per_block is not None and self.resident_blocks is not None:
            tiles = -(-row_bytes // self.tile_bytes)
            # as many tiles a block as let all blocks run at once
            at_once = self.resident_blocks * multiprocessors
            each = max(1, min(self.max_tiles_per_block, -(-tiles * rows // at_once)))
            return rows * -(-tiles // each), each
        assert self.items_per_block is not None  # the build checks that each row has its kind of grid
        return -(-rows // self.items_per_block), 0


@dataclass(frozen=True)
class Manifest:
    """The manifest of one build."""

    directory: Traversable
    package_version: str
    source_commit: str
    dirty: bool
    compiler: dict[str, Any]
    cubins: tuple[Cubin, ...]
    """Of several that run on a GPU, the closest to it comes first."""
    kernels: tuple[KernelRow, ...]
    """In order of priority."""

    def thresholds(self, op: str) -> tuple[list[int], list[int]]:
        """Where selection for an op can change: the last numbers of rows, and the last row sizes, ascending."""
        ranges = [r for k in self.kernels if k.op == op for r in (*(k.meant_for or ()), *(k.auto or ()))]
        rows = {r.max_rows for r in ranges} | {r.min_rows - 1 for r in ranges}
        row_bytes = {r.max_row_bytes for r in ranges} | {r.min_row_bytes - 1 for r in ranges}
        return sorted(n for n in rows if n and n > 0), sorted(n for n in row_bytes if n and n > 0)

    def cubins_of(self, module: str) -> list[Cubin]:
        return [c for c in self.cubins if c.module == module]

    def closest(self, module: str, capability: tuple[int, int], driver_cuda: int) -> Cubin | None:
        """The module's cubin that a device runs; None if none fits."""
        return next((c for c in self.cubins_of(module) if c.runs_on(capability, driver_cuda)), None)

    def architectures(self) -> str:
        """The shipped architectures, for messages."""
        return ", ".join(sorted({c.arch for c in self.cubins})) or "none"

    def read_cubin(self, cubin: Cubin) -> bytes:
        """The file's bytes, after its checksum was compared with the manifest's."""
        path = self.directory / cubin.file
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CubinError(f"{path}: expected a cubin, got {error.strerror}. {REINSTALL}") from error
        if len(data) != cubin.size:
            raise CubinError(f"{path}: expected {cubin.size} bytes, got {len(data)}. {REINSTALL}")
        digest = hashlib.sha256(data).hexdigest()
        if digest != cubin.sha256:
            raise CubinError(f"{path}: expected sha256 {cubin.sha256}, got {digest}. {REINSTALL}")
        return data


def load_manifest(directory: Traversable) -> Manifest:
    """Read and check ``directory/manifest.json``; CubinError names the file and what is wrong."""
    path = directory / "manifest.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CubinError(f"{path}: expected the kernel manifest, got {error.strerror}. {REINSTALL}") from error
    except ValueError as error:
        raise CubinError(f"{path}: expected JSON, got {error}. {REINSTALL}") from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        found = raw.get("format") if isinstance(raw, dict) else type(raw).__name__
        raise CubinError(f"{path}: expected manifest format {FORMAT}, got {found}. {REINSTALL}")
    if raw.get("package_version") != __version__:
        raise CubinError(
            f"{path}: expected kernels of version {__version__}, got {raw.get('package_version')}. {REINSTALL}"
        )
    try:
        return Manifest(
            directory=directory,
            package_version=raw["package_version"],
            source_commit=raw["source_commit"],
            dirty=raw["dirty"],
            compiler=raw["compiler"],
            cubins=tuple(sorted((_cubin(c) for c in raw["cubins"]), key=_distance)),
            kernels=tuple(sorted((_kernel(k) for k in raw["kernels"]), key=lambda k: k.priority)),
        )
    except (KeyError, TypeError) as error:
        raise CubinError(f"{path}: expected a complete manifest, got {error!r}. {REINSTALL}") from error


def _cubin(raw: dict[str, Any]) -> Cubin:
    fields = {name: raw[name] for name in Cubin.__dataclass_fields__}
    fields["capability"] = tuple(fields["capability"])
    fields["family"] = tuple(tuple(capability) for capability in fields["family"])
    return Cubin(**fields)


def _kernel(raw: dict[str, Any]) -> KernelRow:
    fields = dict(raw)
    for key in ("meant_for", "auto"):
        if key in raw:
            fields[key] = tuple(Range(**r) for r in raw[key])
    return KernelRow(**fields)


def _distance(cubin: Cubin) -> tuple[int, int, int]:
    """Ascending, the order in which cubins are tried."""
    major, minor = cubin.capability
    return -major, -minor, _CLOSEST_FIRST.index(cubin.match)


@lru_cache(maxsize=1)
def shipped() -> Manifest:
    """The manifest of the installed package."""
    return load_manifest(CUBIN_DIR)
