"""The benchmark's own logic: wrong results are caught before timing, reports agree with results."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

pytest.importorskip("benchmarks", reason="the benchmarks are not part of the wheel")

from benchmarks import (
    environment,
    loading,
    measure,
    names,
    providers,
    report,
    results,
    run,
    shapes,
    sweep,
    tables,
)
from benchmarks.case import Case, buffer_count
from benchmarks.check import Reference
from benchmarks.providers import Calls, Provider
from benchmarks.results import Results, Row
from fused_logp_hub import cli
from fused_logp_hub.cli import bench

CPU = torch.device("cpu")
SHAPE = shapes.Shape(4096, 32000)
MARKED = f"# Title\n\n{report.START}\n{report.END}\n\nMore.\n"


def row(provider, p50, direction="forward", **rest):
    shape = rest.pop("shape", SHAPE)
    rate = results.gbytes_per_s(shape.bytes_moved(direction), p50) if p50 else None
    fields = {"method": "graph", "gbytes_per_s": rate, "p20": p50, "p80": p50, **rest}
    return Row(shape.name, shape.dtype, shape.layout, direction, provider, p50=p50, **fields)


@pytest.fixture
def folder(tmp_path):
    """Results of an imaginary card, where QuACK is wrong forward and Liger faster than ours."""
    card = tmp_path / "results" / "imaginary-card"
    card.mkdir(parents=True)
    wrong = row("quack", None, method="", status="wrong: NaN", error=math.nan)
    forward = [
        row("read", 60.0),
        row("ours", 64.0, share=60 / 64),
        row("liger", 63.0),
        row("eager", 800.0),
    ]
    backward = [row("copy", 120.0, "backward"), row("ours", 150.0, "backward", share=0.8)]
    results.append(card / results.RESULTS, [wrong, *forward])
    results.append(card / results.RESULTS, backward)
    host = {
        "call": "forward, no gradient",
        "provider": "ours",
        "p20": 14.0,
        "p50": 15.6,
        "p80": 17.0,
    }
    results.append_table(card / results.HOST, [host])
    described = environment.describe(CPU, []) | {"card": "Imaginary Card"}
    (card / "env.json").write_text(json.dumps(described))
    return card.parent


def test_bytes_are_the_fewest_that_must_move():
    half = shapes.Shape(8, 100, "float32", layout="half-alternating")
    assert SHAPE.bytes_moved("forward") == 4096 * 32000 * 2
    assert SHAPE.bytes_moved("backward") == 2 * SHAPE.bytes_moved("forward")
    assert half.bytes_moved("forward") == 4 * 100 * 4
    assert half.bytes_moved("backward") == (4 + 8) * 100 * 4
    assert half.bytes_moved("step") == (4 + 4 + 8) * 100 * 4


def test_share_is_of_the_bandwidth_not_of_the_time():
    # Half the rows in half the time: the same bandwidth as the limit's.
    assert results.share(results.gbytes_per_s(50, 5.0), results.gbytes_per_s(100, 10.0)) == 1.0
    assert results.gbytes_per_s(4_000_000_000, 1e6) == 4.0
    assert results.share(1.0, None) is None


def test_every_shape_has_its_own_name():
    every = (*shapes.SHAPES, *shapes.DRY_SHAPES)
    assert len({s.name for s in every}) == len(every)
    assert all(shapes.find(s.name) is s for s in every)
    assert all(s.layout in shapes.LAYOUTS and s.rows % s.sequences == 0 for s in every)


def test_shapes_and_providers_are_selected_by_name():
    assert [s.name for s in shapes.select(shapes.SHAPES, ["*-f32"])] == [
        "4096x32000-f32",
        "2048x128256-f32",
    ]
    with pytest.raises(ValueError, match=r"--shapes: expected patterns .* got 7x7"):
        shapes.select(shapes.SHAPES, ["7x7"])
    assert [p.name for p in providers.select(["ours", "eager"])] == ["eager", "ours"]
    with pytest.raises(ValueError, match="--providers: expected some of"):
        providers.select(["theirs"])


def test_every_provider_has_a_label():
    assert {p.name for p in providers.PROVIDERS} | {*names.LIMITS, names.HOST_LIMIT} == set(names.PROVIDERS)


def test_buffers_exceed_three_caches():
    assert buffer_count(10, 100) == 30
    assert buffer_count(1000, 100) == 2
    assert buffer_count(1, 10**9) == 64


@pytest.mark.parametrize("shape", shapes.DRY_SHAPES, ids=lambda s: s.name)
def test_check_accepts_eager_and_ours(shape):
    case = Case(shape, CPU, 64)
    reference = Reference(case)
    for provider in providers.select(["eager", "ours"]):
        calls = provider.prepare(case)
        assert reference.check_forward(calls.forward(0)).status == "ok"
        assert reference.check_backward(calls.backward(0)).status == "ok"
        assert reference.check_backward(calls.step(1)).status == "ok"  # buffers hold the same values


@pytest.fixture
def checked():
    case = Case(shapes.Shape(64, 1000, layout="half-alternating"), CPU, 64)
    calls = providers.select(["eager"])[0].prepare(case)
    return case, Reference(case), calls.forward(0), calls.backward(0)


def test_check_rejects_a_wrong_logp(checked):
    _, reference, logp, _ = checked
    assert reference.check_forward(logp.masked_fill(logp != 0, math.nan)).status == "wrong: NaN"
    assert reference.check_forward(logp - logp.sign() * 3e-2).status == "wrong: error 3e-02"
    assert reference.check_forward(logp - 1e-3).status == "wrong: rows left out are not 0"
    assert reference.check_forward(logp[:3]).status.startswith("wrong: [3] values")


def test_check_holds_a_rounded_logp_to_its_own_dtype(checked):
    _, reference, logp, _ = checked
    assert reference.check_forward(logp.bfloat16()).status.startswith("wrong: error")
    assert reference.check_forward(logp.bfloat16(), rounded=True).status == "ok"
    assert reference.check_forward(logp * 1.02, rounded=True).status.startswith("wrong: error")


def test_check_rejects_a_gradient_without_its_softmax(checked):
    """It holds most of the norm, so a check of the whole would let it pass."""
    case, reference, _, grad = checked
    one_hot = torch.zeros_like(grad).scatter(-1, case.token_ids[:, None], case.grad_logp[:, None].bfloat16())
    one_hot[~case.row_mask] = 0
    assert reference.check_backward(one_hot).status == "wrong: error 1e+00"
    assert reference.check_backward(grad * 1.02).status.startswith("wrong: error")
    assert reference.check_backward(grad + torch.nan).status == "wrong: NaN"
    grad[1, 0] = 1e-3
    assert reference.check_backward(grad).status == "wrong: rows left out are not 0"


def test_a_wrong_provider_is_never_timed():
    ran = []

    def prepare(case):
        def forward(i):
            ran.append(i)
            return torch.full(case.token_ids.shape, math.nan)

        return Calls(forward)

    def absent(case):
        raise loading.Unavailable("not installed")

    table = [Provider("wrong", prepare), Provider("absent", absent), *providers.select(["eager"])]
    context = measure.Context(CPU, 64, None, lambda text: None)
    rows = measure.measure(shapes.DRY_SHAPES[1], table, context)
    by_name = {r.provider: r for r in rows if r.direction == "forward"}
    assert (by_name["wrong"].status, by_name["wrong"].p50) == ("wrong: NaN", None)
    assert (by_name["absent"].status, by_name["absent"].p50) == ("unavailable: not installed", None)
    assert by_name["eager"].p50 > 0
    assert by_name["eager"].method == "cpu-dry"
    assert ran == [0]  # the check itself


def test_a_provider_that_fails_leaves_the_others_alone():
    def prepare(case):
        raise RuntimeError("out of\nmemory")

    rows = measure.measure(
        shapes.DRY_SHAPES[1],
        [Provider("failing", prepare), *providers.select(["ours"])],
        measure.Context(CPU, 64, None, lambda text: None),
    )
    assert {r.status for r in rows} == {"failed: RuntimeError: out of", "ok"}


def test_dry_run_writes_outside_results_only(tmp_path, capsys):
    assert run.main(["--device", "cpu"]) == 2
    assert "outside results/" in capsys.readouterr().err
    assert run.main(["--device", "cpu", "--only", "shapes", "--shapes", "8x33*", "--out", str(tmp_path)]) == 0
    rows = results.read(tmp_path / results.RESULTS)
    assert {r.method for r in rows} == {"cpu-dry"}
    assert {r.provider for r in rows} == {"eager", "ours"}
    described = json.loads((tmp_path / "env.json").read_text())
    assert described["command"] == "python benchmarks/run.py --device cpu --only shapes --shapes 8x33*"


def test_a_run_out_of_time_says_what_is_missing(tmp_path):
    options = ["--device", "cpu", "--only", "shapes", "--max-seconds", "0", "--out", str(tmp_path)]
    assert run.main(options) == 0
    missing = json.loads((tmp_path / "env.json").read_text())["not_measured"]
    assert missing == [s.name for s in shapes.DRY_SHAPES]


def test_results_survive_the_file(tmp_path):
    rows = [
        row("ours", 64.0, share=0.5, error=1e-6, peak_bytes=7),
        row("quack", None, status="wrong: NaN"),
    ]
    results.append(tmp_path / "r.csv", rows)
    read = results.read(tmp_path / "r.csv")
    assert read == [replace(rows[0], gbytes_per_s=read[0].gbytes_per_s), rows[1]]
    assert read[0].gbytes_per_s == pytest.approx(rows[0].gbytes_per_s, rel=1e-5)


def test_comparisons_keep_to_one_method():
    """A provider that was not timed by graph replay is not compared with those that were."""
    found = Results([row("read", 60.0), row("ours", 64.0), row("eager", 30.0, method="events")])
    assert found.method(SHAPE.name, "forward") == "graph"
    assert found.microseconds(SHAPE.name, "forward", "ours") == 64.0
    assert found.microseconds(SHAPE.name, "forward", "eager") is None


def test_report_agrees_with_itself_until_someone_edits(folder, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(MARKED)
    options = ["--results", str(folder), "--readme", str(readme)]
    assert report.main([*options, "--check"]) == 1
    assert report.main([*options, "--no-charts"]) == 0
    assert report.main([*options, "--check"]) == 0
    text = readme.read_text()
    assert text.startswith("# Title")
    assert text.endswith("More.\n")
    assert "**63.0 (Liger)**" in text
    assert "64.0" in text
    for said, claimed in (("64.0", "60.0"), ("94%", "99%")):
        assert said in text
        readme.write_text(text.replace(said, claimed))
        assert report.main([*options, "--check"]) == 1
    readme.write_text("# Title\n")  # no markers
    assert report.main([*options, "--check"]) == 1
    assert report.main([*options, "--no-charts"]) == 1


def test_report_check_notices_a_stale_report(folder, tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(MARKED)
    options = ["--results", str(folder), "--readme", str(readme)]
    report.main([*options, "--no-charts"])
    with (folder / "imaginary-card" / report.REPORT).open("a") as file:
        file.write("faster than everything\n")
    assert report.main([*options, "--check"]) == 1
    assert "expected the report of the results, got another" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("readme", "code"),
    [
        (None, 0),
        ("# Title\n", 0),
        (MARKED, 0),
        (MARKED.replace(report.END, "Not measured yet.\n" + report.END), 0),
        (MARKED.replace(report.END, "| 4096 x 32000 | 60.0 |\n" + report.END), 1),
    ],
)
def test_without_results_only_claims_fail(tmp_path, readme, code):
    path = tmp_path / "README.md"
    if readme is not None:
        path.write_text(readme)
    assert report.main(["--check", "--results", str(tmp_path), "--readme", str(path)]) == code


def test_report_says_where_we_lose(folder):
    (card,) = report.find_cards(folder)
    assert [(o.provider, r.provider) for o, r in tables.lost(card.results)] == [("ours", "liger")]
    met = {direction: met for _, direction, _, met in tables.asserted(card.results)}
    assert met == {"forward": True, "backward": False}
    text = report.full_report.render(card)
    assert "| 4096 x 32000 | forward | 64.0 | Liger 63.0 | 1.6% |" in text
    assert "| 4096 x 32000 | graph | 60.0 | 64.0 | NaN | 63.0 | 800.0 |" in text
    assert "**missed**" in text
    assert "| forward, no gradient | 15.6 |" in text


def test_charts_are_drawn(folder):
    pytest.importorskip("matplotlib")
    from benchmarks import charts

    (card,) = report.find_cards(folder)
    charts.draw(card)
    for name in report.full_report.CHARTS:
        assert (card.folder / name).read_bytes().startswith(b"\x89PNG")


def test_report_needs_neither_torch_nor_matplotlib():
    code = "import sys; sys.modules.update(torch=None, matplotlib=None); import benchmarks.report"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=report.ROOT)


def test_functions_are_found_without_importing_their_package(tmp_path, monkeypatch):
    package = tmp_path / "heavy"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "light.py").write_text("VALUE = 3")
    (package / "mixed.py").write_text("import absent\n\ndef double(x):\n    return factor * x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert loading.load_file("heavy", "light.py").VALUE == 3
    assert loading.load_function("heavy", "mixed.py", "double", {"factor": 2})(4) == 8
    with pytest.raises(loading.Unavailable, match=r"heavy has no none\.py"):
        loading.load_file("heavy", "none.py")
    with pytest.raises(loading.Unavailable, match="lighter is not installed"):
        loading.load_file("lighter", "light.py")


def test_sweep_cuts_buffers_of_the_asked_alignment(monkeypatch):
    monkeypatch.setattr(sweep, "MAX_BYTES", 1 << 16)
    pool = sweep.Pool("bfloat16", CPU)
    for rows, vocab, alignment in ((4, 64, 16), (4, 64, 2), (7, 63, 16)):
        buffers = pool.buffers(rows, vocab, alignment, cache_bytes=1 << 10)
        assert len(buffers) > 2
        assert {b.data_ptr() % 16 for b in buffers} == {0 if alignment == 16 else alignment}
        ends = [b.data_ptr() + b.numel() * 2 for b in buffers]
        assert all(b.data_ptr() >= end for b, end in zip(buffers[1:], ends, strict=False))


def test_sweep_lists_the_fastest_first():
    common = {"dtype": "bfloat16", "vocab": 32000, "alignment": 16, "rows": 32}
    lines = [
        common | {"symbol": "slow", "p50": 9.0, "status": "ok"},
        common | {"symbol": "fast", "p50": 4.0, "status": "ok"},
        common | {"symbol": "bad", "p50": None, "status": "wrong: error 1e+00"},
    ]
    assert "N    32: fast 4.0, slow 9.0; WRONG: bad" in sweep.summary(lines)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_bench_without_a_gpu_is_one_line(capsys):
    assert cli.main(["bench"]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "--device: expected a GPU that PyTorch sees, got none" in line


def test_bench_refuses_wrong_results():
    torch.manual_seed(0)
    logits, ids, upstream = torch.randn(5, 50), torch.randint(50, (5,)), torch.randn(5)
    leaf = logits.clone().requires_grad_()
    logp = torch.log_softmax(leaf, -1).gather(-1, ids[:, None])[:, 0]
    (grad,) = torch.autograd.grad(logp, leaf, upstream)
    assert max(bench._errors(logits, ids, upstream, logp.detach(), grad)) < 2e-6
    with pytest.raises(ArithmeticError, match=r"got nan and"):
        bench._errors(logits, ids, upstream, logp.detach() * math.nan, grad)
    with pytest.raises(ArithmeticError, match=r"in the gradient"):
        bench._errors(logits, ids, upstream, logp.detach(), grad.clamp(min=0))


@pytest.mark.gpu
def test_bench_times_on_a_gpu(capsys):
    assert cli.main(["bench", "--shape", "64x1000", "--samples", "3"]) == 0
    assert "64 x 1000" in capsys.readouterr().out


@pytest.mark.gpu
def test_a_small_run_on_a_gpu(tmp_path):
    assert (
        run.main(
            [
                "--only",
                "shapes",
                "--shapes",
                "32x*",
                "--providers",
                "eager",
                "ours",
                "--out",
                str(tmp_path),
            ]
        )
        == 0
    )
    rows = results.read(tmp_path / results.RESULTS)
    assert {r.status for r in rows} == {"ok"}
    assert {r.method for r in rows} == {"events", "graph", "calls"}
    assert {"read", "copy", "eager", "ours"} == {r.provider for r in rows}
