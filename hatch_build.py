"""Hatchling's build hook: compiles the cubins into the wheel, or beside an editable checkout.

A wheel holds no host binary: its tag names the platform because that is where there are drivers to load it.
"""

from __future__ import annotations

import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_PLATFORMS = ("linux-x86_64", "linux-aarch64")
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
        cubins = root / _CUBINS if editable else made / "cubins"
        sbom = self._compile(root, cubins, made)
        build_data["sbom_files"].append(str(sbom))
        if not editable:
            for path in sorted(cubins.iterdir()):
                build_data["force_include"][str(path)] = f"{_CUBINS}/{path.name}"

    def _compile(self, root: Path, out: Path, made: Path) -> Path:
        """Fill `out` with the cubins and their manifest; return their bill of materials, a file in `made`."""
        from build_tools.build import build
        from build_tools.cache import CachedCompiler
        from build_tools.compilers import select_compiler
        from build_tools.errors import BuildError
        from build_tools.kernel_table import load_table
        from build_tools.sbom import FILE_NAME, make_sbom, sbom_text

        try:
            table = load_table(root / "build_tools" / "kernels.toml")
            compiler = CachedCompiler(select_compiler(table), root / "build" / "compiled")
            self.app.display_info(f"Compiling cubins with {compiler.name} {compiler.version}")
            manifest = build(table, compiler, out, source_dir=root / "kernels_src", root=root)
            compiler.drop_unused()
        except BuildError as error:
            # Not raised on: pip would bury the one line that matters in its traceback.
            self.app.abort(f"{type(error).__name__}: {error}")
        sbom = made / FILE_NAME
        sbom.write_text(sbom_text(make_sbom(manifest, compiler, root / "kernels_src")), encoding="utf-8", newline="\n")
        return sbom

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
    # As Python's own cross-builds name the platform, so _PYTHON_HOST_PLATFORM=linux-aarch64 chooses it: the
    # cubins are the same.
    platform = sysconfig.get_platform()
    if platform not in _PLATFORMS:
        raise RuntimeError(
            f"platform: expected {' or '.join(_PLATFORMS)}, got {platform}. "
            "Build there; the package has no GPU driver to talk to elsewhere."
        )
    return f"py3-none-manylinux_2_17_{platform.removeprefix('linux-')}"
