"""nvcc as a Compiler. Finds its own headers, and needs a host compiler for its preprocessor."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from build_tools.compilers import Compilation
from build_tools.errors import CompilerError


class Nvcc:
    """The nvcc at `executable`. A Compiler."""

    name = "nvcc"

    def __init__(self, executable: Path) -> None:
        self.executable = executable
        text = self._run(["--version"])
        found = re.search(r"\bV(\d+\.\d+\.\d+)", text)
        if found is None:
            raise CompilerError(
                f"{executable}: expected an nvcc that states its version, got {text.strip()!r}. Name another nvcc."
            )
        self.version = found[1]
        self.folders: tuple[Path, ...] = ()
        self.packages: tuple[tuple[str, str], ...] = ()

    def compile(
        self, source: Path, include_dirs: Sequence[Path], architecture: str, flags: Sequence[str]
    ) -> Compilation:
        number = architecture.removeprefix("sm_")
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder, f"{source.stem}.cubin")
            log = self._run(
                [
                    "-cubin",
                    f"-gencode=arch=compute_{number},code=sm_{number}",
                    "-Xptxas=-v",
                    *flags,
                    *(f"-I{include_dir}" for include_dir in include_dirs),
                    f"-o={cubin}",
                    source.name,
                ],
                source.parent,
            )
            return Compilation(cubin.read_bytes(), log)

    def _run(self, arguments: list[str], folder: Path | None = None) -> str:
        # In the source's folder, so that no message and no symbol carries the path to it.
        try:
            done = subprocess.run([self.executable, *arguments], cwd=folder, capture_output=True, text=True)
        except OSError as error:
            raise CompilerError(
                f"{self.executable}: expected an nvcc that can be run, got {error}. Give the path of one."
            ) from error
        log = done.stdout + done.stderr
        if done.returncode != 0:
            raise CompilerError(
                f"nvcc: expected exit status 0, got {done.returncode} from {' '.join(arguments)}. Its message:\n{log}"
            )
        return log
