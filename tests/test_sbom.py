"""The bill of materials: valid CycloneDX, complete, and the same bytes for the same build."""

import hashlib
import json

import pytest

pytest.importorskip("build_tools", reason="the build tools are not part of the wheel")

from build_project import build_project, compiler_or_skip, make_project

from build_tools.kernel_table import load_table
from build_tools.sbom import make_sbom, sbom_text


@pytest.fixture
def built(tmp_path):
    """A small project's folder, its manifest and the compiler that made it."""
    project = make_project(tmp_path / "project")
    return project, build_project(project, tmp_path / "out"), compiler_or_skip(load_table(), "nvrtc")


def text_of(built):
    project, manifest, compiler = built
    return sbom_text(make_sbom(manifest, compiler, project / "kernels_src"))


def test_valid_cyclonedx(built):
    pytest.importorskip("cyclonedx", reason="needs cyclonedx-python-lib")
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str(text_of(built)) is None
    broken = text_of(built).replace('"type": "file"', '"type": "folder"', 1)
    assert validator.validate_str(broken) is not None


def test_compilers_sources_and_cubins(built):
    project, manifest, compiler = built
    sbom = json.loads(text_of(built))
    components = {component["bom-ref"]: component for component in sbom["components"]}
    assert components["compiler:nvrtc"]["version"] == compiler.version
    assert components["compiler:nvrtc"]["properties"][0]["value"] == " ".join(manifest["compiler"]["flags"])
    packages = {"nvidia-cuda-nvrtc-cu12", "nvidia-cuda-runtime-cu12", "nvidia-cuda-cccl-cu12"}
    assert {c["name"] for c in components.values() if "purl" in c} == packages
    for path in (project / "kernels_src").iterdir():
        (recorded,) = components[f"kernels_src/{path.name}"]["hashes"]
        assert recorded == {"alg": "SHA-256", "content": hashlib.sha256(path.read_bytes()).hexdigest()}
    depends = {row["ref"]: set(row["dependsOn"]) for row in sbom["dependencies"]}
    cubins = {f"fused_logp_hub/cubins/{row['file']}" for row in manifest["cubins"]}
    assert depends.pop("fused-logp-hub") == cubins == depends.keys()
    for inputs in depends.values():
        assert inputs == components.keys() - cubins
    assert sbom["metadata"]["component"]["version"] == "1.2.3"


def test_same_bytes_and_no_path(built):
    project, manifest, compiler = built
    moved = project.rename(project.parent / "elsewhere")
    text = text_of((moved, manifest, compiler))
    assert text == text_of((moved, manifest, compiler))
    assert str(project.parent) not in text
