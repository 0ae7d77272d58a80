"""Where one forward kernel overtakes another: the manifest's rows over N, V, dtype and alignment.

    python benchmarks/sweep.py                        under 3 minutes on an H200; writes sweep.csv
    python benchmarks/sweep.py --rows 32 64 128 --vocab 128256

Each row is forced, whatever the selector would choose, checked against float64 and timed by graph
replay with a cold L2. Calls are usual ones, which some kernels have machine code of
their own for. The thresholds in build_tools/kernels.toml (meant_for, auto) come from here.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    import benchmarks  # noqa: F401  from here, whatever else has that name

    sys.path.append(sys.path.pop(0))  # an installed fused_logp_hub before the checkout's

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import fused_logp_hub  # noqa: E402
from benchmarks import environment, results, timing  # noqa: E402
from benchmarks.case import buffer_count  # noqa: E402
from benchmarks.shapes import ITEM_SIZE  # noqa: E402
from fused_logp_hub import _driver, _launch, _manifest, _recall  # noqa: E402

OP = "logp_forward"
# More than fit on the card at once, by a little and by half, as well as powers of two.
ROWS = (
    1, 4, 8, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 768, 1024, 1200, 1536, 2048, 3072, 4096,
    8192, 16384,
)  # fmt: skip
# Whole tiles of 4096 columns and not, and shards of 128256 and 151936 by tensor parallelism.
VOCAB = (1024, 2048, 4096, 6144, 8016, 8192, 12288, 16032, 16384, 18992, 32000, 50257, 128256, 151936, 262144)
FEW_VOCAB = (8192, 32000, 128256)
# dtype, alignment of the first row in bytes, vocabularies
GRID = (("bfloat16", 16, VOCAB), ("bfloat16", 2, FEW_VOCAB), ("float32", 16, FEW_VOCAB))
MAX_BYTES = 2_200_000_000
MAX_CLUSTER_BLOCKS = 8192  # where a cluster has long lost
MAX_SECONDS = 170.0
ROUNDS = 12
CHECKED_ROWS = 64
FILE = "sweep.csv"


@dataclass(frozen=True)
class Forced:
    """One kernel row in the cubin that fits the card."""

    symbol: str
    kernel: str
    arch: str
    alignment: int
    function: _driver.Function


class Pool:
    """Random logits in one allocation, from which every shape's buffers are cut."""

    def __init__(self, dtype: str, device: torch.device) -> None:
        self.dtype = getattr(torch, dtype)
        self.item = ITEM_SIZE[dtype]
        self._data = torch.empty(2 * MAX_BYTES // self.item + 4096, dtype=self.dtype, device=device)
        self._data.normal_(0.0, 2.0)

    def buffers(self, rows: int, vocab: int, alignment: int, cache_bytes: int) -> list[Tensor]:
        """Matrices [rows, vocab]; the first rows are aligned so, but for 16 to no more than so."""
        size = rows * vocab
        stride = -(-size // 128) * 128 + 128
        first = 0 if alignment == 16 else alignment // self.item
        count = min(buffer_count(size * self.item, cache_bytes), (self._data.numel() - first) // stride)
        starts = [first + k * stride for k in range(count)]
        return [self._data[s : s + size].view(rows, vocab) for s in starts]


def kernels(dtype: str, device: torch.device) -> list[Forced]:
    """Every forward of that dtype that runs on the card."""
    manifest, on = _manifest.shipped(), _driver.device(device.index)
    found = []
    for row in manifest.kernels:
        if row.op != OP or row.dtype != dtype:
            continue
        for cubin in manifest.cubins_of(row.module):
            if cubin.mismatch(on.capability) is None and on.driver_cuda >= cubin.min_cuda:
                function = on.function(manifest, row, cubin)
                found.append(Forced(row.symbol, row.name, cubin.arch, row.alignment, function))
    return found


@contextlib.contextmanager
def forcing(function: _driver.Function) -> Iterator[None]:
    """Launches inside run that kernel, whatever the selector would choose."""
    with patch.multiple(_launch, plan=lambda *_: function, launches={}), patch.object(_recall, "passed", {}):
        yield


def measure_point(
    pool: Pool,
    candidates: list[Forced],
    shape: tuple[int, int],
    alignment: int,
    flush: timing.Flush,
    cache_bytes: int,
) -> list[dict[str, object]]:
    """One line for each kernel on one shape."""
    rows, vocab = shape
    logits = pool.buffers(rows, vocab, alignment, cache_bytes)
    device = logits[0].device
    ids = torch.randint(vocab, (rows,), device=device)
    out = torch.empty(rows, device=device)
    actual = _launch.row_alignment(logits[0])
    calls, status = {}, {}
    for forced in candidates:
        blocks = forced.function.kernel.blocks_per_row or 1
        if actual % forced.alignment or (blocks > 1 and blocks * rows > MAX_CLUSTER_BLOCKS):
            continue

        def call(i: int, function: _driver.Function = forced.function) -> None:
            with forcing(function):
                fused_logp_hub.fused_logp_out(logits[i], ids, out=out)

        out.fill_(float("nan"))
        call(0)
        status[forced.symbol] = _check(logits[0], ids, out)
        if status[forced.symbol] == "ok":
            calls[forced.symbol] = call
    graphs = {symbol: timing.capture(call, len(logits)) for symbol, call in calls.items()}
    samples = timing.sample_graphs(graphs, flush, ROUNDS) if graphs else {}
    lines = []
    for forced in (c for c in candidates if c.symbol in status):
        line: dict[str, object] = {
            "rows": rows, "vocab": vocab, "alignment": actual, "kernel": forced.kernel,
            "symbol": forced.symbol, "arch": forced.arch, "p20": None, "p50": None, "p80": None,
            "gbytes_per_s": None, "status": status[forced.symbol],
        }  # fmt: skip
        if forced.symbol in samples:
            p20, p50, p80 = timing.percentiles(samples[forced.symbol])
            rate = results.gbytes_per_s(rows * vocab * pool.item, p50)
            line |= {"p20": p20, "p50": p50, "p80": p80, "gbytes_per_s": rate}
        lines.append(line)
    return lines


def _check(logits: Tensor, ids: Tensor, logp: Tensor) -> str:
    """Compares rows spread over the batch with float64."""
    some = torch.arange(0, len(ids), max(1, len(ids) // CHECKED_ROWS), device=ids.device)
    x = logits[some].double()
    wanted = x.gather(-1, ids[some, None])[:, 0] - x.logsumexp(-1)
    error = float((logp[some].double() - wanted).abs().max())
    written = bool(torch.isfinite(logp).all())
    return "ok" if written and error <= 1e-4 else f"wrong: error {error:.0e}"


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    if not torch.cuda.is_available():
        print("GPU: expected one that PyTorch sees, got none. Run this on the card.", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    card = torch.cuda.get_device_name(device)
    out = options.out or ROOT / "benchmarks" / "results" / environment.slug(card)
    out.mkdir(parents=True, exist_ok=True)
    path = out / FILE
    path.unlink(missing_ok=True)
    described = environment.describe(device, [])
    stamp = {"date": described["date"], "card": card, "driver": described["driver"]}
    with torch.cuda.stream(torch.cuda.Stream(device)):
        _sweep(options, device, path, stamp)
    return 0


def _sweep(options: argparse.Namespace, device: torch.device, path: Path, stamp: dict[str, object]) -> None:
    start = time.monotonic()
    cache = environment.cache_bytes(device)
    flush = timing.Flush(device, cache)
    for dtype, alignment, vocabularies in GRID:
        pool, candidates = Pool(dtype, device), kernels(dtype, device)
        for vocab in (v for v in vocabularies if v in options.vocab):
            lines: list[dict[str, object]] = []
            for rows in options.rows:
                if rows * vocab * pool.item > MAX_BYTES:
                    continue
                if time.monotonic() - start > options.max_seconds:
                    print(f"no time left from {dtype}, V = {vocab}, N = {rows} on", flush=True)
                    return
                point = measure_point(pool, candidates, (rows, vocab), alignment, flush, cache)
                lines += [{**stamp, "dtype": dtype, **line} for line in point]
            results.append_table(path, lines)
            print(f"[{time.monotonic() - start:4.0f} s] {summary(lines)}", flush=True)
        del pool
        torch.cuda.empty_cache()


def summary(lines: list[dict[str, object]]) -> str:
    """The kernels for each number of rows, the fastest first."""
    if not lines:
        return "nothing to measure"
    first = lines[0]
    text = [f"{first['dtype']}, V = {first['vocab']}, {first['alignment']}-byte rows"]
    for rows in dict.fromkeys(line["rows"] for line in lines):
        times = sorted(
            (float(line["p50"]), _part(line))  # type: ignore[arg-type]
            for line in lines
            if line["rows"] == rows and line["p50"] is not None
        )
        wrong = [_part(line) for line in lines if line["rows"] == rows and line["status"] != "ok"]
        shown = ", ".join(f"{symbol} {time:.1f}" for time, symbol in times)
        text.append(f"  N {rows:5}: {shown}" + (f"; WRONG: {', '.join(wrong)}" if wrong else ""))
    return "\n".join(text)


def _part(line: dict[str, object]) -> str:
    """Of a symbol what tells it from the others of its dtype."""
    return str(line["symbol"]).removeprefix(f"{OP}_").rsplit("_", 1)[0]


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--vocab", type=int, nargs="+", default=list(VOCAB))
    parser.add_argument("--max-seconds", type=float, default=MAX_SECONDS)
    parser.add_argument("--out", type=Path, help="folder to write to; results/<card> by default")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
