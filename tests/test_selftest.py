"""`doctor --selftest`: every shipped kernel that fits is run, compared and timed; anything wrong fails the node.

Without a GPU its kernels are asked for by name on CPU tensors, where the reference computes: all but the launches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import subprocess
import sys
import time

import pytest
import torch
from support.driver import FakeDriver

from fused_logp_hub import NoMatchingKernelError, _manifest, available_kernels
from fused_logp_hub._selection import Facts, select_or_raise
from fused_logp_hub.cli import main, probes, selftest
from fused_logp_hub.cli.timing import median_times

pytestmark = pytest.mark.usefixtures("short_on_cpu")
TIMED_SHAPE = selftest.timed_shape
FEWER = 8  # times fewer rows than kernels are meant for,
SHORTER = 8  # and for so much shorter ones
BOUNDS = {"bfloat16": 2e-3, "float16": 3e-4, "float32": 2e-6, "float64": 2e-6}


@pytest.fixture
def short_on_cpu(request, monkeypatch):
    """The reference takes seconds for what a GPU is timed with."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(selftest, "timed_shape", lambda kernel: (8, 100, kernel.alignment == 16))


@pytest.fixture
def shipped():
    if not (_manifest.CUBIN_DIR / "manifest.json").is_file():
        pytest.skip("no manifest beside the package: it was not built")
    return _manifest.shipped()


def taking_small(manifest):
    """The same kernels, meant for fewer rows and for shorter ones."""

    def lowered(ranges):
        return ranges and tuple(
            dataclasses.replace(
                r,
                min_rows=r.min_rows // FEWER,
                max_rows=r.max_rows and r.max_rows // FEWER,
                min_row_bytes=r.min_row_bytes // SHORTER,
            )
            for r in ranges
        )

    kernels = (dataclasses.replace(k, meant_for=lowered(k.meant_for), auto=lowered(k.auto)) for k in manifest.kernels)
    return dataclasses.replace(manifest, kernels=tuple(kernels))


@pytest.fixture
def gpus(shipped, monkeypatch):
    """Two GPUs of capability 9.0 whose tensors are the CPU's, and small: kernels for long or many rows take these."""
    monkeypatch.setattr(_manifest, "shipped", lambda: taking_small(shipped))
    FakeDriver((9, 0), (9, 0)).install(monkeypatch.setattr)
    cpu, run_case, check_gpu = torch.device("cpu"), probes.run_case, selftest.check_gpu

    def check(manifest, device, *facts):
        return [dataclasses.replace(c, device=str(device)) for c in check_gpu(manifest, cpu, *facts)]

    monkeypatch.setattr(probes, "run_case", lambda case, device, *kernel: run_case(case, cpu, *kernel))
    monkeypatch.setattr(selftest, "check_gpu", check)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())


def doctor(capsys, code):
    """The facts of ``doctor --selftest --json``."""
    assert main(["doctor", "--selftest", "--json"]) == code
    return json.loads(capsys.readouterr().out)


def assert_right(checks):
    """Whoever computed them, all numbers are there and the bounds are the contract's."""
    for check in checks:
        wanted = {"logp_forward": 1e-5, "logp_backward": BOUNDS.get(check["dtype"]), "row_mask": 0}
        assert check["bound"] == wanted[check["op"]]
        assert check["right"], check
        assert 0 <= check["error"] <= check["bound"]
        assert 0 < check["microseconds"] < 1e7
        assert check["gbytes_per_s"] > 0


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 3), (12, 0)], ids=str)
def test_every_kernel_that_fits(shipped, capability):
    """Once each, by the cubin that would run, and no other; so each op of the manifest has its measure."""
    cubins = [c for c in shipped.cubins if c.runs_on(capability, 13000)]
    if not cubins:
        pytest.skip(f"nothing shipped runs on {capability}")
    checks = selftest.check_gpu(taking_small(shipped), torch.device("cpu"), capability, 13000)
    modules = {c.module for c in cubins}
    assert [c.symbol for c in checks] == [k.symbol for k in shipped.kernels if k.module in modules]
    assert {c.arch for c in checks} <= {c.arch for c in cubins}
    assert_right(map(dataclasses.asdict, checks))


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 3), (12, 0)], ids=str)
def test_what_is_timed_is_the_kernel(shipped, capability):
    """Asked for by name, logits of that shape run this kernel and not another of its name."""
    for kernel in shipped.kernels:
        if kernel.op == "logp_forward" and shipped.closest(kernel.module, capability, 13000):
            rows, vocab_size, aligned = TIMED_SHAPE(kernel)
            size = getattr(torch, kernel.dtype).itemsize
            facts = Facts(capability, 13000, kernel.dtype, 16 if aligned else size, rows, vocab_size * size)
            assert select_or_raise(shipped, kernel.op, kernel.name, facts).kernel is kernel


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 3), (12, 0)], ids=str)
def test_a_call_reaches_every_kernel(shipped, capability):
    """With the rows and sizes that it is really meant for."""
    select = functools.cache(lambda requested: probes.select_cases(shipped, requested, capability, 13000))
    for kernel in shipped.kernels:
        if kernel.op != "row_mask" and shipped.closest(kernel.module, capability, 13000):
            assert selftest.cases_of(kernel, select)


def test_kernel_that_no_call_reaches(shipped):
    """One that another of its name always goes before is told, not passed over."""
    kernel = next(k for k in shipped.kernels if k.name == "two_pass")
    hidden = dataclasses.replace(kernel, symbol="hidden")
    manifest = dataclasses.replace(shipped, kernels=(*shipped.kernels, hidden))
    with pytest.raises(NoMatchingKernelError, match=r"^hidden: expected a call that runs it, got none;"):
        selftest.cases_of(hidden, lambda requested: probes.select_cases(manifest, requested, (9, 0), 13000))


def test_on_every_gpu(gpus, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")  # whatever the terminal, no cell is folded
    facts = doctor(capsys, 0)
    assert facts["usable"]
    assert facts["problems"] == []
    assert_right(facts["selftest"])
    by_device = {}
    for check in facts["selftest"]:
        by_device.setdefault(check["device"], []).append((check["op"], check["kernel"], check["dtype"]))
    assert by_device["cuda:0"] == by_device["cuda:1"]
    assert {("logp_forward", "tma", "bfloat16"), ("row_mask", "scatter", "any")} <= set(by_device["cuda:0"])
    assert {kernel for _, kernel, _ in by_device["cpu"]} == {"reference"}
    assert main(["doctor", "--selftest"]) == 0
    table = capsys.readouterr().out
    assert table.count(" two_pass ") == 8
    assert "usable: fused kernels run on GPU 0, 1" in table


@pytest.mark.parametrize("error", [3e-6, math.nan], ids=str)
def test_one_wrong_kernel_fails_the_node(gpus, capsys, monkeypatch, error):
    """On one of two GPUs: not usable, though the other is and the doctor without a selftest says so."""
    check_gpu = selftest.check_gpu

    def wrong_on_the_second(manifest, device, *facts):
        checks = check_gpu(manifest, device, *facts)
        for check in checks:
            if (device.index, check.op, check.dtype) == (1, "logp_backward", "float32"):
                check.error, check.right = error, error <= check.bound
        return checks

    monkeypatch.setattr(selftest, "check_gpu", wrong_on_the_second)
    facts = doctor(capsys, 1)
    assert [gpu["usable"] for gpu in facts["gpus"]] == [True, False]
    assert facts["problems"] == [
        "logp_backward by backward in float32 on cuda:1: expected an error of at most 2e-06, "
        f"got {error:.1e}. Report this as a bug."
    ]
    assert main(["doctor"]) == 0
    capsys.readouterr()


def test_wrong_values_are_noticed(shipped, monkeypatch):
    """The error is measured, not copied: values that are off by 1e-3 fail every forward and backward."""
    compare = probes.compare

    def off(logits, labels, logp):
        logits.grad *= 1 + 1e-2
        with torch.no_grad():
            logp += 1e-3
        return compare(logits, labels, logp)

    monkeypatch.setattr(probes, "compare", off)
    checks = selftest.check_gpu(taking_small(shipped), torch.device("cpu"), (9, 0), 13000)
    assert {c.right for c in checks if c.op != "row_mask"} == {False}
    assert all(c.error == pytest.approx(1e-3, rel=1e-2) for c in checks if c.op == "logp_forward")


def test_selftest_that_breaks_off(gpus, capsys, monkeypatch):
    monkeypatch.setattr(selftest, "check_gpu", lambda *_: 1 / 0)
    facts = doctor(capsys, 1)
    assert facts["problems"] == [
        f"selftest of GPU {index} (Fake {index}, capability 9.0): expected success, got ZeroDivisionError: "
        "division by zero"
        for index in (0, 1)
    ]


def test_without_a_gpu(shipped, capsys, monkeypatch):
    """The reference is tested, the missing GPU is told, and the exit code is that of a machine that is not usable."""
    FakeDriver(errors={"cuInit": 100}).install(monkeypatch.setattr)
    facts = doctor(capsys, 1)
    assert_right(facts["selftest"])
    done = {(check["device"], check["op"], check["kernel"], check["dtype"]) for check in facts["selftest"]}
    assert done == {("cpu", op, "reference", d) for op in ("logp_forward", "logp_backward") for d in BOUNDS}
    assert facts["problems"][0].startswith("cuInit: expected success, got CUDA_ERROR_NO_DEVICE (100)")


def test_without_being_asked(capsys):
    main(["doctor", "--json"])
    assert json.loads(capsys.readouterr().out)["selftest"] is None


def test_median_times():
    """Turns alternate between two buffers, the first three are not counted, and one slow turn does not count much."""
    turns = []

    def call(buffer):
        turns.append(buffer)
        time.sleep(0.05 if len(turns) == 5 else 0.002)

    times = median_times({"call": call}, 5, torch.device("cpu"))
    assert turns == [0, 1, 0, 1, 0, 1, 0, 1]
    assert 2000 <= times["call"] < 50000


@pytest.mark.gpu
def test_from_the_installed_package(tmp_path):
    """As a node runs it: names every kernel that fits, and each is within the contract."""
    command = [sys.executable, "-m", "fused_logp_hub", "doctor", "--selftest", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    facts = json.loads(done.stdout)
    assert facts["problems"] == []
    assert done.returncode == 0, done.stderr
    assert_right(facts["selftest"])
    usable = {k.symbol for k in available_kernels(0) if k.usable}
    assert {c["symbol"] for c in facts["selftest"] if c["device"] == "cuda:0"} == usable
    assert {c["device"] for c in facts["selftest"]} == {"cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))}


@pytest.mark.gpu
def test_what_is_named_is_what_ran(ran, ran_code, shipped):
    """Every symbol in the report was handed to the driver, and all machine code of these kernels."""
    capability = torch.cuda.get_device_capability(0)
    with torch.cuda.device(0):
        checks = selftest.check_gpu(shipped, torch.device("cuda", 0), capability, 13000)
    assert {check.symbol for check in checks} == set(ran)
    kernels = [kernel for kernel in shipped.kernels if kernel.symbol in set(ran)]
    assert {symbol for k in kernels for symbol in (k.symbol, k.usual_symbol) if symbol} == set(ran_code)
    assert_right(map(dataclasses.asdict, checks))
