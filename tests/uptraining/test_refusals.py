"""Bad arguments, models and data are refused before anything changes."""

import keras
import numpy as np
import pytest

import keras_rfattn
from keras_rfattn.uptraining import Stage
from tests.marks import SLOW_ON_JAX, first_on_jax, slow_on_jax
from tests.models import families, test_prefix_lm
from tests.uptraining import models as m

BAD = {
    "softmax": (dict(), "has no linear attention to train"),
    "stage": ({"stages": ("attention", "logits")}, "`name` must be one of"),
    "order of stages": ({"stages": ("features", "attention")}, "in this order"),
    "no stage": ({"stages": ()}, "`stages` must be some of"),
    "objective": (
        {"stages": Stage("features", objective="next_token")},
        "'next_token' needs a `CausalLM` of KerasHub in which.* Received: Functional",
    ),
    "steps": ({"steps": 0}, "`steps` must be a positive integer"),
    "verbose": ({"verbose": 3}, "`verbose` must be"),
    "seed": ({"seed": -1}, "`seed` must be"),
    "padding": ({"data": np.zeros((8, m.TOKENS), "int32")}, "must hold a real token"),
    "shape": ({"data": np.ones((8, m.TOKENS, 3, 3))}, "Each batch of `data` must be"),
    "texts": ({"data": ["some", "texts"]}, "has no preprocessor"),
    "stages": ({"stages": 5}, "`name` must be one of"),
    "callbacks": ({"callbacks": 5}, "`callbacks` must be Keras callbacks"),
    "number": ({"data": 5}, "`data` must be arrays, texts"),
    "scalar": ({"data": np.float32(5)}, "`data` must be arrays, texts"),
    "text": ({"data": "text"}, "`data` must be arrays, texts"),
    "no row": ({"data": lambda: iter([m.tokens()[:0]])}, "must hold rows"),
    "two checkpoints": (
        {"callbacks": [m.checkpoint("a"), m.checkpoint("b")]},
        "at most one of them a `BackupAndRestore`",
    ),
}


COMPUTE = ("padding", "no row")


@pytest.mark.once
@pytest.mark.parametrize(
    "label",
    # With data of the right form something is computed.
    [pytest.param(x, marks=SLOW_ON_JAX) if x in COMPUTE else x for x in BAD],
)
def test_bad_input_changes_nothing(label):
    arguments, message = BAD[label]
    model = m.softmax_model() if label == "softmax" else m.linear_model()
    before, flags = m.weights(model), [w.trainable for w in model.weights]
    with pytest.raises(ValueError, match=message):
        m.uptrain(model, **arguments)
    for a, b in zip(m.weights(model), before, strict=True):
        np.testing.assert_array_equal(a, b)
    assert [w.trainable for w in model.weights] == flags


@pytest.mark.once
@slow_on_jax
@pytest.mark.parametrize("kind", ["bart", "paligemma"])
def test_next_tokens_must_be_unseen(kind):
    if kind == "bart":
        model, x = families.build("bart")
    else:
        model, x = test_prefix_lm.paligemma(), test_prefix_lm.inputs()
    keras_rfattn.replace_attention(model, "hedgehog", seed=0)
    before = m.weights(model)
    stage = Stage("features", objective="next_token")
    with pytest.raises(ValueError, match="see earlier ones alone. Received: "):
        m.uptrain(model, x, stages=stage, steps=1, batch_size=1)
    assert all(map(np.array_equal, m.weights(model), before))


class Silent(keras.Model):
    """Calls a model and puts nothing out."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x):
        self.inner(x)


def vectors(dtype=None, is_silent=False):
    """Two layers of attention between vectors."""
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((None, 8))
    for i in range(2):
        layer = keras.layers.MultiHeadAttention(
            2, 4, dtype=dtype, name=f"attention_{i}"
        )
        x = layer(x, x)
    model = keras.Model(inputs, x)
    if is_silent:
        model = Silent(model)
        model(np.ones((1, 2, 8), "float32"))
    return keras_rfattn.replace_attention(model, "hedgehog", seed=0)


@pytest.mark.once
@pytest.mark.parametrize(
    ("kinds", "stages", "message"),
    first_on_jax([
        ({}, m.stages(), "not finite in .*attention_0.*, batch 0"),
        ({"is_silent": True}, m.stages(), "Stage 'features' compares"),
        ({"dtype": "bfloat16"}, m.stages(trainable="query_key"), "are bfloat16"),
        ({"dtype": "bfloat16"}, Stage("features", trainable="all"), "are bfloat16"),
    ]),
)  # fmt: skip
def test_refusals_change_nothing(kinds, stages, message):
    model = vectors(**kinds)
    before, x = m.weights(model), np.ones((8, 5, 8), "float32")
    x[0, 0, 0] = 1.0 if kinds else np.nan  # in the first batch: it has all rows
    with pytest.raises(ValueError, match=message):
        m.uptrain(model, x, stages=stages)
    found = m.weights(model)
    assert len(found) == len(before)
    assert all(map(np.array_equal, found, before))


@pytest.mark.full
@pytest.mark.once
def test_narrow_weights_train_by_an_optimizer_of_ones_own():
    model = vectors(dtype="bfloat16")
    before = [x.astype("float32") for x in m.weights(model)]
    x = np.random.default_rng(0).normal(size=(8, 5, 8)).astype("float32")
    stages = m.stages(trainable="query_key")
    m.uptrain(model, x, stages=stages, optimizer=keras.optimizers.SGD(1.0))
    after = [x.astype("float32") for x in m.weights(model)]
    names = [w.path for w in model.weights]
    moved = {n for n, a, b in zip(names, before, after, strict=True) if np.any(a != b)}
    assert {n for n in names if "query/kernel" in n} <= moved


@pytest.mark.once
def test_nothing_to_train():
    model = m.linear_model("favorpp")
    with pytest.raises(ValueError, match="must have weights that stage.*query_key"):
        m.uptrain(model)
    with pytest.raises(TypeError, match="must be a Keras model"):
        keras_rfattn.uptrain("bert", m.tokens(), steps=1)


@pytest.mark.once
@slow_on_jax
def test_numbers_and_callbacks_of_other_kinds():
    model, seen = m.linear_model(), []
    callback = keras.callbacks.LambdaCallback(on_train_end=lambda logs: seen.append(1))
    report = m.uptrain(model, steps=np.int64(2), seed=np.int32(3), callbacks=callback)
    assert report.seed == 3 and sum(seen) == 2
    with pytest.raises(ValueError, match="`callbacks` must be Keras callbacks"):
        m.uptrain(model, callbacks=["checkpoint"])
    saver = keras.callbacks.ModelCheckpoint("best.keras")
    with pytest.raises(ValueError, match="none a `ModelCheckpoint`.*save your model"):
        m.uptrain(model, callbacks=[saver])
    with pytest.raises(ValueError, match="Received: data=None of type"):
        keras_rfattn.uptrain(model, None, steps=2)
