"""The source path of sm_80, run on whatever GPU there is: its PTX for compute_80, compiled by the driver.

No card of capability 8.x need be at hand to know that the code without Hopper's instructions computes the
contract. Machine code for 8.x itself is only built, not run, by this.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.kernels import ALIGNED, EAGER, RINGS, SUFFIX, forget_launches, is_compiled
from support.reference64 import assert_gradient, backward64, forward64

from fused_logp_hub import _launch, _manifest, fused_logp

SOURCES = Path(__file__).parent.parent / "kernels_src"
FLAGS = ["-std=c++17", "-fmad=false"]


@pytest.fixture(scope="module")
def ptx(tmp_path_factory) -> Path:
    """generic.cu as PTX for compute_80, ended by the NUL that the driver looks for."""
    nvcc = shutil.which("nvcc")
    if nvcc is None or not SOURCES.is_dir():
        pytest.skip("needs nvcc and the kernels' sources")
    file = tmp_path_factory.mktemp("ptx") / "generic.compute_80.ptx"
    command = [nvcc, *FLAGS, "-ptx", "-arch=compute_80", "-o", str(file), str(SOURCES / "generic.cu")]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    file.write_bytes(file.read_bytes() + b"\0")
    return file


@pytest.fixture
def only_sm80_source(ptx, only_kernel, part, backward, monkeypatch):
    """The package as if it shipped that PTX and nothing else, with one forward and one backward, for any rows."""
    only_kernel(part, backward)
    shipped, data = _manifest.shipped(), ptx.read_bytes()
    code = replace(
        next(c for c in shipped.cubins if c.arch == "sm_80"),
        file=ptx.name,
        arch="compute_80",
        match="exact",
        capability=torch.cuda.get_device_capability(),
        sha256=hashlib.sha256(data).hexdigest(),
        size=len(data),
    )
    reduced = replace(shipped, directory=ptx.parent, cubins=(code,))
    monkeypatch.setattr(_manifest, "shipped", lambda: reduced)
    forget_launches(monkeypatch)
    monkeypatch.setattr(_launch, "_thresholds", lambda op: ([], []))


def test_ptx_has_no_instruction_of_a_later_architecture(ptx):
    text = ptx.read_text(encoding="ascii").rstrip("\0")
    assert ".target sm_80" in text
    for newer in ("mbarrier", "cp.async.bulk", "cluster", "setmaxnreg"):
        assert newer not in text


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [1000, 1027, 50257])  # aligned rows; rows at every alignment; many tiles
@pytest.mark.parametrize(
    ("part", "backward", "dtype"),
    [
        (part, "logp_backward_eager" if part in EAGER else "logp_backward", dtype)
        for part in ("online", "staged", "two_pass", "ring4", *RINGS, "wide", "wide_shifted")
        for dtype in SUFFIX
        if is_compiled(part, dtype)
    ],
)
def test_contract(only_sm80_source, ran, vocab_size, part, backward, dtype):
    stride = vocab_size + (-vocab_size % 8 if part in ALIGNED else 0)
    logits = torch.randn(9, stride, device="cuda").to(dtype)[:, :vocab_size].requires_grad_()
    ids = torch.randint(vocab_size, (9,), device="cuda")
    ids[3] = -100
    kernel = "two_pass" if part == "two_pass" else "online"
    logp = fused_logp(logits, ids, kernel=kernel, temperature=0.7)
    expected = forward64(logits.detach(), ids, temperature=0.7).logp
    error = (logp.double() - expected).abs()
    assert (error <= 1e-5 + 1e-6 * expected.abs()).all()
    g = torch.randn(9, device="cuda")
    (grad,) = torch.autograd.grad(logp, logits, g)
    assert_gradient(grad, backward64(g, None, logits.detach(), ids, temperature=0.7), dtype)
    assert [s.rsplit("_", 1)[0] for s in ran] == [f"logp_forward_{part}", backward]
