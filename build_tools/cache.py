"""Keeps what a compiler made, so that installing again after a change elsewhere compiles nothing.

A compilation is found by all that decides its bytes: compiler, packages, architecture, flags, the source and
whatever else its folders hold. Each build drops what it did not use.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from build_tools.compilers import Compilation, Compiler


class CachedCompiler:
    """A compiler that looks into `folder` first; what it refuses is not kept."""

    def __init__(self, compiler: Compiler, folder: Path) -> None:
        self.name, self.version = compiler.name, compiler.version
        self.folders, self.packages = compiler.folders, compiler.packages
        self._compiler = compiler
        self._folder = folder
        self._used: set[Path] = set()

    def compile(
        self, source: Path, include_dirs: Sequence[Path], architecture: str, flags: Sequence[str]
    ) -> Compilation:
        path = self._folder / f"{self._key(source, include_dirs, architecture, flags)}.json"
        self._used.add(path)
        with suppress(OSError):
            kept = json.loads(path.read_text(encoding="utf-8"))
            return Compilation(base64.b64decode(kept["image"]), kept["log"])
        made = self._compiler.compile(source, include_dirs, architecture, flags)
        text = json.dumps({"image": base64.b64encode(made.image).decode(), "log": made.log})
        with suppress(OSError):  # a checkout that is read-only compiles each time
            self._folder.mkdir(parents=True, exist_ok=True)
            # Renamed when whole: a build that is interrupted leaves nothing that the next one would take.
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
        return made

    def drop_unused(self) -> None:
        """Delete what no call of `compile` asked for."""
        for path in set(self._folder.glob("*")) - self._used:
            path.unlink(missing_ok=True)

    def _key(self, source: Path, include_dirs: Sequence[Path], architecture: str, flags: Sequence[str]) -> str:
        files = sorted(path for folder in {source.parent, *include_dirs} for path in folder.iterdir() if path.is_file())
        contents = [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files]
        decides = (self.name, self.version, self.packages, architecture, list(flags), source.name, contents)
        return hashlib.sha256(json.dumps(decides).encode()).hexdigest()
