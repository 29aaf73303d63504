"""The report and the progress that `uptrain` shows."""

import re

import keras
import pytest

from tests.uptraining import models as m

MEASURES = {
    "attention": "relative squared error of attention outputs",
    "features": "relative squared error of the model's outputs",
}
TITLE = "Uptraining of Functional 'functional\\S*' with hedgehog"


def test_the_report():
    model = m.linear_model()
    report = m.uptrain(model)
    text = str(report)
    assert re.match(TITLE, text)
    for part in ("attention_1", "uniform attention", "seed 0"):
        assert part in text
    for stage in report.stages:
        assert stage.measure == MEASURES[stage.name]
        (line,) = (x for x in text.splitlines() if x.startswith(stage.name + " "))
        figures = f"{stage.first:.4f} +{stage.last:.4f} +{stage.no_attention:.3f}"
        assert re.search(f"{figures}  {stage.measure}$", line)
    first = report.layers[0]
    assert first.path == "attention_0" and len(first.after) == m.HEADS
    again = m.uptrain(model, steps=1, stages="attention")
    assert again.before == pytest.approx(report.after, rel=1e-4)


@pytest.mark.parametrize("verbose", [1, 2])
def test_progress_is_that_of_keras_below_the_measure_and_its_control(verbose, capsys):
    errors = {}
    callback = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: errors.update({epoch: logs["error"]})
    )
    report = m.uptrain(m.linear_model(), verbose=verbose, callbacks=callback)
    title, *parts = capsys.readouterr().out.split("Stage ")
    assert re.fullmatch(TITLE, title.strip())
    # Epochs of one step, counted on from stage to stage.
    assert list(errors) == list(range(12))
    for i, (stage, part) in enumerate(zip(report.stages, parts, strict=True)):
        head, *bar = part.splitlines()
        named = f"{MEASURES[stage.name]} (no attention {stage.no_attention:.3f})"
        assert head == f"'{stage.name}', 6 steps: {named}"
        text = "\n".join(bar)
        assert all(f"Epoch {k}/" in text for k in range(6 * i + 1, 6 * i + 7))
        figures = re.findall(r" - error: (\S+) - loss: ", text)
        assert figures[-1] == f"{errors[6 * i + 5]:.4f}"


def test_silence(capsys):
    m.uptrain(m.linear_model(), steps=2)
    assert capsys.readouterr().out == ""


def test_the_measure_of_logits_is_named():
    stages = m.stages(objective="logits")
    report = m.uptrain(m.linear_model(), steps=2, stages=stages)
    assert report.stages[1].measure == "divergence of logits"
