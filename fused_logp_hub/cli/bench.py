"""Times fused_logp against eager PyTorch on a GPU, each result checked against float64 first.

A short version of the repository's benchmark: medians of CUDA events with a cold L2, everything of
one shape in turns. The limit is what Tensor.copy_ of the same logits reaches, counting bytes read
and written.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from fused_logp_hub import _selection
from fused_logp_hub._api import LogpResult, fused_logp, fused_logp_backward
from fused_logp_hub._errors import ArgumentError
from fused_logp_hub._inspect import explain_selection
from fused_logp_hub.cli.console import make_console, make_table, print_error
from fused_logp_hub.cli.timing import Call, median_times

HELP = "time fused_logp against eager PyTorch on this GPU"
SHAPES = ((32, 128256), (1024, 128256), (4096, 32000), (4096, 128256))
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# |logp - float64| in nats; relative norm of the gradient's difference, targets and others apart
LOGP_BOUND = 1e-4
GRAD_BOUND = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 2e-5}
CHECKED_ROWS = 32


@dataclass(frozen=True)
class Measured:
    """One direction on one shape; times are medians in microseconds."""

    direction: str
    symbol: str
    eager: float
    ours: float
    gbytes_per_s: float
    share: float
    error: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda", help="cuda or cuda:index; %(default)s by default")
    parser.add_argument(
        "--shape", action="append", metavar="ROWSxVOCAB",
        help="may be repeated; " + " ".join(f"{n}x{v}" for n, v in SHAPES) + " by default",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--kernel", choices=_selection.KERNEL_NAMES, default=_selection.AUTO)
    parser.add_argument("--samples", type=int, default=30, help="%(default)s by default")


def run(options: argparse.Namespace) -> int:
    """Exit code 0 if every shape was right and timed, else 1."""
    device = _device(options.device)
    shapes = [_shape(text) for text in options.shape] if options.shape else list(SHAPES)
    if options.samples < 1:
        raise ArgumentError(f"--samples: expected at least 1, got {options.samples}. Pass more.")
    console = make_console()
    console.print(f"{torch.cuda.get_device_name(device)}, {options.dtype}, torch {torch.__version__}")
    table = make_table(
        "logits",
        "direction",
        "kernel",
        "eager us",
        "ours us",
        "speedup",
        "GB/s",
        "of copy",
        "error",
    )
    with torch.cuda.device(device):
        failures = _run_shapes(options, device, shapes, table, console)
    console.print(table)
    console.print(
        "us: median a call. of copy: bytes a second as a share of Tensor.copy_'s on the same "
        "logits. error: largest from float64, in nats (forward), relative (backward).",
        soft_wrap=True,
    )
    for failure in failures:
        print_error(failure)
    return 1 if failures else 0


def _run_shapes(
    options: argparse.Namespace,
    device: torch.device,
    shapes: list[tuple[int, int]],
    table: Table,
    console: Console,
) -> list[str]:
    failures = []
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        bar = progress.add_task("", total=len(shapes))
        for rows, vocab in shapes:
            name = f"{rows} x {vocab}"
            progress.update(bar, description=name)
            try:
                for m in _measure(rows, vocab, DTYPES[options.dtype], device, options):
                    table.add_row(
                        name, m.direction, m.symbol, f"{m.eager:.1f}", f"{m.ours:.1f}",
                        f"{m.eager / m.ours:.1f}x", f"{m.gbytes_per_s:.0f}", f"{m.share:.0%}",
                        f"{m.error:.1e}",
                    )  # fmt: skip
            except torch.cuda.OutOfMemoryError:
                failures.append(f"{name}: expected memory for both, got too little. Pass a smaller --shape.")
            except ArithmeticError as error:
                failures.append(f"{name}: {error}")
            torch.cuda.empty_cache()
            progress.advance(bar)
    return failures


def _measure(
    rows: int, vocab: int, dtype: torch.dtype, device: torch.device, options: argparse.Namespace
) -> list[Measured]:
    """Forward and backward of both; ArithmeticError if a result is wrong, and nothing is timed."""
    buffers = [torch.randn(rows, vocab, device=device, dtype=dtype).mul_(2.0)]
    buffers.append(buffers[0].clone())  # in turns, so that a call finds nothing of its own in L2
    ids = torch.randint(vocab, (rows,), device=device)
    upstream = torch.randn(rows, device=device)
    kernel = options.kernel
    saved = fused_logp(buffers[0], ids, kernel=kernel, return_lse=True)
    assert isinstance(saved, LogpResult)
    assert saved.row_max is not None
    assert saved.log_sum is not None
    row_max, log_sum = saved.row_max, saved.log_sum
    backward_kernel = kernel if kernel == _selection.REFERENCE else _selection.AUTO

    def ours_backward(i: int) -> Tensor:
        return fused_logp_backward(upstream, buffers[i], ids, row_max, log_sum, kernel=backward_kernel)

    errors = _errors(buffers[0], ids, upstream, saved.logp, ours_backward(0))
    graphs = [_differentiable(x, ids) for x in buffers]
    copy = torch.empty_like(buffers[0])
    calls: dict[str, Call] = {
        "copy": lambda i: copy.copy_(buffers[i]),
        "eager forward": lambda i: _eager(buffers[i], ids),
        "ours forward": lambda i: fused_logp(buffers[i], ids, kernel=kernel),
        "eager backward": lambda i: torch.autograd.grad(graphs[i][1], graphs[i][0], upstream, retain_graph=True),
        "ours backward": ours_backward,
    }
    times = median_times(calls, options.samples, device)
    size = buffers[0].numel() * buffers[0].element_size()
    copy_rate = 2 * size / times["copy"]
    found = []
    for direction, passes, error in (("forward", 1, errors[0]), ("backward", 2, errors[1])):
        named = kernel if direction == "forward" else backward_kernel
        explained = explain_selection(buffers[0], kernel=named, op=f"logp_{direction}")
        ours = times[f"ours {direction}"]
        rate = passes * size / ours
        found.append(
            Measured(
                direction, explained.symbol or _selection.REFERENCE, times[f"eager {direction}"],
                ours, rate / 1e3, rate / copy_rate, error,
            )
        )  # fmt: skip
    return found


def _eager(logits: Tensor, ids: Tensor) -> Tensor:
    return torch.log_softmax(logits.float(), -1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def _differentiable(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().requires_grad_()
    return leaf, _eager(leaf, ids)


def _errors(logits: Tensor, ids: Tensor, upstream: Tensor, logp: Tensor, grad: Tensor) -> tuple[float, float]:
    """Errors from float64 on rows spread over the batch; ArithmeticError beyond their bounds."""
    rows = torch.arange(0, len(ids), max(1, len(ids) // CHECKED_ROWS), device=ids.device)
    exact = logits[rows].double().requires_grad_()
    index = ids[rows, None]
    wanted = torch.log_softmax(exact, -1).gather(-1, index)[:, 0]
    (wanted_grad,) = torch.autograd.grad(wanted, exact, upstream[rows].double())
    logp_error = (logp[rows].double() - wanted).abs().max().item()
    difference = grad[rows].double() - wanted_grad
    parts = [_ratio(difference.gather(-1, index), wanted_grad.gather(-1, index))]
    if logits.shape[-1] > 1:
        parts.append(_ratio(difference.scatter(-1, index, 0.0), wanted_grad.scatter(-1, index, 0.0)))
    grad_error = max(parts)
    bound = GRAD_BOUND[logits.dtype]
    if not (logp_error <= LOGP_BOUND and all(part <= bound for part in parts)):  # NaN fails too
        raise ArithmeticError(
            f"error: expected at most {LOGP_BOUND:.0e} in logp and {bound:.0e} in the gradient, "
            f"got {logp_error:.1e} and {grad_error:.1e}. Run `fused-logp-hub doctor`."
        )
    return logp_error, grad_error


def _ratio(difference: Tensor, reference: Tensor) -> float:
    return float(difference.norm() / reference.norm().clamp(min=1e-30))


def _device(name: str) -> torch.device:
    if not torch.cuda.is_available():
        raise ArgumentError("--device: expected a GPU that PyTorch sees, got none. Run `fused-logp-hub doctor`.")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("cpu")
    if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
        raise ArgumentError(f"--device: expected cuda or cuda:index, got {name!r}. Correct it.")
    return torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())


def _shape(text: str) -> tuple[int, int]:
    rows, _, vocab = text.partition("x")
    if not (rows.isdecimal() and vocab.isdecimal() and int(rows) > 0 and int(vocab) > 0):
        raise ArgumentError(f"--shape: expected ROWSxVOCAB such as 4096x32000, got {text!r}. Correct it.")
    return int(rows), int(vocab)
