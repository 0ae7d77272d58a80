"""python -m build_tools.release [TAG]: the tag, the package's version and the changelog name one release.

Without a tag, as on every change: the changelog's first section is for the package's version.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from build_tools.errors import BuildError, ReleaseError
from build_tools.kernel_table import ROOT
from build_tools.provenance import package_version

_SECTION = re.compile(r"^## \[(?P<version>[^\]]+)\] - (?P<date>.+)$", re.MULTILINE)
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


def check_release(root: Path, tag: str | None = None) -> str:
    """Return the version.

    Raises:
        ReleaseError: the changelog's first section is for another version or, if a tag is given, has no date; or the
            tag is not v and the version.
    """
    version = package_version(root)
    section = _SECTION.search((root / "CHANGELOG.md").read_text(encoding="utf-8"))
    if section is None or section["version"] != version:
        raise ReleaseError(
            f"CHANGELOG.md: expected its first section to be [{version}], got "
            f"{'none' if section is None else '[' + section['version'] + ']'}. Add it, or correct _version.py."
        )
    if tag is not None:
        if tag != f"v{version}":
            raise ReleaseError(f"tag: expected v{version}, got {tag}. Tag the commit that has this version.")
        if not _DATE.fullmatch(section["date"]):
            raise ReleaseError(
                f"CHANGELOG.md: expected the date of [{version}] as YYYY-MM-DD, got {section['date']!r}. "
                "Write the day of the release there."
            )
    return version


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m build_tools.release", description=__doc__)
    parser.add_argument("tag", nargs="?", help="v1.2.3, as the release is to be tagged")
    options = parser.parse_args(arguments)
    try:
        version = check_release(ROOT, options.tag)
    except BuildError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(f"version {version}: changelog{' and tag' if options.tag else ''} agree")
    return 0


if __name__ == "__main__":
    sys.exit(main())
