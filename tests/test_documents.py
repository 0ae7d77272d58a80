"""The documents run: the cluster's scripts, its Kubernetes job, the report's fields, a look at a selection."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from fused_logp_hub import _manifest
from fused_logp_hub.cli.selftest import Check

DOCS = Path(__file__).parent.parent / "docs"
if not DOCS.is_dir():
    pytest.skip("the documents are not part of the wheel", allow_module_level=True)
CLUSTER = (DOCS / "cluster.md").read_text(encoding="utf-8")
ADDING = (DOCS / "adding-a-kernel.md").read_text(encoding="utf-8")


def blocks(language, text=CLUSTER):
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(code) for _, code in found]


NODE, SLURM = blocks("bash")


@pytest.mark.parametrize("script", [*blocks("bash"), *blocks("sh"), *blocks("sh", ADDING)])
def test_scripts_parse(script):
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (0, "")


def test_kubernetes_job():
    yaml = pytest.importorskip("yaml")
    (text,) = blocks("yaml")
    job = yaml.safe_load(text)
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    spec, template = job["spec"], job["spec"]["template"]
    assert spec["completions"] == spec["parallelism"]
    assert (spec["completionMode"], spec["backoffLimitPerIndex"]) == ("Indexed", 0)
    pod = template["spec"]
    assert pod["restartPolicy"] == "Never"
    (apart,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["labelSelector"]["matchLabels"] == template["metadata"]["labels"]
    (container,) = pod["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    assert container["command"][1:] == [f"{mounts['wheelhouse']}/node.sh", mounts["wheelhouse"], mounts["reports"]]
    assert container["env"][0]["name"] in NODE


def test_report_has_the_fields_that_are_named():
    (sentence,) = re.findall(r"`selftest`, a list with (.*?)\. Errors are judged", CLUSTER)
    named = set(re.findall(r"`(\w+)`", sentence))
    assert named == {field.name for field in dataclasses.fields(Check)}


def test_look_at_a_selection(capsys):
    """With the installed cubins in place of the new one."""
    if not (_manifest.CUBIN_DIR / "manifest.json").is_file():
        pytest.skip("no manifest beside the package: it was not built")
    (code,) = blocks("python notest", ADDING)
    assert 'Path("build/sm_103f")' in code
    exec(code.replace('"build/sm_103f"', repr(str(_manifest.CUBIN_DIR))), {})
    trace = capsys.readouterr().out
    assert trace.startswith("logp_forward, kernel='auto': capability 10.3, driver CUDA 13.0, bfloat16, ")
    assert re.search(r"^  online \(logp_forward_online_bf16, sm_\w+\): (accepted|rejected: )", trace, re.MULTILINE)


# The package in small: a command that reports as the doctor does, and fails where the test says so.
DOCTOR = """
import json, os, sys

def main():
    assert sys.argv[1:] == ["doctor", "--selftest", "--json"], sys.argv
    usable = os.environ["NODE_NAME"] != "bad"
    print(json.dumps({"usable": usable, "problems": []}, indent=2))
    return 0 if usable else 1
"""
SRUN = """#!/usr/bin/env bash
# Two nodes, one after the other; the worst exit code, as srun gives it.
while [[ $1 == --* ]]; do shift; done
status=0
for node in $NODES; do NODE_NAME=$node "$@" || status=$?; done
exit $status
"""


@pytest.fixture
def shared(tmp_path):
    """A wheelhouse with node.sh and the small package, and a folder with srun."""
    wheelhouse = tmp_path / "wheelhouse"
    wheelhouse.mkdir()
    (wheelhouse / "node.sh").write_text(NODE)
    info = "fused_logp_hub-1.0.dist-info"
    with zipfile.ZipFile(wheelhouse / "fused_logp_hub-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("fused_logp_hub_doctor.py", DOCTOR)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: fused-logp-hub\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        entry = "[console_scripts]\nfused-logp-hub = fused_logp_hub_doctor:main\n"
        wheel.writestr(f"{info}/entry_points.txt", entry)
        wheel.writestr(f"{info}/RECORD", "")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "srun").write_text(SRUN)
    (tmp_path / "bin" / "srun").chmod(0o755)
    (tmp_path / "bin" / "python3").symlink_to(sys.executable)
    return tmp_path


@pytest.mark.skipif(importlib.util.find_spec("ensurepip") is None, reason="this Python makes no environments with pip")
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(("nodes", "code"), [("first", 0), ("bad first", 1)])
def test_slurm_job(shared, nodes, code):
    """Installs from the folder alone and ends as its worst node does, with every node's report."""
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHON"))},
        "PATH": f"{shared / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PIP_CONFIG_FILE": os.devnull,
        "SLURM_JOB_ID": "7",
        "NODES": nodes,
    }
    done = subprocess.run(
        ["bash", "-s"],
        input=SLURM.replace("/shared", str(shared)),
        env=environment,
        cwd=shared,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == code, done.stdout + done.stderr
    reports = shared / "smoke" / "7"
    assert sorted(path.stem for path in reports.iterdir()) == sorted(nodes.split())
    bad = [f"not usable: {reports}/bad.json"] if code else []
    assert [line for line in done.stdout.splitlines() if line.startswith("not usable")] == bad
    assert f"{reports}/first.json: exit code 0" in done.stdout
