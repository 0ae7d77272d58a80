"""The workflows' data and noxfile.py agree with each other and with pyproject.toml."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
if not (ROOT / ".github").is_dir():
    pytest.skip("needs the checkout", allow_module_level=True)

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MATRIX = json.loads((ROOT / ".github" / "matrix.json").read_text(encoding="utf-8"))


def release(version):
    return tuple(map(int, version.split(".")))


def test_cpu_rows_cover_the_promise():
    torches = {}
    for row in MATRIX["cpu"]:
        torches.setdefault(row["python"], []).append(row["torch"])
    assert list(torches) == ["3.10", "3.11", "3.12", "3.13", "3.14"]
    assert PROJECT["requires-python"] == f">={min(torches, key=release)}"
    oldest = min((torch for rows in torches.values() for torch in rows), key=release)
    (floor,) = (d.removeprefix("torch>=") for d in PROJECT["dependencies"] if d.startswith("torch"))
    assert oldest.startswith(f"{floor}.")
    for rows in torches.values():  # the oldest and the newest that each Python has
        assert len(rows) == 2
        assert release(rows[0]) < release(rows[1])


def test_gpu_rows_use_extras_that_exist():
    extras = PROJECT["optional-dependencies"]
    for row in MATRIX["gpu"]:
        assert row.keys() == {"name", "runner", "python", "torch", "extras"}
        assert set(row["extras"].split(",")) <= extras.keys()
    kinds = {row["runner"].split("-")[0] for row in MATRIX["gpu"]}
    assert kinds == {"h100", "a100"}


def test_sessions_that_are_called_exist():
    text = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    defined = set(re.findall(r"^@nox\.session.*\ndef (\w+)", text, re.MULTILINE))
    called = re.findall(r"nox .*--session((?: \w+)+)", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    for workflow in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = workflow.read_text(encoding="utf-8")
        called += re.findall(r"nox\"? -s (\w+)", text)
        called += (names.replace(",", " ") for names in re.findall(r"session: \[(.+)\]", text))
    names = {name for line in called for name in line.split()}
    assert {"lint", "types", "test", "cubins", "wheel", "docs", "gpu"} <= names <= defined
