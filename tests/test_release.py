"""Tag = version = changelog, before anything is published."""

import pytest

pytest.importorskip("build_tools", reason="the build tools are not part of the wheel")

from build_tools.errors import ReleaseError
from build_tools.kernel_table import ROOT
from build_tools.release import check_release, main


def project(folder, version="1.2.3", heading="## [1.2.3] - 2026-01-31"):
    (folder / "fused_logp_hub").mkdir()
    (folder / "fused_logp_hub" / "_version.py").write_text(f'__version__ = "{version}"\n')
    (folder / "CHANGELOG.md").write_text(f"# Changelog\n\n{heading}\n\n## [1.2.2] - 2025-12-31\n")
    return folder


def test_release(tmp_path):
    assert check_release(project(tmp_path), "v1.2.3") == "1.2.3"


@pytest.mark.parametrize(
    ("options", "tag", "message"),
    [
        ({}, "1.2.3", r"tag: expected v1\.2\.3, got 1\.2\.3\."),
        ({}, "v1.2.4", r"tag: expected v1\.2\.3, got v1\.2\.4\."),
        ({"version": "1.3.0"}, None, r"first section to be \[1\.3\.0\], got \[1\.2\.3\]"),
        ({"heading": "## [1.2.3] - Unreleased"}, "v1.2.3", r"date of \[1\.2\.3\] as YYYY-MM-DD, got 'Unreleased'"),
        ({"heading": "More"}, None, r"first section to be \[1\.2\.3\], got \[1\.2\.2\]"),
    ],
)
def test_disagreement(tmp_path, options, tag, message):
    with pytest.raises(ReleaseError, match=message):
        check_release(project(tmp_path, **options), tag)


def test_unreleased_without_a_tag(tmp_path):
    assert check_release(project(tmp_path, heading="## [1.2.3] - Unreleased")) == "1.2.3"


def test_command(capsys):
    if not ((ROOT / "CHANGELOG.md").is_file() and (ROOT / "fused_logp_hub").is_dir()):
        pytest.skip("needs the sources")
    assert main([]) == 0
    assert "changelog agree" in capsys.readouterr().out
    assert main(["v0"]) == 1
    assert capsys.readouterr().err.startswith("ReleaseError: tag: expected v")
