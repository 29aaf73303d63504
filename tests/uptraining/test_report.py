"""The report and the progress that `uptrain` shows."""

import re

import pytest

from tests.uptraining import models as m


def test_the_report():
    model = m.linear_model()
    report = m.uptrain(model)
    text = str(report)
    for part in ("attention_1", "zero attention", "mean of V", "peak memory", "seed 0"):
        assert part in text
    first = report.layers[0]
    assert first.path == "attention_0" and len(first.after) == m.HEADS
    assert report.peak_memory is None or report.peak_memory > 1e6
    again = m.uptrain(model, steps=1, stages="attention")
    assert again.before == pytest.approx(report.after, rel=1e-4)


def test_progress_shows_the_error_and_that_of_no_attention(capsys):
    m.uptrain(m.linear_model(), verbose=2)
    text = capsys.readouterr().out
    assert "Stage 'attention': 6 steps" in text and "Stage 'features'" in text
    assert "error: " in text and "zero: 1.0000" in text


def test_lines_show_steps_error_and_time_left(capsys):
    report = m.uptrain(m.linear_model(), verbose=2, steps=44, stages=["attention"])
    lines = re.findall(
        r"^step (\d+)/44, error (0\.\d+), (\d+:\d\d) minutes left$",
        capsys.readouterr().out, re.M,
    )  # fmt: skip
    assert [int(step) for step, _, _ in lines] == [10, 20, 30, 40]
    assert float(lines[-1][1]) < 2 * report.stages[0].last
