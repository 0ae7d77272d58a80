"""What `doctor` finds out, as data: the package, the machine, and what runs on each GPU."""

from __future__ import annotations

import platform
import re
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from fused_logp_hub import _driver, _manifest, _selection
from fused_logp_hub._errors import CubinError
from fused_logp_hub._version import __version__
from fused_logp_hub.cli import gpus, probes, selftest
from fused_logp_hub.cli.gpus import GpuFacts
from fused_logp_hub.cli.problems import Problems
from fused_logp_hub.cli.selftest import Check

_KERNEL_MODULE = Path("/proc/driver/nvidia/version")


@dataclass
class CubinFacts:
    """One shipped file."""

    file: str
    arch: str
    bytes: int
    min_driver: str
    sha256: str
    verified: bool
    """Whether the file's bytes have the manifest's checksum."""


@dataclass
class Diagnosis:
    """All facts; a broken machine still gives those that can be had there."""

    usable: bool = False
    """The package is intact and some GPU ran every case that would be selected there; with a selftest, every GPU."""
    reference_works: bool = False
    versions: dict[str, str | None] = field(default_factory=dict)
    build: str | None = None
    forced_kernel: str | None = None
    cubins: list[CubinFacts] = field(default_factory=list)
    gpus: list[GpuFacts] = field(default_factory=list)
    selftest: list[Check] | None = None
    """None where it was not asked for."""
    problems: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def diagnose(with_selftest: bool = False) -> Diagnosis:
    """Look at everything; needs neither a GPU, a driver, nor cubins."""
    problems = Problems()
    found = Diagnosis(versions=_versions(), forced_kernel=_selection.forced_by_environment())
    with problems.step("reference on the CPU"):
        found.reference_works = probes.run_reference()
        if not found.reference_works:
            problems.add("reference: expected the contract's errors, got larger. Reinstall PyTorch.")
    requested = _requested(found.forced_kernel, problems)
    manifest, directory = None, _manifest.CUBIN_DIR
    with problems.step(str(directory)):
        if _is_unbuilt_source(directory):
            raise CubinError(
                f"{directory}: expected compiled kernels, got a source folder that was not built. "
                "Leave it and use the installed command, or run `python -m pip install -e .` in it."
            )
        manifest = _manifest.shipped()
    if manifest is not None:
        found.build = _build(manifest)
        found.cubins = _cubins(manifest, problems)
    intact = not problems
    installed = _installed("fused-logp-hub")
    if installed not in (None, __version__):
        problems.add(
            f"fused-logp-hub: expected version {installed}, which is installed, got {__version__} from "
            f"{Path(__file__).parent.parent}. Take the one that you do not want off the import path."
        )
    found.versions["driver_cuda"], count = gpus.examine_driver(problems)
    torch_runs_cuda = gpus.examine_torch(found.versions["driver_cuda"], count, problems)
    found.gpus = gpus.examine_gpus(count, manifest, requested, torch_runs_cuda, problems)
    found.usable = intact and any(gpu.usable for gpu in found.gpus)
    if with_selftest:
        found.selftest = _selftest(found.gpus, manifest, problems)
        right = all(check.right for check in found.selftest)
        found.usable = found.usable and right and [gpu.usable for gpu in found.gpus] == [True] * count
    found.problems = list(problems)
    return found


def _selftest(examined: list[GpuFacts], manifest: _manifest.Manifest | None, problems: Problems) -> list[Check]:
    checks = []
    with problems.step("selftest of the reference"):
        checks += selftest.check_reference()
    for gpu in examined:
        if manifest is None or not any(case.ran for case in gpu.cases):
            continue  # it has its problem already
        right = False
        with problems.step(f"selftest of {gpu}"), torch.cuda.device(gpu.index):
            on = _driver.device(gpu.index)
            of_gpu = selftest.check_gpu(manifest, torch.device("cuda", gpu.index), on.capability, on.driver_cuda)
            right = all(check.right for check in of_gpu)
            checks += of_gpu
        gpu.usable = gpu.usable and right
    for check in checks:
        if not check.right:
            problems.add(
                f"{check}: expected an error of at most {check.bound:.0e}, got {check.error:.1e}. Report this as a bug."
            )
    return checks


def _versions() -> dict[str, str | None]:
    release = None
    if _KERNEL_MODULE.exists():
        match = re.search(r"\b\d{3,}(\.\d+)+\b", _KERNEL_MODULE.read_text())
        release = match[0] if match else None
    return {
        "package": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "cuda_bindings": _installed("cuda-bindings"),
        "driver": release,
        "driver_cuda": None,
    }


def _installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None  # a bare folder on the import path


def _requested(forced: str | None, problems: Problems) -> str:
    """What a call asks for here; a name that runs no fused kernel is a problem."""
    if forced is None:
        return _selection.AUTO
    fused = [name for name in _selection.KERNEL_NAMES if name != _selection.REFERENCE]
    if forced in fused:
        return forced
    problems.add(
        f"{_selection.ENVIRONMENT_VARIABLE}: expected one of {', '.join(fused)}, got {forced!r}. "
        "Unset it to run fused kernels."
    )
    return _selection.AUTO


def _is_unbuilt_source(directory: object) -> bool:
    """Whether Python found a checkout, such as the current folder, before the installed package."""
    if not isinstance(directory, Path):  # inside a zip archive
        return False
    return not directory.exists() and (directory.parent.parent / "pyproject.toml").exists()


def _build(manifest: _manifest.Manifest) -> str:
    changed = " with local changes" if manifest.dirty else ""
    compiler = manifest.compiler
    return f"{compiler['name']} {compiler['version']}, commit {manifest.source_commit}{changed}"


def _cubins(manifest: _manifest.Manifest, problems: Problems) -> list[CubinFacts]:
    all_facts = []
    for cubin in manifest.cubins:
        facts = CubinFacts(cubin.file, cubin.arch, cubin.size, cubin.min_driver, cubin.sha256, verified=False)
        with problems.step(cubin.file):
            manifest.read_cubin(cubin)
            facts.verified = True
        all_facts.append(facts)
    return all_facts
