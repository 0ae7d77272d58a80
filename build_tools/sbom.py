"""Writes the bill of materials of a wheel: what its cubins were compiled by and from. Same input, same bytes.

CycloneDX 1.6, in the folder that PEP 770 gives it. Without serial number and time stamp, which that format
leaves to choice and which no two builds would share.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from build_tools.compilers import Compiler

FILE_NAME = "fused_logp_hub.cdx.json"
_NAME = "fused-logp-hub"
_LICENSE = "Apache-2.0"


def make_sbom(manifest: dict[str, Any], compiler: Compiler, source_dir: Path) -> dict[str, Any]:
    """Returns the document: the cubins, and for each the compiler, its packages and the sources."""
    version = manifest["package_version"]
    whole = {
        "type": "library",
        "bom-ref": _NAME,
        "name": _NAME,
        "version": version,
        "purl": f"pkg:pypi/{_NAME}@{version}",
        "licenses": [{"license": {"id": _LICENSE}}],
        "properties": [
            {"name": f"{_NAME}:source-commit", "value": manifest["source_commit"]},
            {"name": f"{_NAME}:source-dirty", "value": str(manifest["dirty"]).lower()},
        ],
    }
    made_by = _compiler(manifest["compiler"], compiler)
    sources = [_file("kernels_src", path.name, _sha256(path)) for path in sorted(source_dir.glob("*.cu*"))]
    cubins = [_file("fused_logp_hub/cubins", row["file"], row["sha256"]) for row in manifest["cubins"]]
    inputs = [component["bom-ref"] for component in (*made_by, *sources)]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": whole, "lifecycles": [{"phase": "build"}]},
        "components": [*made_by, *sources, *cubins],
        "dependencies": [
            {"ref": _NAME, "dependsOn": [cubin["bom-ref"] for cubin in cubins]},
            *({"ref": cubin["bom-ref"], "dependsOn": inputs} for cubin in cubins),
        ],
    }


def sbom_text(sbom: dict[str, Any]) -> str:
    return json.dumps(sbom, indent=1) + "\n"


def _compiler(used: dict[str, Any], compiler: Compiler) -> list[dict[str, Any]]:
    """The compiler with its flags, and the packages it and its headers came in."""
    return [
        {
            "type": "application",
            "bom-ref": f"compiler:{used['name']}",
            "name": used["name"],
            "version": used["version"],
            "properties": [{"name": f"{_NAME}:flags", "value": " ".join(used["flags"])}],
        },
        *(
            {
                "type": "library",
                "bom-ref": f"pkg:pypi/{name}@{version}",
                "name": name,
                "version": version,
                "purl": f"pkg:pypi/{name}@{version}",
            }
            for name, version in compiler.packages
        ),
    ]


def _file(folder: str, name: str, sha256: str) -> dict[str, Any]:
    path = f"{folder}/{name}"
    return {
        "type": "file",
        "bom-ref": path,
        "name": path,
        "hashes": [{"alg": "SHA-256", "content": sha256}],
    }


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
