"""REPORT.md: every number that was measured on a card, those where others are faster first."""

from __future__ import annotations

from benchmarks import names, results
from benchmarks.results import Results, Row
from benchmarks.tables import (
    TITLES,
    Card,
    asserted,
    host_table,
    lost,
    markdown,
    microseconds,
    percent,
    shape_label,
)

METHOD = """\
- Each result was compared with a float64 reference before it was timed; a wrong one has no time.
- Before every sample L2 was flushed by writing one buffer and reading another. Calls rotate over
  buffers that together exceed three times L2. Providers of a shape take turns, sample by sample.
- `graph`: a CUDA graph of at least 16 calls, replayed, time a call; `events`: one call between two
  CUDA events; `calls`: wall time a call of ten plain calls in a row, the host's time included.
  Tables compare within one method: graph where the shape was timed so, else events.
- Backward: the gradient at the logits from an upstream gradient per row; what the forward saved is
  given. Forward and backward together: through autograd.
- GB/s count the fewest bytes that must move: logits read once a direction, gradient written once.
"""


def render(card: Card) -> str:
    """The whole report."""
    found = card.results
    parts = [f"# Benchmark on {card.env['card']}", _environment(card), "## Method", METHOD.rstrip()]
    parts.append(markdown(["name", "what it is"], [list(v) for v in names.PROVIDERS.values()]))
    parts += ["## What the shape table asserts", _asserted(found)]
    parts += ["## Where another is faster", _lost(found)]
    for direction in results.DIRECTIONS:
        if found.providers(direction):
            parts += [f"## {TITLES[direction]}, µs a call", _matrix(found, direction)]
    if any((card.folder / name).exists() for name in CHARTS):
        parts.append("\n".join(f"![{alt}]({name})" for name, alt in CHARTS.items()))
    if card.host:
        providers = names.ordered(list(dict.fromkeys(r["provider"] for r in card.host)))
        parts += ["## Host time, µs a call, 8 x 1024 bf16, median", host_table(card, providers)]
    if card.first_call:
        parts += ["## First call in a fresh process, ms, JIT caches empty", _first_call(card)]
    parts += ["## All rows", _all_rows(found.rows)]
    return "\n\n".join(parts) + "\n"


CHARTS = {
    "share.png": "Share of the bandwidth limit by shape",
    "peers.png": "Time over the limit, all providers",
}


def _environment(card: Card) -> str:
    env = card.env
    kernels = env.get("kernels") or {}
    compiler = kernels.get("compiler", {})
    dirty = " with uncommitted changes" if kernels.get("dirty") else ""
    pairs = {
        "date": env["date"],
        "card": f"{env['card']}, {env.get('multiprocessors', '-')} multiprocessors",
        "driver": env.get("driver") or "-",
        "torch": env["torch"],
        "Python": env["python"],
        "fused-logp-hub": env["fused_logp_hub"],
        "kernels built from": kernels.get("source_commit", "-") + dirty,
        "kernels compiled by": f"{compiler.get('name', '-')} {compiler.get('version', '')}".strip(),
        **{k: v for k, v in env.get("peers", {}).items() if v},
        "command": f"`{env['command']}`",
    }
    late = env.get("not_measured")
    if late:
        pairs["not measured, for want of time"] = ", ".join(late)
    return markdown(["", ""], [[k, str(v)] for k, v in pairs.items()])


def _asserted(found: Results) -> str:
    lines = asserted(found)
    if not lines:
        return "Nothing was measured that the table asserts."
    return markdown(
        ["shape", "direction", "measured", ""],
        [[shape_label(s), d, text, "met" if met else "**missed**"] for s, d, text, met in lines],
    )


def _lost(found: Results) -> str:
    pairs = lost(found)
    if not pairs:
        return "Nowhere among what was measured."
    return markdown(
        ["shape", "direction", "ours", "faster", "by"],
        [
            [
                shape_label(ours.shape),
                ours.direction,
                microseconds(ours.p50),
                f"{names.label(row.provider)} {microseconds(row.p50)}",
                f"{1 - (row.p50 or 0.0) / (ours.p50 or 1.0):.1%}",
            ]
            for ours, row in pairs
        ],
    )


def _matrix(found: Results, direction: str) -> str:
    providers = names.ordered(found.providers(direction))
    rows = []
    for shape in found.shape_names():
        cells = [_cell(found.get(shape, direction, p)) for p in providers]
        if any(cell != "" for cell in cells):
            rows.append([shape_label(shape), found.method(shape, direction), *cells])
    return markdown(["N x V", "method", *(names.label(p) for p in providers)], rows)


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if row.p50 is None:
        return row.status.split(": ", 1)[1] if row.status.startswith("wrong") else row.status.split(":")[0]
    return microseconds(row.p50)


def _first_call(card: Card) -> str:
    rows = [
        [names.label(r["provider"]), r["shape"], *(_number(r[k]) for k in _MS), r["status"]] for r in card.first_call
    ]
    return markdown(["", "logits", "import", "first call", "second call", "status"], rows)


_MS = ("import_ms", "first_ms", "second_ms")


def _number(text: str) -> str:
    return microseconds(float(text)) if text else "-"


def _all_rows(rows: list[Row]) -> str:
    head = [
        "shape", "direction", "provider", "kernel", "method", "p20", "p50", "p80", "n", "GB/s",
        "share", "peak MiB", "error", "status",
    ]  # fmt: skip
    return markdown(
        head,
        [
            [
                r.shape, r.direction, r.provider, r.symbol, r.method,
                microseconds(r.p20), microseconds(r.p50), microseconds(r.p80),
                str(r.samples or "-"),
                f"{r.gbytes_per_s:.0f}" if r.gbytes_per_s else "-", percent(r.share),
                f"{r.peak_bytes / 2**20:.1f}" if r.peak_bytes is not None else "-",
                f"{r.error:.1e}" if r.error is not None else "-", r.status.replace("|", "/"),
            ]
            for r in rows
        ],
    )  # fmt: skip
