"""The demo: it learns within its error bound, runs fused kernels, and fails when it must."""

from __future__ import annotations

import re

import pytest
import torch

from fused_logp_hub.cli import demo, grpo, main, task


def test_demo_improves_within_the_error_bound(capsys):
    assert main(["demo", "--device", "cpu", "--steps", "8"]) == 0
    text = capsys.readouterr().out
    before, after = map(float, re.search(r"([\d.]+) before, ([\d.]+) after", text).groups())
    assert after > before + 0.1
    logp_error, grad_error = re.search(r"\|logp difference\| (\S+), .* difference (\S+)", text).groups()
    assert 0 < float(logp_error) <= 1e-5
    assert 0 < float(grad_error) <= 1e-5
    assert "logp_forward: reference\n" in text
    assert "logp_backward: reference\n" in text


def test_demo_fails_beyond_the_error_bound(capsys, monkeypatch):
    monkeypatch.setattr(demo, "ERROR_BOUND", 0.0)
    assert main(["demo", "--device", "cpu", "--steps", "1"]) == 1
    assert "error: expected at most 0e+00 from float64" in capsys.readouterr().err


def test_demo_fails_without_a_rise(capsys, monkeypatch):
    monkeypatch.setattr(grpo.Trainer, "evaluate", lambda self: 0.5)
    assert main(["demo", "--device", "cpu", "--steps", "1"]) == 1
    assert "reward: expected a rise from 0.500, got 0.500" in capsys.readouterr().err


@pytest.mark.gpu
def test_demo_runs_the_fused_kernels(capsys, ran):
    assert main(["demo", "--device", "cuda", "--steps", "8"]) == 0
    text = capsys.readouterr().out
    assert "logp_forward: reference" not in text
    assert any(symbol.startswith("logp_forward") for symbol in ran)
    assert any(symbol.startswith("logp_backward") for symbol in ran)


def test_demo_task_and_labels():
    prompt = torch.tensor([[task.PAD, 3, 1, 4, 1, task.SORT]])
    answer = torch.tensor([[1, 1, 3, 4, task.END, task.PAD]])
    assert task.answers(prompt).tolist() == answer.tolist()
    assert task.reward(prompt, answer).item() == 1.0
    assert task.reward(prompt, answer.roll(1)).item() == pytest.approx(1 / 5)
    # PAD before END is a token that was chosen; after END nothing was.
    completion = torch.tensor([[1, task.PAD, task.END, task.PAD, task.PAD, task.PAD]])
    labels = grpo.make_labels(torch.cat([prompt, completion], 1))
    ignored = [grpo.IGNORE]
    assert labels.tolist() == [ignored * 5 + [1, task.PAD, task.END] + ignored * 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps: expected at least 1, got 0."),
        (["--device", "abacus"], "--device: expected cpu or cuda[:index], got 'abacus'."),
        (["--device", "meta"], "--device: expected cpu or cuda[:index], got 'meta'."),
        (["--device", "cuda:99"], "got 'cuda:99'. Run `fused-logp-hub doctor`."),
        (["--device", "cpu", "--kernel", "tma"], "kernel: expected auto or reference on the CPU"),
    ],
)
def test_demo_with_impossible_options(capsys, arguments, message):
    assert main(["demo", *arguments]) == 1
    assert message in capsys.readouterr().err
