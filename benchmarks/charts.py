"""The charts of a card's folder; the only file here that needs matplotlib."""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks import names, results
from benchmarks.results import Row
from benchmarks.tables import TITLES, Card, best_library, shape_label

COLORS = {
    "ours": "#1a7f37", "quack": "#8250df", "liger": "#bf8700", "flash-attn": "#cf222e",
    "trl-triton": "#0969da", "trl-torch": "#54aeff", "torch.compile": "#6e7781", "eager": "#afb8c1",
}  # fmt: skip
RATIOS = (1, 2, 5, 10, 20, 50)


def draw(card: Card) -> None:
    """share.png and peers.png, from the rows that have times."""
    _share(card)
    _peers(card)


def _share(card: Card) -> None:
    """Ours and the best other package as shares of the limit, a bar each, by shape."""
    figure, axes = plt.subplots(1, 2, figsize=(13, 7), layout="constrained")
    found = card.results
    for axis, direction in zip(axes, ("forward", "backward"), strict=True):
        ours = {s: _share_of(found.get(s, direction, "ours")) for s in found.shape_names()}
        shapes = [s for s in ours if ours[s] is not None]
        for y, shape in enumerate(shapes):
            _labelled_bar(axis, y - 0.2, ours[shape], "ours")
            other = best_library(found, shape, direction)
            if other is not None:
                _labelled_bar(axis, y + 0.2, other.share, other.provider)
        axis.set_yticks(range(len(shapes)), [shape_label(s) for s in shapes], fontsize=8)
        axis.invert_yaxis()
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set_xlim(0, 1.3)
        axis.set_xlabel(f"share of the {results.LIMITS[direction]} limit")
        axis.set_title(TITLES[direction])
    figure.suptitle(f"{card.env['card']}, {card.env['date']}: ours and the best other package")
    figure.savefig(card.folder / "share.png", dpi=110)
    plt.close(figure)


def _share_of(row: Row | None) -> float | None:
    return None if row is None else row.share


def _labelled_bar(axis: Axes, y: float, share: float | None, provider: str) -> None:
    if share is None:
        return
    axis.barh(y, share, 0.4, color=COLORS[provider])
    axis.text(share + 0.01, y, names.label(provider), va="center", fontsize=7)


def _peers(card: Card) -> None:
    """Time over the limit's, logarithmic, all providers side by side; 1 is the limit."""
    figure, axes = plt.subplots(2, 1, figsize=(14, 9), layout="constrained")
    found = card.results
    for axis, direction in zip(axes, ("forward", "backward"), strict=True):
        limit = results.LIMITS[direction]
        limits = {s: found.microseconds(s, direction, limit) for s in found.shape_names()}
        shapes = [s for s in limits if limits[s]]
        width = 0.85 / len(COLORS)
        for k, (provider, color) in enumerate(COLORS.items()):
            times = {s: found.microseconds(s, direction, provider) for s in shapes}
            at = [x + k * width for x, s in enumerate(shapes) if times[s] is not None]
            ratio = [times[s] / limits[s] for s in shapes if times[s] is not None]
            axis.bar(at, ratio, width, color=color, label=names.label(provider))
        axis.set_yscale("log")
        axis.set_yticks(RATIOS, [str(r) for r in RATIOS])
        axis.axhline(1.0, color="black", linewidth=0.8)
        labels = [shape_label(s).replace(" (", "\n(") for s in shapes]
        at = [x + 0.4 for x in range(len(shapes))]
        axis.set_xticks(at, labels, rotation=30, ha="right", fontsize=8)
        axis.set_ylabel(f"time / {limit} limit")
        axis.set_title(TITLES[direction])
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(COLORS), fontsize=9)
    figure.suptitle(f"{card.env['card']}, {card.env['date']}; lower is better")
    figure.savefig(card.folder / "peers.png", dpi=110)
    plt.close(figure)
