"""Which kernel runs (s1, s7): a pure function of facts, so every capability is tested without one."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from support.manifests import DTYPES, SYNTHETIC, kernel

from fused_logp_hub import _manifest, _selection
from fused_logp_hub._errors import ArgumentError, NoMatchingKernelError
from fused_logp_hub._manifest import Manifest, Range
from fused_logp_hub._selection import Facts, select, select_or_raise

# Every capability that CUDA 12.9 and 13.0 know from Volta on, and one that does not exist yet.
CAPABILITIES = [
    *((7, 0), (7, 2), (7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0)),
    *((10, 0), (10, 1), (10, 3), (11, 0), (12, 0), (12, 1), (13, 0)),
]
NEW_DRIVER = 13020


def installed() -> Manifest:
    if not (_manifest.CUBIN_DIR / "manifest.json").exists():
        pytest.skip("no manifest beside the package: it was not built")
    return _manifest.load_manifest(_manifest.CUBIN_DIR)


@pytest.fixture(params=["synthetic", "installed"])
def manifest(request):
    return SYNTHETIC if request.param == "synthetic" else installed()


def facts(capability=(9, 0), driver=NEW_DRIVER, dtype="bfloat16", alignment=16, rows=1000, row_bytes=256512) -> Facts:
    return Facts(capability, driver, dtype, alignment, rows, row_bytes)


def runs_there(arch: str, capability: tuple[int, int]) -> bool:
    """NVIDIA's rule, from the architecture's name alone."""
    major, minor, kind = re.fullmatch(r"sm_(\d+)(\d)([af]?)", arch).groups()
    built = (int(major), int(minor))
    if kind == "a":
        return capability == built
    if kind == "f" and capability == (10, 1):  # a family of its own, later renamed 11.0
        return False
    return capability[0] == built[0] and capability[1] >= built[1]


# ---- s1: every capability.


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"{c[0]}.{c[1]}")
@pytest.mark.parametrize("op", ["logp_forward", "logp_backward", "row_mask"])
def test_s1_every_capability(manifest, capability, op):
    """A kernel whose code runs there, or an error that lists what is shipped; supported are the majors we ship."""
    supported = any(runs_there(c.arch, capability) for c in manifest.cubins_of("generic"))
    for dtype in DTYPES:
        for alignment in (2, 16):
            for rows in (1, 128, 129, 4096):
                at = facts(
                    capability,
                    dtype="any" if op == "row_mask" else dtype,
                    alignment=alignment,
                    rows=rows,
                )
                if supported:
                    chosen = select_or_raise(manifest, op, "auto", at)
                    assert runs_there(chosen.cubin.arch, capability), chosen
                    assert chosen.kernel.dtype in (at.dtype, "any")
                    assert alignment % chosen.kernel.alignment == 0
                    assert chosen.kernel.auto != ()
                    continue
                with pytest.raises(NoMatchingKernelError) as error:
                    select_or_raise(manifest, op, "auto", at)
                for arch in {c.arch for c in manifest.cubins}:
                    assert arch in str(error.value)
                assert f"capability {capability[0]}.{capability[1]}" in str(error.value)


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"{c[0]}.{c[1]}")
def test_s1_no_cubin_is_accepted_where_it_does_not_run(manifest, capability):
    """Also of those that were not chosen, whatever was asked for: never sm_90a on 10.x or 12.x."""
    for requested in ("auto", "two_pass", "online", "tma"):
        for verdict in select(manifest, "logp_forward", requested, facts(capability)).verdicts:
            if verdict.reason is None:
                assert runs_there(verdict.cubin.arch, capability), str(verdict)
    tma = select(manifest, "logp_forward", "tma", facts(capability)).chosen
    assert (tma is not None) == (capability == (9, 0))


def test_what_must_be_supported():
    """The promise behind the matrix: Ampere to Blackwell, with their own code for 9.0."""
    manifest = installed()
    shipped = {c.arch for c in manifest.cubins}
    if not {"sm_80", "sm_90", "sm_100f", "sm_120"} <= shipped:
        pytest.skip(f"a build for {manifest.architectures()} only")
    for capability in CAPABILITIES:
        chosen = select(manifest, "logp_forward", "auto", facts(capability)).chosen
        if capability[0] in (8, 9, 10, 12) and capability != (10, 1):
            assert chosen is not None, capability


# ---- Priority, names, alignment, rows.


@pytest.mark.parametrize(
    ("requested", "at", "name", "module"),
    [
        ("auto", facts(rows=1000), "tma", "sm90_tma"),
        ("auto", facts(rows=128), "online", "cluster"),
        ("auto", facts(rows=129), "tma", "sm90_tma"),
        ("auto", facts(rows=1, row_bytes=65536), "online", "cluster"),
        ("auto", facts(rows=1, row_bytes=65535), "tma", "sm90_tma"),
        ("auto", facts(alignment=8), "online", "generic"),
        ("auto", facts((8, 0)), "online", "generic"),
        ("auto", facts((8, 9), rows=1), "online", "generic"),
        ("auto", facts((10, 3), rows=1), "online", "cluster"),
        ("auto", facts((12, 0), rows=1), "online", "generic"),
        ("online", facts(rows=1), "online", "cluster"),
        ("online", facts(rows=1000), "online", "generic"),
        ("two_pass", facts(rows=1), "two_pass", "generic"),
        ("tma", facts(rows=1), "tma", "sm90_tma"),
        ("tma", facts(rows=0), "tma", "sm90_tma"),
    ],
)
def test_choice(requested, at, name, module):
    """The manifest's order, first that fits: few rows, aligned on Hopper, any."""
    chosen = select_or_raise(SYNTHETIC, "logp_forward", requested, at)
    assert (chosen.kernel.name, chosen.kernel.module, chosen.kernel.dtype) == (
        name,
        module,
        at.dtype,
    )


@pytest.mark.parametrize("alignment", [1, 2, 4, 8])
def test_tma_asks_for_aligned_rows(alignment):
    with pytest.raises(NoMatchingKernelError, match=r"tma \(.*needs rows aligned to 16 bytes"):
        select_or_raise(SYNTHETIC, "logp_forward", "tma", facts(alignment=alignment))


@pytest.mark.parametrize("requested", ["two_pass", "online", "tma"])
def test_forced_name_is_never_replaced(requested):
    """All that is accepted has the name, even if another kernel would fit."""
    selection = select(SYNTHETIC, "logp_forward", requested, facts(rows=1))
    assert {v.kernel.name for v in selection.verdicts if v.reason is None} == {requested}
    for verdict in selection.verdicts:
        if verdict.kernel.name != requested:
            assert verdict.reason == f"{requested!r} was asked for"


def test_two_pass_is_not_taken_unasked():
    selection = select(SYNTHETIC, "logp_forward", "auto", facts())
    reasons = {v.reason for v in selection.verdicts if v.kernel.name == "two_pass"}
    assert reasons == {"runs only when asked for by name"}


@pytest.mark.parametrize(
    ("rows", "row_bytes", "name"),
    [
        (0, 256, "tma"), (8, 256512, "tma"), (9, 256512, "online"), (99, 256, "online"), (100, 256, "tma"),
        (100, 257, "online"), (2**31 - 1, 1, "tma"),
    ],
)  # fmt: skip
def test_ranges_in_which_a_kernel_is_taken_unasked(rows, row_bytes, name):
    """Either range will do, limits included; asked for by name, the kernel runs outside of both."""
    auto = (Range(max_rows=8), Range(min_rows=100, max_row_bytes=256))
    tma, online = kernel(0, "tma", "generic", "bfloat16", auto=auto), kernel(1, "online", "generic", "bfloat16")
    manifest = replace(SYNTHETIC, kernels=(tma, online))
    at = facts((9, 0), rows=rows, row_bytes=row_bytes)
    chosen = select_or_raise(manifest, "logp_forward", "auto", at)
    assert chosen.kernel.name == name
    assert select_or_raise(manifest, "logp_forward", "tma", at).kernel is tma
    if name == "online":
        reason = select(manifest, "logp_forward", "auto", at).verdicts[0].reason
        assert reason == "is taken by itself for at most 8 rows or at least 100 rows of at most 256 bytes"
    # the choice changes at the thresholds only
    (first, second), sizes = manifest.thresholds("logp_forward")
    assert (first, second, sizes) == (8, 99, [256])


@pytest.mark.parametrize(
    ("limits", "words", "inside", "outside"),
    [
        ({}, "any number of rows", [(0, 1), (2**31 - 1, 2**33)], []),
        (
            {"max_rows": 8, "min_row_bytes": 64},
            "at most 8 rows of at least 64 bytes", [(8, 64), (0, 99)], [(9, 64), (8, 63)],
        ),
        (
            {"min_rows": 8, "max_row_bytes": 64},
            "at least 8 rows of at most 64 bytes", [(8, 64), (99, 0)], [(7, 64), (8, 65)],
        ),
        (
            {"min_rows": 2, "max_rows": 3, "min_row_bytes": 4, "max_row_bytes": 5},
            "2 to 3 rows of 4 to 5 bytes", [(2, 4), (3, 5)], [(1, 4), (4, 4), (2, 3), (2, 6)],
        ),
    ],
)  # fmt: skip
def test_range(limits, words, inside, outside):
    """Both limits of both sizes count, and the trace says them; outside, asking by name does not help."""
    at = Range(**limits)
    assert str(at) == words
    assert [at.holds(*x) for x in (*inside, *outside)] == [True] * len(inside) + [False] * len(outside)
    only = replace(SYNTHETIC, kernels=(kernel(0, "online", "generic", "bfloat16", meant_for=(at,)),))
    for rows, row_bytes in outside:
        verdict = select(only, "logp_forward", "online", facts((9, 0), rows=rows, row_bytes=row_bytes)).verdicts[1]
        assert verdict.reason == f"is for {words}"


def test_unknown_name_fits_nothing():
    with pytest.raises(NoMatchingKernelError, match=r"'three_pass' was asked for"):
        select_or_raise(SYNTHETIC, "logp_forward", "three_pass", facts())


def test_unknown_op_and_dtype_fit_nothing():
    """The selector knows no op by name: these are data like any other."""
    for op, dtype in (("logp_sideways", "bfloat16"), ("logp_forward", "int8")):
        with pytest.raises(NoMatchingKernelError, match=rf"{op}.*{dtype}" if op != "logp_forward" else dtype):
            select_or_raise(SYNTHETIC, op, "auto", facts(dtype=dtype))


@pytest.mark.parametrize(
    ("more", "rows", "blocks"),
    [
        ({"blocks_per_row": 1}, 4096, 4096),
        ({"blocks_per_row": 8}, 3, 24),
        ({"blocks_per_row": None, "items_per_block": 256}, 257, 2),
    ],
)
def test_grid(more, rows, blocks):
    """Blocks a row, items."""
    assert kernel(0, "k", "generic", "bfloat16", **more).grid(rows, 256512, 132)[0] == blocks


@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (263, 263), (264, 264), (265, 264), (2**31 - 1, 264)])
def test_grid_of_persistent_blocks(rows, blocks):
    """Two for each of 132 multiprocessors, and never more than there are rows."""
    k = kernel(0, "k", "generic", "bfloat16", blocks_per_row=None, blocks_per_multiprocessor=2)
    assert k.grid(rows, 256512, 132) == (blocks, 0)


@pytest.mark.parametrize("row_bytes", [2, 8192, 8194, 256512, 2**32 + 2])
@pytest.mark.parametrize("rows", [1, 3, 4096, 2**31 - 1])
def test_grid_of_tiles_covers_every_row(rows, row_bytes):
    """Each row has whole blocks, enough for its tiles, and none that has no tile."""
    grid = {"tile_bytes": 8192, "max_tiles_per_block": 2, "resident_blocks": 8}
    k = kernel(0, "k", "generic", "bfloat16", blocks_per_row=None, **grid)
    blocks, each = k.grid(rows, row_bytes, 132)
    tiles = -(-row_bytes // 8192)
    assert 1 <= each <= 2
    assert blocks % rows == 0
    assert (blocks // rows - 1) * each < tiles <= blocks // rows * each
    if tiles * rows <= 8 * 132:
        assert each == 1, "no multiprocessor is left without work"


# ---- s7: an old driver.


@pytest.mark.parametrize(
    ("driver", "capability", "fits"),
    [
        (11080, (9, 0), False),
        (12000, (9, 0), True),
        (12080, (10, 0), False),
        (12090, (10, 0), True),
        (12080, (9, 0), True),
    ],
)
def test_s7_old_driver(driver, capability, fits):
    """The error names the driver's version, the one needed, and the driver branch to install."""
    at = facts(capability, driver=driver)
    if fits:
        assert select(SYNTHETIC, "logp_forward", "auto", at).chosen is not None
        return
    needed, branch = ("12.0", "525") if capability == (9, 0) else ("12.9", "575")
    with pytest.raises(NoMatchingKernelError) as error:
        select_or_raise(SYNTHETIC, "logp_forward", "auto", at)
    text = str(error.value)
    assert f"driver CUDA {driver // 1000}.{driver % 1000 // 10}" in text
    assert f"needs a driver for CUDA {needed} ({branch} or newer)" in text


def test_s7_old_driver_with_the_installed_wheel():
    manifest = installed()
    for capability in CAPABILITIES:
        with pytest.raises(NoMatchingKernelError, match=r"driver CUDA 11.4") as error:
            select_or_raise(manifest, "logp_forward", "auto", facts(capability, driver=11040))
        needed = {c.min_driver for c in manifest.cubins if runs_there(c.arch, capability)}
        assert not needed or any(f"({branch} or newer)" in str(error.value) for branch in needed)


# ---- The trace.


def test_trace():
    """A line for the facts, then one for each kernel and cubin with its verdict, in the order they were tried."""
    selection = select(SYNTHETIC, "logp_forward", "auto", facts((8, 6), alignment=2, rows=7))
    head, *lines = selection.trace().splitlines()
    assert head == (
        "logp_forward, kernel='auto': capability 8.6, driver CUDA 13.2, bfloat16, 7 rows of 256512 bytes aligned to 2"
    )
    assert len(lines) == len(selection.verdicts) == 2 + 1 + 4 + 4
    assert lines[0] == ("  online (cluster_online_bfloat16, sm_90): rejected: sm_90 runs on capability 9.x with x >= 0")
    assert lines[2] == ("  tma (sm90_tma_tma_bfloat16, sm_90a): rejected: sm_90a runs on capability exactly 9.0")
    assert lines[3] == "  online (generic_online_bfloat16, sm_80): accepted"
    assert lines[-1].endswith("rejected: runs only when asked for by name")
    assert selection.chosen is selection.verdicts[3]


def test_error_form_and_whole_trace():
    at = facts((7, 5))
    with pytest.raises(NoMatchingKernelError) as error:
        select_or_raise(SYNTHETIC, "logp_forward", "auto", at)
    first, *rest = str(error.value).splitlines()
    assert first.startswith("kernel: expected one that fits this device and these tensors, got none;")
    assert "ships sm_100f, sm_120, sm_80, sm_90, sm_90a" in first
    assert "\n".join(rest) == select(SYNTHETIC, "logp_forward", "auto", at).trace()


def test_thresholds():
    """Where selection can change with N and V, for the cache of plans."""
    assert SYNTHETIC.thresholds("logp_forward") == ([128], [65535])
    assert SYNTHETIC.thresholds("logp_backward") == ([], [])


# ---- The environment variable.


@pytest.mark.parametrize(("value", "expected"), [(None, None), ("", None), ("tma", "tma"), ("nonsense", "nonsense")])
def test_forced_by_environment(monkeypatch, value, expected):
    """Only read here; that a wrong name is an error is tested with the public functions."""
    monkeypatch.delenv(_selection.ENVIRONMENT_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(_selection.ENVIRONMENT_VARIABLE, value)
    assert _selection.ENVIRONMENT_VARIABLE == "FUSED_LOGP_HUB_KERNEL"
    assert _selection.forced_by_environment() == expected


@pytest.mark.parametrize(
    ("forced", "argument", "expected"),
    [(None, "auto", "auto"), ("tma", "auto", "tma"), ("tma", "online", "online"), ("nonsense", "tma", "tma")],
)
def test_resolve(monkeypatch, forced, argument, expected):
    """The environment stands in for "auto" only."""
    monkeypatch.setattr(_selection, "_forced", forced)
    assert _selection.resolve(argument) == expected


@pytest.mark.parametrize(
    ("forced", "argument", "source"), [(None, "Online", "kernel"), ("Online", "auto", "FUSED_LOGP_HUB_KERNEL")]
)
def test_resolve_names_where_a_wrong_name_came_from(monkeypatch, forced, argument, source):
    monkeypatch.setattr(_selection, "_forced", forced)
    with pytest.raises(ArgumentError, match=rf"^{source}: expected one of auto, .*, got 'Online'\."):
        _selection.resolve(argument)


def test_backward_kernel():
    """One fused backward serves all fused forwards; the reference keeps its own."""
    assert {name: _selection.backward_kernel(name) for name in _selection.KERNEL_NAMES} == {
        "auto": "auto",
        "two_pass": "auto",
        "online": "auto",
        "tma": "auto",
        "reference": "reference",
    }
