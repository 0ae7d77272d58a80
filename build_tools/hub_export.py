"""python -m build_tools.hub_export: a wheel's package in the layout of Hugging Face's `kernels` hub.

The hub's loader imports a kernel from a folder, under a name of its own, so that several versions can be loaded at
once. The package therefore must not import itself by its installed name: those imports, and nothing else, are
rewritten to relative ones.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import sys
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

from build_tools.errors import BuildError, HubExportError

PACKAGE = "fused_logp_hub"
NAME = "fused-logp-hub"
VARIANT = PurePosixPath("build/torch-universal")  # no PyTorch C++ ABI, and CPU tensors work too
_IMPORT = re.compile(rf"^(\s*from ){PACKAGE}(?:\.([\w.]+))?( import )", re.MULTILINE)
_SUFFIXES = {"minor": "", "family": "f", "exact": "a"}


def export(wheel: Path, out: Path) -> Path:
    """Write the hub's repository of `wheel` into the new folder `out`, and return the build variant's folder.

    Raises:
        HubExportError: `out` exists, or the package still imports itself by its installed name.
    """
    if out.exists():
        raise HubExportError(f"out: expected a new folder, got {out}, which is there. Remove it or name another.")
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    manifest = json.loads(files[f"{PACKAGE}/cubins/manifest.json"])
    exported = {str(VARIANT / "metadata.json"): _metadata(manifest, digest)}
    for name, data in files.items():
        path = PurePosixPath(name)
        if path.parts[0] == PACKAGE:
            inside = path.relative_to(PACKAGE)
            exported[str(VARIANT / inside)] = _relative_imports(inside, data) if path.suffix == ".py" else data
        elif path.name == "LICENSE":
            exported["LICENSE"] = data
    for name, data in exported.items():
        target = out / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return out / VARIANT


def _metadata(manifest: dict[str, Any], digest: str) -> bytes:
    """What the loader reads before it imports: a name that no other build has, and the GPUs it is for."""
    architectures = {
        ".".join(map(str, cubin["capability"])) + _SUFFIXES[cubin["match"]] for cubin in manifest["cubins"]
    }
    metadata = {
        "id": f"_{PACKAGE}_{digest[:12]}",
        "name": NAME,
        "version": int(manifest["package_version"].partition(".")[0]),
        "license": "Apache-2.0",
        "python-depends": [],  # the hub knows no name for cuda-bindings; PyTorch's CUDA builds bring it
        "backend": {"type": "cuda", "archs": sorted(architectures)},
    }
    return (json.dumps(metadata, indent=2) + "\n").encode()


def _relative_imports(inside: PurePosixPath, data: bytes) -> bytes:
    dots = "." * len(inside.parts)
    text = _IMPORT.sub(lambda found: f"{found[1]}{dots}{found[2] or ''}{found[3]}", data.decode())
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [str(node.module)]
        else:
            continue
        if any(name.partition(".")[0] == PACKAGE for name in names):
            raise HubExportError(
                f"{inside}:{node.lineno}: expected an import this export can make relative, got "
                f"{ast.unparse(node)!r}. Write `from {PACKAGE}... import ...` on a line of its own."
            )
    return text.encode()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m build_tools.hub_export", description=__doc__)
    parser.add_argument("--wheel", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="a new folder, the hub's repository")
    options = parser.parse_args(arguments)
    try:
        variant = export(options.wheel, options.out)
    except BuildError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(f"{NAME} for the kernels hub in {variant}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
