"""The two compilers behind one interface, and which of them a build uses.

FUSED_LOGP_HUB_COMPILER or the caller names it: `nvrtc` (default), `nvcc` (the one on PATH), or the
path of an nvcc.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from build_tools.errors import CompilerError
from build_tools.kernel_table import CompilerPin, KernelTable
from build_tools.resources import Resources, find_warnings, parse_report

ENVIRONMENT_VARIABLE = "FUSED_LOGP_HUB_COMPILER"
DEFAULT = "nvrtc"


@dataclass(frozen=True)
class Compilation:
    """A cubin, and what the compiler said while making it."""

    image: bytes
    log: str

    @property
    def resources(self) -> dict[str, Resources]:
        """What each kernel uses."""
        return parse_report(self.log)

    @property
    def warnings(self) -> tuple[str, ...]:
        """The lines in which the compiler warned."""
        return find_warnings(self.log)


class Compiler(Protocol):
    """Compiles one source for one architecture. `version` is the CUDA release, 12.9.86 for example.

    `folders`: folders of this machine that the compiler was given and that no cubin may name.
    `packages`: name and version of the packages from PyPI that it and its headers came in.
    """

    name: str
    version: str
    folders: tuple[Path, ...]
    packages: tuple[tuple[str, str], ...]

    def compile(
        self, source: Path, include_dirs: Sequence[Path], architecture: str, flags: Sequence[str]
    ) -> Compilation:
        """Returns the cubin; raises CompilerError with the compiler's own message."""
        ...


def select_compiler(table: KernelTable, choice: str | None = None) -> Compiler:
    """Returns the compiler that `choice`, else the environment, else the default names.

    Raises:
        CompilerError: it is unknown, not installed, or not of the release kernels.toml pins.
    """
    # Here, not above: both modules import Compilation from this one.
    from build_tools.nvcc import Nvcc
    from build_tools.nvrtc import Nvrtc

    choice = choice or os.environ.get(ENVIRONMENT_VARIABLE) or DEFAULT
    compiler: Compiler
    if choice == "nvrtc":
        compiler = Nvrtc(table.compilers["nvrtc"])
    elif choice == "nvcc" or os.sep in choice:
        executable = shutil.which(choice)
        if executable is None:
            raise CompilerError(
                f"{ENVIRONMENT_VARIABLE}: expected an nvcc that can be run, got {choice!r}, which "
                "is not there. Give its path, or use nvrtc, which needs no CUDA toolkit."
            )
        compiler = Nvcc(Path(executable))
    else:
        raise CompilerError(
            f"{ENVIRONMENT_VARIABLE}: expected nvrtc, nvcc or the path of an nvcc, got {choice!r}. "
            "Correct it or unset it."
        )
    _check_version(compiler, table.compilers[compiler.name])
    return compiler


def _check_version(compiler: Compiler, pin: CompilerPin) -> None:
    if pin.version is not None and compiler.version != pin.version:
        raise CompilerError(
            f"{compiler.name}: expected version {pin.version}, got {compiler.version}. "
            "Install the pinned one, or change the pin in kernels.toml and pyproject.toml."
        )
