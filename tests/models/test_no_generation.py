"""Tasks that do not generate with linear attention say so, and attend all the same."""

import numpy as np
import pytest

import keras_rfattn
from tests.models import families

keras_hub = pytest.importorskip("keras_hub")
pytestmark = pytest.mark.once


def blip2():
    models = keras_hub.models
    language_model = models.BLIP2CustomOPT(
        vocabulary_size=30, num_layers=1, num_heads=2, hidden_dim=16, dropout=0.0,
        intermediate_dim=16, max_sequence_length=12, num_query_tokens=0,
        qformer_hidden_dim=8,
    )  # fmt: skip
    backbone = models.BLIP2Backbone(
        vision_encoder=None, qformer=None, language_model=language_model
    )
    task = models.BLIP2CausalLM(backbone=backbone, preprocessor=None)
    return task, families.build("gpt2")[1]


def moonshine():
    backbone, inputs = families.build("moonshine")
    return keras_hub.models.MoonshineAudioToText(backbone), inputs


TASKS = {
    "blip2": blip2,
    "moonshine": moonshine,
    "qwen3_5": lambda: families.build("qwen3_5"),
}


@pytest.mark.parametrize("name", TASKS)
def test_generation_is_refused_by_name(name):
    task, inputs = TASKS[name]()
    keras_rfattn.replace_attention(task, "favorplus", num_features=8, seed=0)
    assert keras_rfattn.describe_attention(task).replaced
    expected = f"{type(task).__name__} does not generate with linear attention"
    inputs = {k: np.asarray(x) for k, x in inputs.items()}
    with pytest.raises(ValueError, match=expected):
        task.generate_step(inputs)
    keras_rfattn.restore_attention(task)
    assert not keras_rfattn.describe_attention(task).replaced
