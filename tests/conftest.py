"""Markers, options and fixtures. GPU tests are left out where there is no GPU, or fail with ``--require-gpu``."""

from __future__ import annotations

import importlib.util
import signal
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))
# For build_tools and benchmarks, which no wheel has. Last, so that an installed package wins over the sources.
sys.path.append(str(TESTS.parent))


def pytest_addoption(parser):
    parser.addoption(
        "--require-gpu", action="store_true", help="a missing GPU is an error, not a reason to leave tests out"
    )
    parser.addoption(
        "--require-integrations", action="store_true", help="a missing TRL, verl or OpenRLHF is an error too"
    )


def pytest_configure(config):
    # the CPU's tensors are small: threads waiting for each other cost more time than they save
    torch.set_num_threads(1)
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    if config.getoption("--require-gpu") and not torch.cuda.is_available():
        raise pytest.UsageError("--require-gpu: expected a CUDA device, got none. Run on a GPU machine.")


def pytest_collection_modifyitems(config, items):
    """Deselects: to skip twenty thousand tests one by one takes minutes."""
    if torch.cuda.is_available():
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=left_out)


def pytest_report_header(config):
    return [] if torch.cuda.is_available() else "no CUDA device: tests marked gpu are deselected"


@pytest.fixture(autouse=True)
def time_limit():
    """A hang is a failure, not a job that never ends; subprocesses have shorter limits of their own."""

    def stop(*_):
        raise TimeoutError("expected an end within 600 s, got none")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(600)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Each device in turn."""
    return request.param


@pytest.fixture(scope="session")
def require_package(pytestconfig):
    """Call it with a package's name: skips where it is not installed, or fails with ``--require-integrations``."""

    def require(name):
        if importlib.util.find_spec(name) is None:
            absent = pytest.fail if pytestconfig.getoption("--require-integrations") else pytest.skip
            absent(f"needs {name}; it is not installed")

    return require


@pytest.fixture
def drop_in_calls(monkeypatch):
    """The arguments of every call that a drop-in makes of fused_logp, in order."""
    from fused_logp_hub.integrations import _drop_in

    calls = []
    original = _drop_in.fused_logp
    monkeypatch.setattr(_drop_in, "fused_logp", lambda *a, **k: calls.append(a) or original(*a, **k))
    return calls


def record_functions(monkeypatch, symbol_of):
    from fused_logp_hub import _driver

    symbols = []
    launch = _driver.Function.launch

    def recording(self, *args, **kwargs):
        launch(self, *args, **kwargs)
        symbols.append(symbol_of(self))

    monkeypatch.setattr(_driver.Function, "launch", recording)
    return symbols


@pytest.fixture
def ran(monkeypatch):
    """The kernels that were really handed to the driver, in order, by their symbols."""
    return record_functions(monkeypatch, lambda function: function.kernel.symbol)


@pytest.fixture
def ran_code(monkeypatch):
    """Likewise the machine code: of a kernel that has its own for usual calls, that one's symbol."""
    return record_functions(monkeypatch, lambda function: function.symbol)


@pytest.fixture
def only_kernel(monkeypatch):
    """Call it with a symbol's middle part: the selector then knows that forward alone, for rows of any size.

    Likewise the backward, by its symbol without the dtype.
    """
    from dataclasses import replace

    from support.kernels import forget_launches

    from fused_logp_hub import _launch, _manifest

    shipped = _manifest.shipped()

    def keep(part, backward="logp_backward"):
        wanted = {"logp_forward": f"logp_forward_{part}", "logp_backward": backward}
        kept = tuple(
            replace(k, meant_for=None)
            for k in shipped.kernels
            if k.op not in wanted or k.symbol.rsplit("_", 1)[0] == wanted[k.op]
        )
        assert {k.op for k in kept} == {k.op for k in shipped.kernels}
        reduced = replace(shipped, kernels=kept)
        monkeypatch.setattr(_manifest, "shipped", lambda: reduced)
        forget_launches(monkeypatch)
        monkeypatch.setattr(_launch, "_thresholds", reduced.thresholds)

    return keep
