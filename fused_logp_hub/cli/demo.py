"""Trains a tiny policy by GRPO on a checkable task; compares every update with float64 PyTorch."""

from __future__ import annotations

import argparse
import time

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fused_logp_hub import _selection
from fused_logp_hub._errors import ArgumentError
from fused_logp_hub.cli import grpo, task
from fused_logp_hub.cli.console import make_console, make_table, print_error

HELP = "train a tiny policy by GRPO, with a float64 check of every update"
ERROR_BOUND = 1e-5
EXAMPLES = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu or cuda[:index]; the GPU by default where PyTorch has one")
    parser.add_argument("--steps", type=int, default=50, help="rollouts; %(default)s by default")
    parser.add_argument("--seed", type=int, default=0, help="%(default)s by default")
    parser.add_argument("--kernel", choices=_selection.KERNEL_NAMES, default=_selection.AUTO)


def run(options: argparse.Namespace) -> int:
    """Exit code 0 if the reward rose and every error kept the bound, else 1."""
    device = _device(options.device)
    kernel = _selection.resolve(options.kernel)
    if device.type == "cpu" and kernel not in (_selection.AUTO, _selection.REFERENCE):
        raise ArgumentError(f"kernel: expected auto or reference on the CPU, got {kernel}. Pass --device cuda.")
    if options.steps < 1:
        raise ArgumentError(f"--steps: expected at least 1, got {options.steps}. Pass a positive number.")
    threads = torch.get_num_threads()
    # Matrices this small gain nothing from a second thread, and on a busy machine lose much to it.
    torch.set_num_threads(1)
    try:
        return _train(grpo.Trainer(device, options.seed, kernel), options.steps, make_console())
    finally:
        torch.set_num_threads(threads)


def _train(trainer: grpo.Trainer, steps: int, console: Console) -> int:
    console.print(
        f"GRPO on {_device_name(trainer.device)}: "
        f"sort {task.MIN_DIGITS} to {task.MAX_DIGITS} digits, "
        f"{grpo.PROMPTS} prompts x {grpo.GROUP} samples, {grpo.INNER_STEPS} updates a step",
        soft_wrap=True,
    )
    started = time.perf_counter()
    shown = trainer.held_out[:EXAMPLES]
    before, completions_before = trainer.evaluate(), trainer.complete(shown, greedy=True)
    done = _run_steps(trainer, steps, console)
    after, completions_after = trainer.evaluate(), trainer.complete(shown, greedy=True)
    seconds = time.perf_counter() - started
    logp_error, grad_error = grpo.largest([(s.logp_error, s.grad_error) for s in done])

    table = make_table("held-out prompt", "before", "after", "right")
    for texts in zip(shown, completions_before, completions_after, task.answers(shown), strict=True):
        table.add_row(*map(task.to_text, texts))
    console.print(table)
    assert trainer.explanations is not None  # there was a step
    for explanation in trainer.explanations:
        console.print(str(explanation), soft_wrap=True)
    updates = steps * grpo.INNER_STEPS
    console.print(
        f"\nreward on {grpo.HELD_OUT} held-out prompts: {before:.3f} before, {after:.3f} after\n"
        f"against float64, largest of {updates} updates: "
        f"|logp difference| {logp_error:.1e}, relative gradient difference {grad_error:.1e} "
        f"(bound {ERROR_BOUND:.0e})\n"
        f"{steps} steps in {seconds:.1f} s",
        soft_wrap=True,
    )
    return _verdict(before, after, logp_error, grad_error)


def _run_steps(trainer: grpo.Trainer, steps: int, console: Console) -> list[grpo.Step]:
    done: list[grpo.Step] = []
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        bar = progress.add_task("reward  -  ", total=steps)
        for number in range(1, steps + 1):
            done.append(trainer.step())
            progress.update(bar, advance=1, description=f"reward {done[-1].reward:.3f}")
            if not console.is_terminal and (number % 10 == 0 or number == steps):
                console.print(f"step {number} of {steps}: reward {done[-1].reward:.3f}")
    return done


def _verdict(before: float, after: float, logp_error: float, grad_error: float) -> int:
    failures = []
    if not after > before:
        failures.append(f"reward: expected a rise from {before:.3f}, got {after:.3f}. Pass more --steps.")
    if not (logp_error <= ERROR_BOUND and grad_error <= ERROR_BOUND):  # NaN fails too
        failures.append(
            f"error: expected at most {ERROR_BOUND:.0e} from float64, got {logp_error:.1e} in logp "
            f"and {grad_error:.1e} in the gradient. Run `fused-logp-hub doctor`."
        )
    for failure in failures:
        print_error(failure)
    return 1 if failures else 0


def _device(name: str | None) -> torch.device:
    available = torch.cuda.is_available()
    if name is None:
        return torch.device("cuda" if available else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ArgumentError(f"--device: expected cpu or cuda[:index], got {name!r}. Correct the name.") from None
    if device.type not in ("cpu", "cuda"):
        raise ArgumentError(f"--device: expected cpu or cuda[:index], got {name!r}. Pass one of them.")
    count = torch.cuda.device_count() if available else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ArgumentError(
            f"--device: expected one of the {count} GPUs that PyTorch sees, got {name!r}. Run `fused-logp-hub doctor`."
        )
    return device


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "the CPU"
    return f"{device} ({torch.cuda.get_device_name(device)})"
