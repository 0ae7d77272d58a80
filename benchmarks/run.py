"""Runs the benchmark: checks and times every provider on every shape, and writes what it found.

    python benchmarks/run.py                                  everything, under 8 minutes on an H200
    python benchmarks/run.py --shapes '*128256-bf16' --providers eager ours
    python benchmarks/run.py --only host first_call
    python benchmarks/run.py --device cpu --out DIR           exercises the code without a GPU

Writes results.csv, host.csv, first_call.csv and env.json; a row is on disk as soon as its shape is
done. report.py renders them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    import benchmarks  # noqa: F401  from here, whatever else has that name

    sys.path.append(sys.path.pop(0))  # an installed fused_logp_hub before the checkout's

import torch  # noqa: E402

from benchmarks import (  # noqa: E402
    environment,
    first_call,
    host_time,
    providers,
    results,
    shapes,
    timing,
)
from benchmarks.measure import Context, measure, release  # noqa: E402

PARTS = ("host", "first_call", "shapes")
RESULTS_FOLDER = ROOT / "benchmarks" / "results"
MAX_SECONDS = 450.0
FILES = (results.RESULTS, results.HOST, results.FIRST_CALL, "env.json")


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parse(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(
            "--device: expected a CUDA device, got none. Use --device cpu for a dry run.",
            file=sys.stderr,
        )
        return 2
    described = environment.describe(device, environment.without_out(arguments))
    out = options.out or RESULTS_FOLDER / environment.slug(described["card"])
    if device.type != "cuda" and RESULTS_FOLDER in [out.resolve(), *out.resolve().parents]:
        print(
            f"--out: expected a folder outside {RESULTS_FOLDER.name}/ for a dry run. Pass one.",
            file=sys.stderr,
        )
        return 2
    try:
        chosen = providers.select(options.providers or [])
        table = shapes.SHAPES if device.type == "cuda" else shapes.DRY_SHAPES
        wanted = shapes.select(table, options.shapes)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if device.type != "cuda":
        chosen = [p for p in chosen if p.name in providers.DRY]
    out.mkdir(parents=True, exist_ok=True)
    if not options.append:
        for name in FILES:
            (out / name).unlink(missing_ok=True)
    _write(out, described)  # a run that is cut short is described as well
    run = Run(device, out, chosen, options.max_seconds)
    if device.type == "cuda":
        # Not the default stream: graphs are captured on it, backward nodes run where forward ran.
        with torch.cuda.stream(torch.cuda.Stream(device)):
            missing = run.parts(options.only, wanted)
    else:
        missing = run.parts(options.only, wanted)
    described["seconds"] = round(run.elapsed())
    described["not_measured"] = missing
    _write(out, described)
    print(f"{run.elapsed():.0f} s, written to {out.name}/")
    return 0


class Run:
    """One run of the benchmark: its clock, and where its rows go."""

    def __init__(self, device: torch.device, out: Path, chosen: list[providers.Provider], max_seconds: float) -> None:
        self.device, self.out, self.chosen, self.max_seconds = device, out, chosen, max_seconds
        self._start = time.monotonic()

    def elapsed(self) -> float:
        return time.monotonic() - self._start

    def parts(self, only: list[str], wanted: list[shapes.Shape]) -> list[str]:
        """Runs the parts in order; the names of what there was no time for."""
        late: list[str] = []
        names = [p.name for p in self.chosen]
        if "host" in only:
            self.log("host time")
            results.append_table(self.out / results.HOST, host_time.rows(self.device, names))
        if "first_call" in only and self.device.type == "cuda":
            for name in (n for n in first_call.PROVIDERS if n in names):
                row = first_call.measure(name)
                self.log(f"first call, {name}: {row['first_ms']} ms, {row['status']}")
                results.append_table(self.out / results.FIRST_CALL, [row])
        if "shapes" not in only:
            return late
        cache = environment.cache_bytes(self.device)
        flush = timing.Flush(self.device, cache) if self.device.type == "cuda" else None
        context = Context(self.device, cache, flush, self.log)
        for shape in wanted:
            if self.elapsed() > self.max_seconds:
                late.append(shape.name)
                continue
            rows = measure(shape, self.chosen, context)
            results.append(self.out / results.RESULTS, rows)
            release()
            self.log(_summary(shape, rows))
        if late:
            self.log(f"no time left for {', '.join(late)}")
        return late

    def log(self, text: str) -> None:
        print(f"[{self.elapsed():5.0f} s] {text}", flush=True)


def _write(out: Path, described: dict[str, object]) -> None:
    (out / "env.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def _summary(shape: shapes.Shape, rows: list[results.Row]) -> str:
    """One line a direction: medians of the preferred method."""
    found = results.Results(rows)
    lines = [shape.name]
    for direction in results.DIRECTIONS:
        times = [
            f"{name} {found.microseconds(shape.name, direction, name):.1f}"
            for name in found.providers(direction)
            if found.microseconds(shape.name, direction, name) is not None
        ]
        if times:
            lines.append(f"  {direction} us ({found.method(shape.name, direction)}): {', '.join(times)}")
    return "\n".join(lines)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run")
    parser.add_argument("--providers", nargs="+", help="providers to time, by name")
    parser.add_argument("--shapes", nargs="+", default=[], help="shapes, by name; * for any text")
    parser.add_argument("--max-seconds", type=float, default=MAX_SECONDS, help="start no shape after that")
    parser.add_argument("--out", type=Path, help="folder to write to; results/<card> by default")
    parser.add_argument("--append", action="store_true", help="keep the rows that are there")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu for a dry run")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
