"""The command, and its doctor on sound, damaged and GPU-less machines (s2, s4, s7)."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from support.package import CUBINS, write_package

from fused_logp_hub import __version__, _driver, _manifest
from fused_logp_hub.cli import main, probes


@pytest.fixture
def cubins(tmp_path, monkeypatch):
    """A package folder of its own, whole and free to be damaged."""
    folder = tmp_path / "fused_logp_hub" / "cubins"
    write_package(folder)
    monkeypatch.setattr(_manifest, "CUBIN_DIR", folder)
    monkeypatch.delenv("FUSED_LOGP_HUB_KERNEL", raising=False)
    _manifest.shipped.cache_clear()
    yield folder
    _manifest.shipped.cache_clear()


@pytest.fixture
def no_libcuda(monkeypatch):
    """As on a machine without the driver, wherever this runs."""
    load = ctypes.CDLL

    def refuse(name, *args, **kwargs):
        if name == "libcuda.so.1":
            raise OSError(f"{name}: cannot open shared object file")
        return load(name, *args, **kwargs)

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    monkeypatch.setattr(_driver, "_libcuda", None)


@pytest.fixture
def gpus(monkeypatch):
    """Puts GPUs of these capabilities behind a driver; PyTorch sees them, and they run nothing."""

    def put(*capabilities, driver_cuda=13000):
        def device(index):
            return SimpleNamespace(name="Test GPU", capability=capabilities[index], driver_cuda=driver_cuda)

        monkeypatch.setattr(_driver, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(_driver, "driver_version", lambda: driver_cuda)
        monkeypatch.setattr(_driver, "device", device)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    return put


@pytest.fixture
def errors(monkeypatch):
    """Lets every case on a GPU end with these errors."""

    def put(logp_error, grad_error):
        run = probes.run_case

        def run_case(case, device, *args):
            if device.type == "cpu":
                return run(case, device, *args)
            case.logp_error, case.grad_error = logp_error, grad_error
            return None

        monkeypatch.setattr(probes, "run_case", run_case)

    return put


def diagnosis(capsys, code):
    """The facts of ``doctor --json`` and the text of ``doctor``, which must agree."""
    assert main(["doctor"]) == code
    text = capsys.readouterr().out
    assert main(["doctor", "--json"]) == code
    facts = json.loads(capsys.readouterr().out)
    assert facts["usable"] is (code == 0)
    shown = [line.removeprefix("problem: ") for line in text.splitlines() if "problem: " in line]
    assert shown == facts["problems"]
    return facts, text


# ---- doctor: the machine.


def test_doctor_without_libcuda_twice(capsys, cubins, no_libcuda):
    for _ in range(2):
        facts, text = diagnosis(capsys, 1)
        assert facts["problems"][0].startswith("libcuda.so.1: expected the NVIDIA driver's library")
        assert facts["reference_works"]
        assert "the reference on CPU tensors works" in text
        assert [c["verified"] for c in facts["cubins"]] == [True] * len(CUBINS)
        assert facts["versions"]["package"] == __version__
        assert facts["versions"]["torch"] == torch.__version__
        assert facts["versions"]["driver_cuda"] is None


def test_doctor_of_the_installed_package(tmp_path):
    """As users run it, on whatever this machine is: facts and a verdict, never a traceback."""
    command = [sys.executable, "-m", "fused_logp_hub", "doctor", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    facts = json.loads(done.stdout)
    assert done.returncode == (0 if facts["usable"] else 1)
    assert done.stderr == ""
    assert facts["usable"] or facts["problems"]


def test_doctor_selects_by_alignment_and_rows(capsys, cubins, gpus, errors):
    gpus((9, 0))
    errors(1e-7, 1e-7)
    facts, text = diagnosis(capsys, 0)
    assert "usable: fused kernels run on GPU 0" in text
    chosen = {
        (c["alignment"] == 16, c["rows_label"]): (c["forward"]["kernel"], c["forward"]["module"])
        for c in facts["gpus"][0]["cases"]
        if c["dtype"] == "bfloat16"
    }
    assert chosen == {
        (True, "<= 128"): ("online", "cluster"),
        (True, "> 128"): ("tma", "sm90_tma"),
        (False, "<= 128"): ("online", "cluster"),
        (False, "> 128"): ("online", "generic"),
    }
    assert "needs rows aligned to 16 bytes" in " ".join(text.split())


def test_doctor_with_a_gpu_that_nothing_fits(capsys, cubins, gpus, errors):
    """The GPU beside it still counts."""
    gpus((7, 5), (8, 6))
    errors(1e-7, 1e-7)
    facts, _ = diagnosis(capsys, 0)
    assert [gpu["usable"] for gpu in facts["gpus"]] == [False, True]
    (problem,) = facts["problems"]
    assert problem.startswith("GPU 0 (Test GPU, capability 7.5): expected a kernel for every case")
    assert "online (generic) is built for sm_120, sm_90, sm_80" in problem


def test_doctor_with_an_old_driver(capsys, cubins, gpus):
    gpus((12, 0), driver_cuda=12040)
    facts, _ = diagnosis(capsys, 1)
    assert "needs a driver for CUDA 12.9 (575 or newer)" in facts["problems"][0]
    assert facts["versions"]["driver_cuda"] == "12.4"


@pytest.mark.parametrize("wrong", [1e-3, float("nan")])
def test_doctor_with_wrong_results(capsys, cubins, gpus, errors, wrong):
    gpus((9, 0))
    errors(1e-7, wrong)
    facts, _ = diagnosis(capsys, 1)
    assert "expected results within the contract" in facts["problems"][0]


def test_doctor_with_a_pytorch_without_cuda(capsys, cubins, gpus, monkeypatch):
    gpus((9, 0))
    monkeypatch.setattr(torch.version, "cuda", None)
    facts, _ = diagnosis(capsys, 1)
    assert facts["problems"][0].startswith("torch: expected a build with CUDA")
    assert facts["gpus"][0]["cases"][0]["logp_error"] is None


def test_doctor_with_an_unknown_forced_kernel(capsys, cubins, gpus, errors, monkeypatch):
    gpus((9, 0))
    errors(1e-7, 1e-7)
    monkeypatch.setenv("FUSED_LOGP_HUB_KERNEL", "fast")
    facts, _ = diagnosis(capsys, 1)
    (problem,) = facts["problems"]
    assert problem.startswith("FUSED_LOGP_HUB_KERNEL: expected one of")
    assert "'fast'" in problem


# ---- doctor: the package.


def truncate(folder):
    path = folder / "generic.sm_90.cubin"
    path.write_bytes(path.read_bytes()[:-1])


def flip(folder):
    path = folder / "generic.sm_90.cubin"
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)


def edit_version(folder):
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace(f'"{__version__}"', '"9.9.9"'))


DAMAGE = {
    "truncated": (truncate, "generic.sm_90.cubin: expected 1300 bytes, got 1299"),
    "one bit": (flip, "generic.sm_90.cubin: expected sha256"),
    "no cubin": (lambda f: (f / "generic.sm_90.cubin").unlink(), "generic.sm_90.cubin: expected"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "manifest.json: expected"),
    "no JSON": (lambda f: (f / "manifest.json").write_text("{"), "manifest.json: expected JSON"),
    "another version": (edit_version, f"expected kernels of version {__version__}, got 9.9.9"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE.keys())
def test_doctor_with_a_damaged_package(capsys, cubins, gpus, errors, damage, message):
    """Not usable even where the rest of the kernels run."""
    gpus((9, 0))
    errors(1e-7, 1e-7)
    damage(cubins)
    _manifest.shipped.cache_clear()
    facts, _ = diagnosis(capsys, 1)
    (problem,) = facts["problems"]
    assert message in problem
    assert "Reinstall fused-logp-hub." in problem


def test_doctor_in_a_source_folder(capsys, tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(_manifest, "CUBIN_DIR", tmp_path / "fused_logp_hub" / "cubins")
    facts, _ = diagnosis(capsys, 1)
    assert "got a source folder that was not built" in facts["problems"][0]


# ---- Wrong usage.


@pytest.mark.parametrize("arguments", [[], ["dance"], ["demo", "--kernel", "fast"]])
def test_unknown_words_are_usage_errors(capsys, arguments):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "usage: fused-logp-hub" in capsys.readouterr().err
