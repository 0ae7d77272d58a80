"""One shape, all providers: prepare, check, time together."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks import results, timing
from benchmarks.case import Case
from benchmarks.check import Reference, Verdict
from benchmarks.loading import Unavailable
from benchmarks.providers import Calls, Provider, recorded_symbols
from benchmarks.results import Row
from benchmarks.shapes import Shape

GRAPH_MAX_BYTES = 320 << 20  # above, a call is so long that launch gaps do not show
EVENT_SECONDS, GRAPH_SECONDS, WALL_SECONDS = 1.2, 1.0, 0.4


@dataclass
class Context:
    """What does not change between shapes."""

    device: torch.device
    cache_bytes: int
    flush: timing.Flush | None
    """None on the CPU, which is the dry mode."""
    log: Callable[[str], None]


@dataclass
class Candidate:
    """A provider's call that was found right and will be timed."""

    row: Row
    call: timing.Call
    byte_count: int


def measure(shape: Shape, providers: Sequence[Provider], context: Context) -> list[Row]:
    """Every provider that applies, in every direction the shape has."""
    case = Case(shape, context.device, context.cache_bytes)
    reference = Reference(case)
    prepared: list[tuple[Provider, Calls | str]] = []
    for provider in providers:
        if provider.jit and not shape.jit:
            continue
        prepared.append((provider, _attempt(lambda p=provider: p.prepare(case))))
    rows: list[Row] = []
    for direction in results.DIRECTIONS:
        if direction == "step" and not shape.step:
            continue
        candidates = _limits(case, direction, context)
        for provider, calls in prepared:
            found = _candidate(case, reference, provider, calls, direction, context)
            if isinstance(found, Row):
                rows.append(found)
                context.log(f"  {direction} {provider.name}: {found.status}")
            elif found is not None:
                candidates.append(found)
        rows += _timed(case, candidates, direction, context)
    return rows


def release() -> None:
    """Give the last shape's memory back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _attempt(function: Callable[[], object]) -> object:
    """The result, or as text why there is none."""
    try:
        return function()
    except Unavailable as error:
        return f"unavailable: {error}"
    except Exception as error:
        lines = str(error).strip().splitlines()
        return f"failed: {type(error).__name__}: {lines[0][:160] if lines else ''}"


def _blank(case: Case, direction: str, provider: str) -> Row:
    shape = case.shape
    return Row(shape.name, shape.dtype, shape.layout, direction, provider)


def _limits(case: Case, direction: str, context: Context) -> list[Candidate]:
    if context.flush is None or direction not in results.LIMITS:
        return []
    from benchmarks import limits

    row = _blank(case, direction, results.LIMITS[direction])
    if direction == "forward":
        read = limits.read_limit(case, context.flush)
        if not limits.reads_everything(case, read):
            raise RuntimeError("read limit: expected the xor of the data, got another. Fix limits.py.")
        assert read.forward is not None
        return [Candidate(row, read.forward, case.shape.bytes_moved("forward"))]
    copy = limits.copy_limit(case)
    assert copy.backward is not None
    return [Candidate(row, copy.backward, 2 * case.shape.rows * case.shape.row_bytes)]


def _candidate(
    case: Case,
    reference: Reference,
    provider: Provider,
    calls: object,
    direction: str,
    context: Context,
) -> Candidate | Row | None:
    """The call to time; a row that says why not; None for a direction the provider lacks."""
    row = _blank(case, direction, provider.name)
    if isinstance(calls, str):
        return replace(row, status=calls)
    call = getattr(calls, direction)
    if call is None:
        return None
    result = _attempt(lambda: _checked(reference, provider, calls, direction))
    if isinstance(result, str):
        return replace(row, status=result)
    verdict, symbols = result
    row = replace(row, error=verdict.error, symbol="+".join(dict.fromkeys(symbols)), status=verdict.status)
    if verdict.reason is not None:
        return row
    # Every buffer once: what is built on a buffer's first use is built before anything is timed.
    warm = _attempt(lambda: [call(i) is None for i in range(case.count)])
    if isinstance(warm, str):
        return replace(row, status=warm)
    if context.flush is not None:
        row = replace(row, peak_bytes=timing.peak_bytes(call))
    return Candidate(row, call, case.shape.bytes_moved(direction))


def _checked(reference: Reference, provider: Provider, calls: Calls, direction: str) -> tuple[Verdict, list[str]]:
    with recorded_symbols() as symbols:
        result = getattr(calls, direction)(0)
    if direction == "forward":
        return reference.check_forward(result * calls.sign, provider.rounded), symbols
    return reference.check_backward(result, provider.rounded), symbols


def _timed(case: Case, candidates: list[Candidate], direction: str, context: Context) -> list[Row]:
    """Rows for each method that suits the shape."""
    calls = {c.row.provider: c.call for c in candidates}
    if not calls:
        return []
    flush, count = context.flush, case.count
    if flush is None:
        return _rows(candidates, direction, "cpu-dry", timing.sample_cpu(calls, count, 3))

    def run(method: str, seconds: float, sample: Callable[[int], timing.Samples]) -> list[Row]:
        rounds = timing.rounds_within(sample, seconds)
        return _rows(candidates, direction, method, sample(rounds))

    rows = run("events", EVENT_SECONDS, lambda n: timing.sample_events(calls, count, flush, n))
    if case.shape.kept_rows * case.shape.row_bytes > GRAPH_MAX_BYTES or direction == "step":
        return rows
    graphs = {}
    for name, call in calls.items():
        graph = _attempt(lambda c=call: timing.capture(c, count))
        if isinstance(graph, str):
            context.log(f"  {direction} {name}: no graph: {graph}")
            torch.cuda.synchronize()
        else:
            graphs[name] = graph
    rows += run("graph", GRAPH_SECONDS, lambda n: timing.sample_graphs(graphs, flush, n))
    rows += run("calls", WALL_SECONDS, lambda n: timing.sample_wall(calls, count, n))
    return rows


def _rows(candidates: list[Candidate], direction: str, method: str, samples: timing.Samples) -> list[Row]:
    rows = []
    limit = results.LIMITS.get(direction)
    for c in candidates:
        if c.row.provider not in samples:
            continue
        p20, p50, p80 = timing.percentiles(samples[c.row.provider])
        rows.append(
            replace(
                c.row, method=method, p20=p20, p50=p50, p80=p80,
                samples=len(samples[c.row.provider]),
                gbytes_per_s=results.gbytes_per_s(c.byte_count, p50),
            )
        )  # fmt: skip
    rates = {r.provider: r.gbytes_per_s for r in rows}
    return [replace(r, share=results.share(r.gbytes_per_s or 0.0, rates.get(limit or ""))) for r in rows]
