"""The report and the progress that `uptrain` shows."""

import re

import pytest

from tests.uptraining import models as m

MEASURES = {
    "attention": "relative squared error of attention outputs",
    "features": "relative squared error of the model's outputs",
}
TITLE = "Uptraining of Functional 'functional\\S*' with hedgehog, width 8"


def test_the_report():
    model = m.linear_model()
    report = m.uptrain(model)
    text = str(report)
    assert re.match(TITLE, text)
    for part in ("attention_1", "uniform attention", "peak memory", "seed 0"):
        assert part in text
    for stage in report.stages:
        assert stage.measure == MEASURES[stage.name]
        (line,) = (x for x in text.splitlines() if x.startswith(stage.name + " "))
        figures = f"{stage.first:.4f} +{stage.last:.4f} +{stage.no_attention:.3f}"
        assert re.search(f"{figures}  {stage.measure}$", line)
    first = report.layers[0]
    assert first.path == "attention_0" and len(first.after) == m.HEADS
    assert report.peak_memory is None or report.peak_memory > 1e6
    again = m.uptrain(model, steps=1, stages="attention")
    assert again.before == pytest.approx(report.after, rel=1e-4)


def test_the_bar_shows_one_figure_per_stage(capsys):
    report = m.uptrain(m.linear_model(), verbose=1)
    text = capsys.readouterr().out
    last = [re.findall(r" - (.*)", line.split("\b")[-1]) for line in text.splitlines()]
    figures = [f"relative squared error: {stage.last:.4f}" for stage in report.stages]
    # Keras pads a line that is shorter than the one that it overwrites.
    assert [x.rstrip() for found in last for x in found] == figures
    for word in ("zero", "mean_of_v", "loss", "Measuring"):
        assert word not in text


def test_lines_name_the_measure_and_its_controls(capsys):
    report = m.uptrain(m.linear_model(), verbose=2, steps=44)
    title, *lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(TITLE, title)
    attention, features = report.stages
    controls = {
        "attention": f"1.000, uniform attention {report.uniform_attention:.3f}",
        "features": f"{features.no_attention:.3f}",
    }
    for stage in report.stages:
        head, *steps = lines[:4]
        del lines[:4]
        named = f"{MEASURES[stage.name]} (no attention {controls[stage.name]})"
        assert head == f"Stage '{stage.name}', 22 steps: {named}"
        pattern = r"step (\d+)/22, relative squared error (0\.\d+), 0 min \d\d s left"
        found = [re.fullmatch(pattern, line).groups() for line in steps]
        assert [int(step) for step, _ in found] == [10, 20, 22]
        # The last figure is the report's.
        assert found[-1][1] == f"{stage.last:.4f}"
    assert not lines and attention.last != features.last


def test_the_measure_of_logits_is_named():
    stages = m.stages(objective="logits")
    report = m.uptrain(m.linear_model(), steps=2, stages=stages)
    assert report.stages[1].measure == "divergence of logits"
