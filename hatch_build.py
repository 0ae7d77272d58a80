"""Hatchling's build hook: compiles the cubins into the wheel, or beside an editable checkout.

A wheel holds no host binary, so its tag names the platform only because the loader is for Linux.
"""

from __future__ import annotations

import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_MACHINES = ("x86_64", "aarch64")
_CUBINS = "fused_logp_hub/cubins"


class CubinBuildHook(BuildHookInterface[Any]):
    """Compiles for a wheel; writes the commit into an sdist, as what it unpacks to has no git."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        if self.root not in sys.path:
            sys.path.insert(0, self.root)  # a build frontend imports this file by its path
        # Lives until the hook goes, since hatchling reads the files after this method returned.
        self._folder = tempfile.TemporaryDirectory(prefix="fused_logp_hub-")
        made = Path(self._folder.name)

        if self.target_name == "sdist":
            from build_tools.provenance import SOURCE_FILE, find_source

            source_file = made / SOURCE_FILE
            source_file.write_text(find_source(root).to_json(), encoding="utf-8", newline="\n")
            build_data["force_include"][str(source_file)] = SOURCE_FILE
            return

        build_data["pure_python"] = False
        build_data["tag"] = _tag()
        editable = version == "editable"
        self._compile(root, root / _CUBINS if editable else made)
        if not editable:
            for path in sorted(made.iterdir()):
                build_data["force_include"][str(path)] = f"{_CUBINS}/{path.name}"

    def _compile(self, root: Path, out: Path) -> None:
        from build_tools.build import build
        from build_tools.compilers import select_compiler
        from build_tools.errors import BuildError
        from build_tools.kernel_table import load_table

        try:
            table = load_table(root / "build_tools" / "kernels.toml")
            compiler = select_compiler(table)
            self.app.display_info(f"Compiling cubins with {compiler.name} {compiler.version}")
            build(table, compiler, out, source_dir=root / "kernels_src", root=root)
        except BuildError as error:
            # Not raised on: pip would bury the one line that matters in its traceback.
            self.app.abort(f"{type(error).__name__}: {error}")

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self.target_name != "wheel" or version == "editable":
            return
        from build_tools.errors import GateError
        from build_tools.gate import check_wheel

        try:
            check_wheel(Path(artifact_path))
        except GateError as error:
            Path(artifact_path).unlink()  # what the gate refused must not be found and uploaded
            self.app.abort(f"{type(error).__name__}: {error}")


def _tag() -> str:
    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine not in _MACHINES:
        raise RuntimeError(
            f"platform: expected Linux on {' or '.join(_MACHINES)}, got {system} on {machine}. "
            "Build there; the package has no GPU driver to talk to elsewhere."
        )
    return f"py3-none-manylinux_2_17_{machine}"
