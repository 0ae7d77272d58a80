"""python -m build_tools.repair WHEEL FOLDER: cibuildwheel's repair step, without auditwheel.

auditwheel finds out which Linux a wheel's host binaries need, and refuses one that has none of them but ELF files for
a GPU. Here the gate proves that there is no host binary, so that the tag the build chose is right; the bytes stay.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path

from build_tools.errors import BuildError, WheelTagError
from build_tools.gate import check_wheel

_TAG = re.compile(r".+-py3-none-manylinux_2_17_(x86_64|aarch64)\.whl")


def repair(wheel: Path, folder: Path) -> Path:
    """Copy a wheel that may ship into `folder`; GateError, and nothing copied, if it may not."""
    if not _TAG.fullmatch(wheel.name):
        raise WheelTagError(
            f"{wheel.name}: expected a tag py3-none-manylinux_2_17_x86_64 or _aarch64. Build through hatch_build.py."
        )
    check_wheel(wheel)
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(wheel, folder))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m build_tools.repair", description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    try:
        print(repair(options.wheel, options.folder))
    except BuildError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
