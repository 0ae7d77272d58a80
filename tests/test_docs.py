"""README and docs: their Python runs on the CPU, prints what they say, and their links lead somewhere."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
if not (ROOT / "docs").is_dir():
    pytest.skip("the documents are not part of the wheel", allow_module_level=True)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# A Python block, and the block of text right behind it, which is what it prints. "```python notest" opens one that
# cannot run by itself here: it needs a trainer, or several processes.
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+)")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def test_there_are_pages():
    assert {page.name for page in PAGES} >= {"README.md", "slicing.md", "memory.md", "numerics.md"}
    assert all("```python\n" in page.read_text() for page in PAGES[:2])  # the pattern still finds something


@pages
def test_python_blocks(page):
    """From top to bottom in one namespace, as a reader would type them."""
    text = page.read_text()
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) == text.count("```python\n")
    namespace = {"__name__": page.stem}
    for block in blocks:
        code, expected = block.groups()
        line = text.count("\n", 0, block.start(1))
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * line + code, str(page), "exec"), namespace)
        if expected is not None:
            assert printed.getvalue() == expected, f"{page.name}, line {line + 1}"


@pages
def test_links(page):
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing
