"""Fork, spawn and exit, with a driver that refuses in a forked child as the real one does (support/driver.py)."""

from __future__ import annotations

from support.process import run_python

FORK = """
import os, signal, sys, threading, torch, fused_logp_hub
from fused_logp_hub import _driver, _manifest
from pathlib import Path
from support.driver import FakeDriver, first_launch, function
from support.package import write_package

_manifest.CUBIN_DIR = Path("cubins").resolve()
write_package(_manifest.CUBIN_DIR)
fake = FakeDriver((9, 0)).install()

def in_child(work):
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends a child that hangs
        try:
            work()
            sys.stdout.flush()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, status

def use():
    first_launch()
    assert len(fake.called("cuLaunchKernelEx")) == 1

def reference():
    ids = torch.zeros(2, dtype=torch.int64)
    print(fused_logp_hub.fused_logp(torch.zeros(2, 4), ids).tolist()[0])

def refused():
    for call in (first_launch, lambda: before.launch(1, 0, *packed), lambda: fused_logp_hub.preload(0)):
        try:
            call()
        except fused_logp_hub.DriverError as error:
            print(error)
    reference()
"""


def test_fork_after_import(tmp_path):
    """The child uses CUDA, even if another thread of the parent held the package's lock at that moment."""
    run_python(
        FORK
        + """
taken, release = threading.Event(), threading.Event()

def hold():
    with _driver._lock:
        taken.set()
        release.wait()

thread = threading.Thread(target=hold, daemon=True)
thread.start()
taken.wait()
in_child(use)
release.set()
thread.join()
use()  # and then so does the parent
""",
        tmp_path,
        90,
    )


def test_fork_after_use(tmp_path):
    """One clear error for what was loaded before the fork and for what was not; CPU tensors still work."""
    out = run_python(
        FORK
        + """
from fused_logp_hub import _params
before = function()
packed = _params.LOGP, (*[0] * len(_params.LOGP_ADDRESSES), _params.logp_constants())
in_child(refused)
before.launch(1, 0, *packed)  # the parent goes on
""",
        tmp_path,
        90,
    )
    *errors, logp = out.splitlines()
    assert errors == [
        "cuInit: expected success, got CUDA_ERROR_NOT_INITIALIZED (3): initialization error. CUDA does not survive a "
        "fork: start processes by spawn, or use CUDA in them only."
    ] * 3  # fmt: skip
    assert logp.startswith("-1.386")


def test_spawn(tmp_path):
    """A spawned process starts from nothing, whatever its parent did; public functions can be its target."""
    out = run_python(
        """
        import multiprocessing, torch, fused_logp_hub
        from support.driver import FakeDriver
        if __name__ == "__main__":
            FakeDriver((9, 0)).install()
            from fused_logp_hub import _driver
            _driver.device(0)
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                ids = torch.zeros(2, dtype=torch.int64)
                logp = pool.apply(fused_logp_hub.fused_logp, (torch.zeros(2, 4), ids))
            print(logp.tolist()[0])
        """,
        tmp_path,
        90,
    )
    assert out.startswith("-1.386")


def test_exit_calls_no_driver(tmp_path):
    """The driver may be gone by then: after the program's last line nothing is asked of it."""
    out = run_python(
        "import atexit\natexit.register(lambda: print(len(fake.calls) == calls))"  # registered first: runs last
        + FORK
        + "use()\ncalls = len(fake.calls)\n",
        tmp_path,
        90,
    )
    assert out == "True\n"
