"""The package in the layout of Hugging Face's `kernels` hub, loaded by the real loader from a local folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("build_tools", reason="the build tools are not part of the wheel")

import fused_logp_hub
from build_tools.errors import HubExportError
from build_tools.hub_export import export, main

PACKAGE = Path(fused_logp_hub.__file__).parent
# The installed package is the judge of what the exported one computes; no network is used.
LOAD = """
import json, sys
from pathlib import Path
import torch
from kernels import get_local_kernel
hub = get_local_kernel(Path({folder!r}))
assert "fused_logp_hub" not in sys.modules
torch.manual_seed(0)
logits = torch.randn(5, 1031, device={device!r}, requires_grad=True)
ids = torch.tensor([0, 1030, -100, 17, 500], device={device!r})
logp = hub.fused_logp(logits, ids)
logp.sum().backward()
exact = logits.detach().double().requires_grad_()
kept = ids >= 0
wanted = exact.log_softmax(-1).gather(-1, ids.clamp(min=0)[:, None])[:, 0] * kept
wanted.sum().backward()
torch.testing.assert_close(logp.double(), wanted, rtol=1e-6, atol=1e-5)
torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-5, atol=1e-6)

# Beside an installed one: neither takes the other's operators.
import fused_logp_hub
names = [module.__name__ for module in (hub, fused_logp_hub)]
print(json.dumps([names, [hasattr(getattr(torch.ops, n), "logp_forward") for n in names], hub.__file__,
                  hub.explain_selection(logits.detach()).kernel]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The package this process runs, packed as a wheel is."""
    path = tmp_path_factory.mktemp("dist") / "fused_logp_hub-0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(PACKAGE.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                archive.write(file, file.relative_to(PACKAGE.parent))
        archive.writestr("fused_logp_hub-0.dist-info/licenses/LICENSE", "terms")
    return path


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_hubs_loader_computes_the_right_values(wheel, tmp_path, device):
    pytest.importorskip("kernels", reason="needs Hugging Face's kernels")
    folder = tmp_path / "repository"
    variant = export(wheel, folder)
    done = subprocess.run(
        [sys.executable, "-c", LOAD.format(folder=str(folder), device=device)],
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent), "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    names, operators, file, kernel = json.loads(done.stdout.splitlines()[-1])
    assert names == [json.loads((variant / "metadata.json").read_text())["id"], "fused_logp_hub"]
    assert operators == [True, True]
    assert Path(file) == variant / "__init__.py"
    assert kernel == ("reference" if device == "cpu" else "online")


def test_layout(wheel, tmp_path, capsys):
    assert main(["--wheel", str(wheel), "--out", str(tmp_path / "a")]) == 0
    assert "torch-universal" in capsys.readouterr().out
    files = contents(tmp_path / "a")
    assert files["LICENSE"] == b"terms"
    metadata = json.loads(files["build/torch-universal/metadata.json"])
    manifest = json.loads(files["build/torch-universal/cubins/manifest.json"])
    assert metadata["backend"]["type"] == "cuda"
    assert {"8.0", "9.0", "9.0a"} <= set(metadata["backend"]["archs"])
    for cubin in manifest["cubins"]:
        assert len(files[f"build/torch-universal/cubins/{cubin['file']}"]) == cubin["size"]
    export(wheel, tmp_path / "b")
    assert contents(tmp_path / "b") == files


def test_errors(wheel, tmp_path, capsys):
    assert main(["--wheel", str(wheel), "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("HubExportError: out: expected a new folder, got ")
    copy = Path(shutil.copy(wheel, tmp_path))
    with zipfile.ZipFile(copy, "a") as archive:
        archive.writestr("fused_logp_hub/more.py", "import json\nimport fused_logp_hub.cli")
    with pytest.raises(HubExportError, match=r"more\.py:2: expected an import .* got 'import fused_logp_hub\.cli'"):
        export(copy, tmp_path / "out")
    assert not (tmp_path / "out").exists()
