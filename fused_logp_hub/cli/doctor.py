"""Says what is installed, what this machine has, which kernels run and why, and what is wrong."""

from __future__ import annotations

import argparse
import json

from rich.console import Console

from fused_logp_hub.cli.console import make_console, make_table
from fused_logp_hub.cli.diagnosis import Diagnosis, diagnose
from fused_logp_hub.cli.gpus import GpuFacts
from fused_logp_hub.cli.probes import Case
from fused_logp_hub.cli.selftest import Check

HELP = "check the installation, the driver and the GPUs; exit code 0 if fused kernels run here"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the same facts as JSON")
    parser.add_argument(
        "--selftest", action="store_true",
        help="also run every shipped kernel that fits, on every GPU, and report error and speed (without a GPU: "
        "the reference); exit code 0 only if there is a GPU and all are right on all of them",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Exit code 0 if the fused kernels run on this machine, with --selftest on each of its GPUs; else 1."""
    found = diagnose(options.selftest)
    if options.json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        _show(found, make_console())
    return 0 if found.usable else 1


def _show(found: Diagnosis, console: Console) -> None:
    facts = {**found.versions, "kernels_by": found.build}
    if found.forced_kernel:
        facts["forced_kernel"] = found.forced_kernel
    for name, value in facts.items():
        console.print(f"{name.replace('_', ' '):15}{value or 'not found'}", soft_wrap=True)
    _show_cubins(found, console)
    shown: dict[str, int] = {}
    for gpu in found.gpus:
        _show_gpu(gpu, shown, console)
    if found.selftest is not None:
        _show_selftest(found.selftest, console)
    if found.problems:
        console.print()
    for problem in found.problems:
        console.print(f"problem: {problem}", style="red", soft_wrap=True)
    console.print()
    if found.usable:
        usable = ", ".join(str(gpu.index) for gpu in found.gpus if gpu.usable)
        console.print(f"usable: fused kernels run on GPU {usable}", style="green")
    elif found.reference_works:
        console.print(
            "not usable: no fused kernel runs here; the reference on CPU tensors works",
            style="yellow",
        )
    else:
        console.print("not usable: neither a fused kernel nor the reference runs here", style="red")


def _show_cubins(found: Diagnosis, console: Console) -> None:
    if not found.cubins:
        return
    table = make_table("cubin", "arch", "bytes", "driver", "sha256", "checksum")
    for cubin in found.cubins:
        checksum = "verified" if cubin.verified else "FAILED"
        needs = f">= {cubin.min_driver}"
        sha256 = cubin.sha256[:12]
        table.add_row(cubin.file, cubin.arch, str(cubin.bytes), needs, sha256, checksum)
    console.print(table)


def _show_gpu(gpu: GpuFacts, shown: dict[str, int], console: Console) -> None:
    """One table for each capability; a further GPU whose table would be the same is one line."""
    console.print(str(gpu), style="bold", soft_wrap=True)
    same = shown.setdefault(gpu.capability, gpu.index)
    if same != gpu.index:
        console.print(f"  selection as on GPU {same}, result: {_result(gpu.cases)}", soft_wrap=True)
        return
    columns = ("rows are", "rows", "row bytes", "dtypes", "forward", "backward", "result", "why this forward")
    table = make_table(*columns)
    all_dtypes = len({case.dtype for case in gpu.cases})
    for cases in _alike(gpu.cases):
        first = cases[0]
        aligned = "aligned" if first.alignment == 16 else "odd stride"
        dtypes = "all" if len(cases) == all_dtypes else " ".join(case.dtype for case in cases)
        kernels = (str(first.forward), str(first.backward))
        why = first.forward.why
        table.add_row(aligned, first.rows_label, first.row_bytes_label, dtypes, *kernels, _result(cases), why)
    if any(case.selected for case in gpu.cases):
        console.print(table)


def _show_selftest(checks: list[Check], console: Console) -> None:
    table = make_table("device", "op", "kernel", "dtype", "arch", "error", "bound", "us", "GB/s", "result")
    for check in checks:
        numbers = (f"{check.error:.1e}", f"{check.bound:.0e}", f"{check.microseconds:.1f}", f"{check.gbytes_per_s:.1f}")
        result = "right" if check.right else "FAILED"
        table.add_row(check.device, check.op, check.kernel, check.dtype, check.arch or "", *numbers, result)
    console.print("selftest", style="bold")
    console.print(table)


def _alike(cases: list[Case]) -> list[list[Case]]:
    """The cases that differ in their dtype alone, together."""
    groups: dict[tuple[str, ...], list[Case]] = {}
    for case in cases:
        chosen = (str(case.forward), str(case.backward), case.forward.why)
        key = (str(case.alignment == 16), case.rows_label, case.row_bytes_label, *chosen)
        groups.setdefault(key, []).append(case)
    return list(groups.values())


def _result(cases: list[Case]) -> str:
    if not any(case.ran for case in cases):
        return "not run"
    return "right" if all(case.within_bounds for case in cases) else "FAILED"
