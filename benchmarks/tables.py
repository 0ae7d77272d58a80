"""Markdown from results: the README's block and the full report. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import names, results, shapes
from benchmarks.results import Results, Row

TITLES = {"forward": "Forward", "backward": "Backward", "step": "Forward and backward"}


@dataclass(frozen=True)
class Card:
    """All that was measured on one card."""

    folder: Path
    results: Results
    host: list[dict[str, str]]
    first_call: list[dict[str, str]]
    env: dict[str, Any]


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def microseconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 999.95 else f"{value:.0f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def shape_label(name: str) -> str:
    """4096 x 128256, with dtype and layout where they are not the usual ones."""
    shape = shapes.find(name)
    if shape is None:
        return name
    notes = [shapes.SHORT[shape.dtype]] if shape.dtype != "bfloat16" else []
    notes += [shape.layout] if shape.layout != "contiguous" else []
    return f"{shape.rows} x {shape.vocab}" + (f" ({', '.join(notes)})" if notes else "")


def best_library(found: Results, shape: str, direction: str) -> Row | None:
    """The fastest correct one of the other packages."""
    rows = [found.get(shape, direction, name) for name in names.LIBRARIES]
    timed = [r for r in rows if r is not None and r.p50 is not None]
    return min(timed, key=lambda r: r.p50 or 0.0) if timed else None


def lost(found: Results) -> list[tuple[Row, Row]]:
    """(ours, another's row) wherever a provider that runs another kernel is faster."""
    pairs = []
    for shape in found.shape_names():
        for direction in results.DIRECTIONS:
            ours = found.get(shape, direction, "ours")
            if ours is None or ours.p50 is None:
                continue
            for name in found.providers(direction):
                row = found.get(shape, direction, name)
                if name in names.LIMITS or row is None or row.p50 is None:
                    continue
                same_kernel = row.symbol == ours.symbol != ""
                if row.p50 < ours.p50 and not same_kernel:
                    pairs.append((ours, row))
    return pairs


def asserted(found: Results) -> list[tuple[str, str, str, bool]]:
    """Shape, direction, measured against asserted, and whether it was met."""
    lines = []
    for name in found.shape_names():
        shape = shapes.find(name)
        for direction in ("forward", "backward"):
            ours = found.get(name, direction, "ours")
            if shape is None or not shape.asserts or ours is None:
                continue
            if shape.asserts == "limit":
                text = f"{percent(ours.share)} of the {results.LIMITS[direction]} limit"
                text += f", asserted {percent(shapes.SHARE_ASSERTED)}"
                met = ours.share is not None and ours.share >= shapes.SHARE_ASSERTED
            else:
                eager = found.microseconds(name, direction, "eager")
                text = f"{microseconds(ours.p50)} µs, eager {microseconds(eager)}"
                text += ", asserted faster than eager"
                met = ours.p50 is not None and eager is not None and ours.p50 < eager
            lines.append((name, direction, text, met))
    return lines


def readme_block(cards: Sequence[Card]) -> str:
    """What stands between the README's markers."""
    return "\n\n".join(_readme_card(card) for card in cards)


def _readme_card(card: Card) -> str:
    env = card.env
    folder = f"benchmarks/results/{card.folder.name}"
    parts = [
        f"{env['card']}, {env['date']}, torch {env['torch']}, driver {env.get('driver') or '-'}. "
        "Microseconds a call on the GPU, median, cold L2; share: of the bandwidth of a read-only "
        "kernel (forward) or of `Tensor.copy_` (backward) on the same bytes. Every result was "
        "compared with float64 before it was timed. "
        f"[All numbers, also where others are faster]({folder}/REPORT.md)."
    ]
    for direction in ("forward", "backward"):
        table = _readme_table(card.results, direction)
        if table:
            parts.append(f"**{TITLES[direction]}**, bfloat16\n\n{table}")
    if card.host:
        parts.append("**Host time of a call**, µs, 8 x 1024\n\n" + host_table(card, ("ours", "eager")))
    return "\n\n".join(parts)


def _readme_table(found: Results, direction: str) -> str:
    rows = []
    for name in found.shape_names():
        shape = shapes.find(name)
        ours = found.get(name, direction, "ours")
        if shape is None or ours is None or (shape.dtype, shape.layout) != ("bfloat16", "contiguous"):
            continue
        other = best_library(found, name, direction)
        eager = found.microseconds(name, direction, "eager")
        own, theirs = microseconds(ours.p50), "-"
        if other is not None:
            theirs = f"{microseconds(other.p50)} ({names.label(other.provider)})"
        if ours.p50 is None:
            own = ours.status
        elif other is not None and (other.p50 or 0.0) < ours.p50:
            theirs = f"**{theirs}**"
        else:
            own = f"**{own}**"
        speedup = f" ({eager / ours.p50:.1f}x)" if eager and ours.p50 else ""
        rows.append(
            [
                shape_label(name),
                microseconds(found.microseconds(name, direction, results.LIMITS[direction])),
                own,
                percent(ours.share),
                theirs,
                microseconds(found.microseconds(name, direction, "torch.compile")),
                microseconds(eager) + speedup,
            ]
        )
    limit = names.label(results.LIMITS[direction])
    head = ["N x V", limit, "ours", "share", "best other package", "torch.compile", "eager"]
    return markdown(head, rows) if rows else ""


def host_table(card: Card, providers: Sequence[str]) -> str:
    """Median host microseconds, a line a call."""
    times = {(r["call"], r["provider"]): float(r["p50"]) for r in card.host}
    calls = list(dict.fromkeys(call for call, _ in times))
    rows = [[call, *(microseconds(times.get((call, p))) for p in providers)] for call in calls]
    return markdown(["call", *(names.label(p) for p in providers)], rows)


def load_card(folder: Path) -> Card:
    """Reads a folder of results; env.json must be there."""
    import json

    env = json.loads((folder / "env.json").read_text(encoding="utf-8"))
    return Card(
        folder,
        Results(results.read(folder / results.RESULTS)),
        results.read_table(folder / results.HOST),
        results.read_table(folder / results.FIRST_CALL),
        env,
    )
