"""The shapes that are measured, one row each.

``layout``:
    contiguous        [N, V]
    sliced            [B, T + 1, V][:, :-1], the logits that predict each next token, not copied
    half-alternating  [N, V], every second row left out by row_mask
    half-contiguous   [N, V], the second half of the rows left out by row_mask

``asserts``: what the report holds us to.
    limit   at least SHARE_ASSERTED of the read limit forward, of the copy limit backward
    eager   faster than eager PyTorch (a few rows: the launch counts, not the bandwidth)
    ""      nothing, the number is only reported

``jit``: whether providers that compile for seconds per shape run here.
``step``: whether forward and backward together through autograd run here as well.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

SHARE_ASSERTED = 0.9
ITEM_SIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"}
LAYOUTS = ("contiguous", "sliced", "half-alternating", "half-contiguous")


@dataclass(frozen=True)
class Shape:
    """One problem: rows N (or sequences x rows of each), vocabulary V, dtype and layout."""

    rows: int
    vocab: int
    dtype: str = "bfloat16"
    layout: str = "contiguous"
    asserts: str = "limit"
    jit: bool = False
    step: bool = False
    sequences: int = 1
    """B of the sliced layout; rows counts those of all sequences."""

    @property
    def name(self) -> str:
        tail = "" if self.layout == "contiguous" else f"-{self.layout}"
        return f"{self.rows}x{self.vocab}-{SHORT[self.dtype]}{tail}"

    @property
    def kept_rows(self) -> int:
        """Rows that are not left out."""
        return (self.rows + 1) // 2 if self.layout.startswith("half") else self.rows

    @property
    def row_bytes(self) -> int:
        return self.vocab * ITEM_SIZE[self.dtype]

    def bytes_moved(self, direction: str) -> int:
        """The fewest bytes: logits read once a direction, gradient written once."""
        read, written = self.kept_rows * self.row_bytes, self.rows * self.row_bytes
        return {"forward": read, "backward": read + written, "step": 2 * read + written}[direction]


# The order is that of running: a run that is cut short has measured the first ones.
SHAPES = (
    Shape(4096, 128256, jit=True, step=True),
    Shape(4096, 32000, jit=True, step=True),
    Shape(32, 128256, asserts="eager", jit=True),
    Shape(8192, 151936, jit=True, step=True),
    Shape(1024, 128256),
    Shape(264, 128256),
    Shape(1, 151936, asserts="eager", jit=True),
    Shape(16384, 8192, jit=True),
    Shape(2048, 262144),
    Shape(4096, 50257),
    Shape(4096, 128256, layout="sliced", sequences=4),
    Shape(4096, 32000, layout="sliced", sequences=4),
    Shape(4096, 128256, layout="half-alternating"),
    Shape(4096, 128256, layout="half-contiguous"),
    Shape(4096, 32000, "float16"),
    Shape(4096, 128256, "float16"),
    Shape(4096, 32000, "float32"),
    Shape(2048, 128256, "float32"),
)

# For a machine without a GPU: exercises the code, measures nothing.
DRY_SHAPES = (
    Shape(8, 33, asserts="", step=True),
    Shape(6, 32, "float32", layout="sliced", sequences=2, asserts=""),
    Shape(8, 32, "float16", layout="half-alternating", asserts=""),
    Shape(7, 32, "float32", layout="half-contiguous", asserts=""),
)


def find(name: str) -> Shape | None:
    """The shape of that name, if it is (still) one of the table."""
    return next((s for s in (*SHAPES, *DRY_SHAPES) if s.name == name), None)


def select(shapes: Sequence[Shape], patterns: Sequence[str]) -> list[Shape]:
    """The shapes whose names match any of the patterns (``*`` wildcards); all without patterns."""
    if not patterns:
        return list(shapes)
    chosen = [s for s in shapes if any(fnmatch.fnmatch(s.name, p) for p in patterns)]
    if not chosen:
        raise ValueError(
            f"--shapes: expected patterns of {', '.join(s.name for s in shapes)}, "
            f"got {' '.join(patterns)}. Use * for any text."
        )
    return chosen
