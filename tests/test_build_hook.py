"""What the build hook puts into wheels, sdists and editable installs, and of which commit."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

pytest.importorskip("build_tools", reason="the build tools are not part of the wheel")

from build_project import compiler_or_skip, contents, make_project

from build_tools import provenance
from build_tools.compilers import ENVIRONMENT_VARIABLE
from build_tools.kernel_table import load_table


@pytest.fixture
def project(tmp_path):
    return make_project(tmp_path / "project")


def git(root, *arguments):
    identity = ["-c", "user.name=n", "-c", "user.email=e@x"]
    done = subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="no git on PATH")
def test_source_commit(tmp_path):
    unknown = provenance.Source("unknown", False)
    assert provenance.find_source(tmp_path) == unknown
    git(tmp_path, "init", "-q")
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    (unpacked / "file").touch()
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "m")
    clean = provenance.Source(git(tmp_path, "rev-parse", "HEAD"), False)
    assert provenance.find_source(tmp_path) == clean
    # What is unpacked inside another project's checkout is not of that project's commit.
    assert provenance.find_source(unpacked) == unknown
    carried = provenance.Source("0123abc", True)
    (unpacked / provenance.SOURCE_FILE).write_text(carried.to_json())
    assert provenance.find_source(unpacked) == carried
    assert provenance.find_source(tmp_path) == dataclasses.replace(clean, dirty=True)


def run_backend(root, call, **environment):
    code = f"import hatchling.build as b; b.{call}"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment},  # a front end's own caches are not ours
        capture_output=True,
        text=True,
    )


@pytest.fixture
def backend(project):
    pytest.importorskip("hatchling")
    compiler_or_skip(load_table(), "nvrtc")

    def backend(call, root=project, **environment):
        environment = {ENVIRONMENT_VARIABLE: "nvrtc", **environment}
        return run_backend(root, call, **environment)

    return backend


def test_wheel_and_sdist(project, tmp_path, backend):
    git(project, "init", "-q")
    git(project, "add", ".")
    git(project, "commit", "-q", "-m", "m")
    commit = git(project, "rev-parse", "HEAD")
    for call in (f"build_wheel({str(tmp_path / 'a')!r})", f"build_sdist({str(tmp_path)!r})"):
        done = backend(call)
        assert done.returncode == 0, done.stdout + done.stderr
    assert git(project, "status", "--porcelain") == "", "the build wrote into the checkout"
    with tarfile.open(tmp_path / "fused_logp_hub-1.2.3.tar.gz") as sdist:
        sdist.extractall(tmp_path, **({"filter": "data"} if sys.version_info >= (3, 12) else {}))
    done = backend(f"build_wheel({str(tmp_path / 'b')!r})", tmp_path / "fused_logp_hub-1.2.3")
    assert done.returncode == 0, done.stdout + done.stderr

    # The other machine's wheel, built here: all but the tag is the same.
    done = backend(f"build_wheel({str(tmp_path / 'c')!r})", _PYTHON_HOST_PLATFORM="linux-aarch64")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list((project / "build" / "compiled").iterdir())) == 3

    (first,), (second,), (other,) = (list((tmp_path / name).iterdir()) for name in "abc")
    assert first.name.startswith("fused_logp_hub-1.2.3-py3-none-manylinux_2_17_")
    assert first.read_bytes() == second.read_bytes()
    assert other.name == "fused_logp_hub-1.2.3-py3-none-manylinux_2_17_aarch64.whl"
    with zipfile.ZipFile(other) as there, zipfile.ZipFile(first) as here:
        assert {n for n in here.namelist() if here.read(n) != there.read(n)} <= {
            f"fused_logp_hub-1.2.3.dist-info/{name}" for name in ("WHEEL", "RECORD")
        }
    with zipfile.ZipFile(first) as wheel:
        assert "fused_logp_hub-1.2.3.dist-info/sboms/fused_logp_hub.cdx.json" in wheel.namelist()
        assert "fused_logp_hub-1.2.3.dist-info/licenses/LICENSE" in wheel.namelist()
        names = {name for name in wheel.namelist() if name.startswith("fused_logp_hub/")}
        recorded = json.loads(wheel.read("fused_logp_hub/cubins/manifest.json"))
    assert (recorded["source_commit"], recorded["dirty"]) == (commit, False)
    assert names == {
        "fused_logp_hub/__init__.py",
        "fused_logp_hub/_version.py",
        "fused_logp_hub/cubins/manifest.json",
        "fused_logp_hub/cubins/plain.sm_100f.cubin",
        "fused_logp_hub/cubins/plain.sm_80.cubin",
        "fused_logp_hub/cubins/special.sm_90a.cubin",
    }


def test_editable_install_compiles_beside_the_sources(project, tmp_path, backend):
    pytest.importorskip("editables")
    done = backend(f"build_editable({str(tmp_path)!r})")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "manifest.json" in contents(project / "fused_logp_hub" / "cubins")


def test_refused_wheel_is_not_left_behind(project, tmp_path, backend):
    (project / "fused_logp_hub" / "large.bin").write_bytes(os.urandom(5_100_000))
    done = backend(f"build_wheel({str(tmp_path / 'out')!r})")
    assert done.returncode != 0
    assert "WheelSizeError: " in done.stdout + done.stderr
    assert list((tmp_path / "out").iterdir()) == []
