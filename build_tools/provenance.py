"""Which version and which commit a build is of."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from build_tools.errors import BuildError

# Written into an sdist, since what is unpacked from it has no git. Never in a checkout.
SOURCE_FILE = "SOURCE_COMMIT.json"
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Source:
    """The commit, and whether files differ from it."""

    commit: str
    dirty: bool

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True) + "\n"


def find_source(root: Path) -> Source:
    """Returns what git says of `root`, else what its sdist carries, else an unknown commit."""
    top = _git(root, "rev-parse", "--show-toplevel")
    # An sdist unpacked inside another project's checkout must not take that one's commit.
    if top is not None and Path(top).resolve() == root.resolve():
        status = _git(root, "status", "--porcelain")
        return Source(_git(root, "rev-parse", "--verify", "HEAD") or UNKNOWN, status != "")
    carried = root / SOURCE_FILE
    if carried.is_file():
        return Source(**json.loads(carried.read_text(encoding="utf-8")))
    return Source(UNKNOWN, False)


def package_version(root: Path) -> str:
    """Returns the version in fused_logp_hub/_version.py, read without importing the package."""
    path = root / "fused_logp_hub" / "_version.py"
    found = re.search(r'^__version__ = "([^"]+)"$', path.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise BuildError(f'{path.name}: expected a line __version__ = "X.Y.Z", got none. Add it.')
    return found[1]


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
