"""The driver, PyTorch's CUDA, and each GPU: what would run there, and whether it does."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import torch

from fused_logp_hub import _driver
from fused_logp_hub._manifest import Manifest
from fused_logp_hub.cli import probes
from fused_logp_hub.cli.probes import Case
from fused_logp_hub.cli.problems import Problems


@dataclass
class GpuFacts:
    """One GPU."""

    index: int
    name: str
    capability: str
    cases: list[Case] = field(default_factory=list)
    usable: bool = False
    """Whether every case ran there and kept the contract."""

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name}, capability {self.capability})"


def examine_driver(problems: Problems) -> tuple[str | None, int]:
    """The newest CUDA that the driver runs, None without one, and its number of GPUs."""
    version, count = None, 0
    with problems.step("the CUDA driver"):
        cuda = _driver.driver_version()
        version = f"{cuda // 1000}.{cuda % 1000 // 10}"
        count = _driver.device_count()
        if count == 0:
            problems.add("GPU: expected at least one, got none. Check CUDA_VISIBLE_DEVICES.")
    return version, count


def examine_torch(driver_cuda: str | None, count: int, problems: Problems) -> bool:
    """Whether PyTorch runs CUDA here."""
    if torch.version.cuda is None:
        problems.add(f"torch: expected a build with CUDA, got {torch.__version__}. Install one from pytorch.org.")
        return False
    available = False
    with problems.step("torch.cuda"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of what the driver's own error says
        available = torch.cuda.is_available()
        if count and not available:
            problems.add(
                f"torch.cuda: expected the driver's {count} GPUs, got none that PyTorch {torch.__version__}, built for "
                f"CUDA {torch.version.cuda}, can use. Install a build for CUDA {driver_cuda} or older from pytorch.org."
            )
    return available


def examine_gpus(
    count: int, manifest: Manifest | None, requested: str, torch_runs_cuda: bool, problems: Problems
) -> list[GpuFacts]:
    """Each GPU; its cases are selected if there is a manifest, and run if PyTorch can."""
    gpus = []
    for index in range(count):
        with problems.step(f"GPU {index}"):
            device = _driver.device(index)
            major, minor = device.capability
            gpu = GpuFacts(index, device.name, f"{major}.{minor}")
            gpus.append(gpu)
            if manifest is None:
                continue
            gpu.cases = probes.select_cases(manifest, requested, device.capability, device.driver_cuda)
            _report_unmatched(gpu, problems)
            if torch_runs_cuda:
                _run(gpu, problems)
    return gpus


def _report_unmatched(gpu: GpuFacts, problems: Problems) -> None:
    unmatched = [case for case in gpu.cases if not case.selected]
    if unmatched:
        first = unmatched[0]
        why = first.forward.why if first.forward.kernel is None else first.backward.why
        problems.add(
            f"{gpu}: expected a kernel for every case, got none for {len(unmatched)} of "
            f"{len(gpu.cases)}: {why}. Use a driver or a wheel that fits, or kernel='reference'."
        )


def _run(gpu: GpuFacts, problems: Problems) -> None:
    # One step for all cases: after one that fails, CUDA often fails them all.
    with problems.step(str(gpu)):
        for case in gpu.cases:
            if case.selected:
                probes.run_case(case, torch.device("cuda", gpu.index))
    wrong = [case for case in gpu.cases if case.ran and not case.within_bounds]
    if wrong:
        first = wrong[0]
        problems.add(
            f"{gpu}: expected results within the contract, got {len(wrong)} of {len(gpu.cases)} "
            f"cases outside it, the first ({first}) with errors of {first.logp_error:.0e} in logp "
            f"and {first.grad_error:.0e} in the gradient. Report this as a bug."
        )
    gpu.usable = all(case.within_bounds for case in gpu.cases)
