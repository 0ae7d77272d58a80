"""Fresh processes: what happens on a first call can be seen only once in each."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import fused_logp_hub

PACKAGE = Path(fused_logp_hub.__file__).resolve().parent
TESTS = Path(__file__).resolve().parent.parent


def run_python(code: str, folder: Path, timeout: float = 120, package: Path | None = None, **environment: str) -> str:
    """Run the code with this process's package, outside the checkout, and return what it printed.

    package: a folder or archive to take the package from instead.
    Fails unless the exit is clean: status 0 and nothing about exceptions on the way out.
    """
    package = package or PACKAGE.parent
    path = os.pathsep.join([str(package), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    for sign in ("Exception ignored", "Traceback", "terminate called", "Segmentation fault"):
        assert sign not in done.stderr, done.stderr
    return done.stdout
