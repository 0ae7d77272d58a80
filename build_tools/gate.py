"""Decides whether what was compiled may ship. Each refusal is an error of its own class."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from build_tools.compilers import Compilation
from build_tools.elf import EM_CUDA, Cubin, parse_cubin
from build_tools.errors import (
    ArchitectureError,
    BuildPathError,
    CompilerWarningError,
    ElfAbiError,
    GateError,
    LocalMemoryError,
    MissingReportError,
    MissingSymbolError,
    SpillError,
    UnlaunchableError,
    UnlistedSymbolError,
    WheelContentsError,
    WheelSizeError,
)
from build_tools.kernel_table import Architecture, ElfRule, Kernel
from build_tools.resources import Resources

MAX_WHEEL_BYTES = 5_000_000
# The most a block may hold on every architecture since sm_50. A warp's registers are handed out in
# units of 256, so a thread's count is rounded up to 8.
REGISTERS_PER_BLOCK = 65536
_FORBIDDEN_SUFFIXES = (".ptx", ".fatbin", ".cu", ".cuh", ".so", ".o")


def check_cubin(
    compilation: Compilation,
    *,
    label: str,
    architecture: Architecture,
    rule: ElfRule,
    kernels: dict[str, Kernel],
    folders: Iterable[Path] = (),
) -> None:
    """Returns if the cubin may ship, else raises all reasons against it, as the class of the first.

    Args:
        compilation: the image and what the compiler said of it.
        label: what messages call it, its file name for example.
        architecture: the one it was compiled for.
        rule: what this compiler writes for it.
        kernels: those it must hold, and no others, by symbol.
        folders: folders of this machine that its bytes must not name.
    """
    try:
        cubin = parse_cubin(compilation.image)
    except GateError as error:
        raise type(error)(f"{label}: {error}") from error
    findings = [
        *_warning_findings(compilation),
        *_identity_findings(cubin, architecture, rule),
        *_symbol_findings(cubin, kernels),
        *_resource_findings(cubin, compilation.resources, kernels),
        *_path_findings(compilation.image, folders),
    ]
    raise_findings([type(finding)(f"{label}: {finding}") for finding in findings])


def raise_findings(findings: Sequence[Exception]) -> None:
    """Raises one error of the first finding's class that tells all of them; none: returns."""
    if findings:
        raise type(findings[0])("\n".join(str(finding) for finding in findings))


def _warning_findings(compilation: Compilation) -> Iterator[GateError]:
    if compilation.warnings:
        lines = "\n".join(compilation.warnings)
        yield CompilerWarningError(f"compiler: expected no warning, got\n{lines}\nCorrect the source.")


def _identity_findings(cubin: Cubin, architecture: Architecture, rule: ElfRule) -> Iterator[GateError]:
    if (cubin.osabi, cubin.abi) != (rule.osabi, rule.abi):
        yield ElfAbiError(
            f"ELF: expected OSABI {rule.osabi:#x} ABI {rule.abi}, got OSABI {cubin.osabi:#x} ABI "
            f"{cubin.abi}. Which drivers load it depends on this: build with a listed compiler, "
            "or correct elf_rules."
        )
        return  # where the architecture stands depends on the ABI
    major, minor = architecture.capability
    if cubin.architecture != major * 10 + minor:
        yield ArchitectureError(
            f"ELF: expected machine code for sm_{major}{minor}, got sm_{cubin.architecture}. Check the compile command."
        )


def _symbol_findings(cubin: Cubin, kernels: dict[str, Kernel]) -> Iterator[GateError]:
    missing = sorted(kernels.keys() - set(cubin.entries))
    if missing:
        yield MissingSymbolError(
            f"kernels: expected {', '.join(missing)}, got none. "
            'Instantiate it extern "C" in the source, or drop its row from kernels.toml.'
        )
    unlisted = sorted(set(cubin.entries) - kernels.keys())
    if unlisted:
        yield UnlistedSymbolError(
            f"kernels: expected only listed ones, got {', '.join(unlisted)}. "
            "Add its row to kernels.toml, or drop it from the source."
        )


def _resource_findings(
    cubin: Cubin, resources: dict[str, Resources], kernels: dict[str, Kernel]
) -> Iterator[GateError]:
    for symbol in cubin.entries:
        used = resources.get(symbol)
        if used is None:
            yield MissingReportError(
                f"{symbol}: expected ptxas to report its resources, got nothing. "
                "Compile with ptxas -v, and see whether its wording changed (resources.py)."
            )
            continue
        if used.spill_stores or used.spill_loads:
            yield SpillError(
                f"{symbol}: expected no spill, got {used.spill_stores} bytes stored and "
                f"{used.spill_loads} loaded. Use fewer registers or a larger bound on them."
            )
        # Two witnesses, as the report's wording is no interface.
        elif stack := max(used.stack, cubin.stacks.get(symbol, 0)):
            yield LocalMemoryError(
                f"{symbol}: expected no local memory, got a stack of {stack} bytes. "
                "Index arrays by constants only, and inline what is called."
            )
        threads = kernels[symbol].threads if symbol in kernels else 0
        registers = (used.registers + 7) // 8 * 8 * ((threads + 31) // 32 * 32)
        if registers > REGISTERS_PER_BLOCK:
            yield UnlaunchableError(
                f"{symbol}: expected at most {REGISTERS_PER_BLOCK} registers a block, got "
                f"{registers} ({used.registers} for each of {threads} threads). "
                f"State __launch_bounds__({threads})."
            )


def _path_findings(image: bytes, folders: Iterable[Path]) -> Iterator[GateError]:
    for folder in folders:
        if bytes(folder.resolve()) in image:
            yield BuildPathError(
                f"bytes: expected no folder of the build machine, got {folder}. "
                "Drop -lineinfo, __FILE__ and assert, which write it."
            )


def _is_host_binary(data: bytes) -> bool:
    return data.startswith(b"\x7fELF") and int.from_bytes(data[18:20], "little") != EM_CUDA


def check_wheel(path: Path) -> None:
    """Returns if the wheel may ship.

    Raises:
        WheelSizeError: it is over 5 MB.
        WheelContentsError: it holds PTX, a fat binary, a source or a host binary (by name or content), has no
            manifest, or its cubins are not those of its manifest.
    """
    size = path.stat().st_size
    if size > MAX_WHEEL_BYTES:
        raise WheelSizeError(
            f"{path.name}: expected at most {MAX_WHEEL_BYTES} bytes, got {size}. "
            "Drop an architecture or instantiations."
        )
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        for name in names:
            if name.endswith(_FORBIDDEN_SUFFIXES) or _is_host_binary(wheel.read(name)):
                raise WheelContentsError(f"{path.name}: expected Python and cubins only, got {name}. Exclude it.")
        manifests = [name for name in names if name.endswith("/cubins/manifest.json")]
        if len(manifests) != 1:
            raise WheelContentsError(
                f"{path.name}: expected one manifest.json, got {len(manifests)}. Build through hatch_build.py."
            )
        manifest = json.loads(wheel.read(manifests[0]))
        expected = {row["file"]: row["sha256"] for row in manifest["cubins"]}
        found = {
            PurePosixPath(name).name: hashlib.sha256(wheel.read(name)).hexdigest()
            for name in names
            if name.endswith(".cubin")
        }
        if found != expected:
            differing = sorted(name for name, _ in found.items() ^ expected.items())
            raise WheelContentsError(
                f"{path.name}: expected the manifest's cubins, got others: "
                f"{', '.join(dict.fromkeys(differing))}. Build again from a clean folder."
            )
