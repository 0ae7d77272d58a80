"""results.csv: its columns, and what is computed from them."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from benchmarks import shapes

RESULTS = "results.csv"
HOST = "host.csv"
FIRST_CALL = "first_call.csv"
DIRECTIONS = ("forward", "backward", "step")
LIMITS = {"forward": "read", "backward": "copy"}


@dataclass(frozen=True)
class Row:
    """One provider on one shape, in one direction, by one method of timing.

    Times in microseconds a call. ``gbytes_per_s`` counts the fewest bytes the direction must move
    (for a limit, the bytes it moved); ``share`` is that rate over the limit's, on the same shape by
    the same method. ``peak_bytes``: memory held beyond the inputs. ``error``: see check.py. A row
    whose status is not "ok" has no times.
    """

    shape: str
    dtype: str
    layout: str
    direction: str
    provider: str
    symbol: str = ""
    p20: float | None = None
    p50: float | None = None
    p80: float | None = None
    samples: int | None = None
    gbytes_per_s: float | None = None
    share: float | None = None
    peak_bytes: int | None = None
    method: str = ""
    error: float | None = None
    status: str = "ok"


_TYPES = {
    "p20": float, "p50": float, "p80": float, "samples": int, "gbytes_per_s": float, "share": float,
    "peak_bytes": int, "error": float,
}  # fmt: skip


def gbytes_per_s(byte_count: int, microseconds: float) -> float:
    return byte_count / microseconds / 1e3


def share(rate: float, limit_rate: float | None) -> float | None:
    """A rate as a share of the limit's; None without a limit."""
    return None if not limit_rate else rate / limit_rate


def append(path: Path, rows: Iterable[Row]) -> None:
    """Add rows to a CSV file and close it, so that a run that is cut short keeps them."""
    new = not path.exists()
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows({k: _text(v) for k, v in asdict(row).items()} for row in rows)


def read(path: Path) -> list[Row]:
    """The rows of a CSV file; an empty list if there is none."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [_row(raw) for raw in csv.DictReader(file)]


def append_table(path: Path, rows: Iterable[dict[str, object]]) -> None:
    """Add dictionaries of the same keys to a CSV file."""
    rows = list(rows)
    if not rows:
        return
    new = not path.exists()
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows({k: _text(v) for k, v in row.items()} for row in rows)


def read_table(path: Path) -> list[dict[str, str]]:
    """A CSV file as dictionaries of text; an empty list if there is none."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


class Results:
    """Rows by shape, direction and provider, with one method for each comparison."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = list(rows)
        self._index = {(r.shape, r.direction, r.provider, r.method): r for r in self.rows}
        for r in self.rows:  # rows without times have no method
            if r.status != "ok":
                self._index[(r.shape, r.direction, r.provider, "")] = r

    def shape_names(self) -> list[str]:
        """In the order of the shape table; shapes that it no longer has come last."""
        order = [s.name for s in (*shapes.SHAPES, *shapes.DRY_SHAPES)]
        found = dict.fromkeys(r.shape for r in self.rows)
        return sorted(found, key=lambda n: order.index(n) if n in order else len(order))

    def providers(self, direction: str) -> list[str]:
        """In the order in which they first appear."""
        return list(dict.fromkeys(r.provider for r in self.rows if r.direction == direction))

    def method(self, shape: str, direction: str) -> str:
        """Graph replay where the shape was timed so, else events."""
        methods = {r.method for r in self.rows if (r.shape, r.direction) == (shape, direction)}
        return next((m for m in ("graph", "events", "cpu-dry") if m in methods), "")

    def get(self, shape: str, direction: str, provider: str) -> Row | None:
        """The row by the shape's method; else the row that says why there is no time."""
        method = self.method(shape, direction)
        return self._index.get((shape, direction, provider, method)) or self._index.get(
            (shape, direction, provider, "")
        )

    def microseconds(self, shape: str, direction: str, provider: str) -> float | None:
        row = self.get(shape, direction, provider)
        return row.p50 if row is not None and row.status == "ok" else None


def _text(value: object) -> object:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value


def _row(raw: dict[str, str]) -> Row:
    parsed: dict[str, object] = dict(raw)
    for name, kind in _TYPES.items():
        parsed[name] = kind(raw[name]) if raw[name] else None
    return Row(**parsed)  # type: ignore[arg-type]
