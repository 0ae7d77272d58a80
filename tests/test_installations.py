"""A package that is read-only, zipped, linked, or of two versions: it works, or one error says what is wrong."""

from __future__ import annotations

import shutil
import zipfile

import pytest
from support.package import write_package
from support.process import PACKAGE, run_python

import fused_logp_hub

USE = """
import json, sys, torch, fused_logp_hub
from fused_logp_hub import _manifest
from fused_logp_hub.cli.diagnosis import diagnose

logits = torch.zeros(2, 4, requires_grad=True)
fused_logp_hub.fused_logp(logits, torch.zeros(2, dtype=torch.int64)).sum().backward()
assert logits.grad[0].tolist() == [0.75, -0.25, -0.25, -0.25]
found = diagnose()
assert found.cubins and all(cubin.verified for cubin in found.cubins)
print(fused_logp_hub.__file__)
"""

WATCH = """
import os, sys

def inside(path):
    return str(path).startswith({site!r}) and "__pycache__" not in str(path)

def hook(event, arguments):
    if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        assert not inside(arguments[0]), arguments
    if event in ("os.mkdir", "os.rename", "os.remove", "os.truncate", "os.link", "os.symlink"):
        assert not any(map(inside, arguments)), (event, arguments)

sys.addaudithook(hook)
"""
REFUSED = """
import fused_logp_hub
try:
    fused_logp_hub.available_kernels()
except fused_logp_hub.CubinError as error:
    print(error)
"""


@pytest.fixture
def copy(tmp_path):
    """A copy of the package with cubins of its own, in a folder to put on the path."""
    site = tmp_path / "site"
    shutil.copytree(PACKAGE, site / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__", "cubins"))
    write_package(site / PACKAGE.name / "cubins")
    return site


def run_copy(code, folder, package):
    """Sees no GPU: what stands in for machine code must not reach a real driver."""
    return run_python(code, folder, 90, package=package, CUDA_VISIBLE_DEVICES="-1")


def test_read_only_site_packages(copy, tmp_path):
    """Nothing is opened for writing there, but by Python itself, which stores byte code where it may."""
    folders = [path for path in copy.rglob("*") if path.is_dir()]
    for folder in folders:
        folder.chmod(0o555)  # not for root, whose writes the hook sees
    try:
        run_copy(WATCH.format(site=str(copy)) + USE, tmp_path, copy)
    finally:
        for folder in folders:
            folder.chmod(0o755)


def test_zipped_package(copy, tmp_path):
    archive = tmp_path / "package.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in copy.rglob("*"):
            file.write(path, path.relative_to(copy))
    assert run_copy(USE, tmp_path, archive).startswith(str(archive))


def test_zip_without_its_cubins(copy, tmp_path):
    """A clear error, as from a folder."""
    archive = tmp_path / "package.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in copy.rglob("*.py"):
            file.write(path, path.relative_to(copy))
    out = run_copy(REFUSED, tmp_path, archive)
    assert out.startswith(f"{archive}/fused_logp_hub/cubins/manifest.json: expected the kernel manifest, got ")
    assert out.endswith(". Reinstall fused-logp-hub.\n")


@pytest.mark.parametrize("kind", ["folder", "files"])
def test_symlinked_package(copy, tmp_path, kind):
    """The folder is a link, or each file is one into a store, as some installers do."""
    linked = tmp_path / "linked"
    if kind == "folder":
        linked.mkdir()
        (linked / PACKAGE.name).symlink_to(copy / PACKAGE.name)
    else:
        for number, path in enumerate(sorted(path for path in copy.rglob("*") if path.is_file())):
            stored = tmp_path / "store" / str(number)
            stored.parent.mkdir(exist_ok=True)
            target = linked / path.relative_to(copy)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(path.rename(stored))
    assert run_copy(USE, tmp_path, linked).startswith(str(linked))


def test_two_versions_on_the_path(copy, tmp_path):
    """The first on the path runs whole; the doctor names the other."""
    (copy / PACKAGE.name / "_version.py").write_text('__version__ = "9.9.9"\n')
    manifest = copy / PACKAGE.name / "cubins" / "manifest.json"
    manifest.write_text(manifest.read_text().replace(f'"{fused_logp_hub.__version__}"', '"9.9.9"'))
    metadata = tmp_path / "other" / "fused_logp_hub-0.0.1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fused-logp-hub\nVersion: 0.0.1\n")
    code = "import sys; sys.path.insert(1, 'other')\n" + USE + "print(found.problems[0])"
    out = run_copy(code, tmp_path, copy)
    file, problem = out.splitlines()
    assert file.startswith(str(copy))
    assert problem == (
        f"fused-logp-hub: expected version 0.0.1, which is installed, got 9.9.9 from {copy / PACKAGE.name}. "
        "Take the one that you do not want off the import path."
    )


def test_one_version_over_another(copy, tmp_path):
    """Code of one version with the cubins of another."""
    (copy / PACKAGE.name / "_version.py").write_text('__version__ = "9.9.9"\n')
    out = run_copy(REFUSED, tmp_path, copy)
    manifest = copy / PACKAGE.name / "cubins" / "manifest.json"
    assert out == (
        f"{manifest}: expected kernels of version 9.9.9, got {fused_logp_hub.__version__}. Reinstall fused-logp-hub.\n"
    )
