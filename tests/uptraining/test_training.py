"""Training brings linear attention near its softmax teacher, on any data and model."""

import weakref

import keras
import keras_hub
import numpy as np
import pytest

import keras_rfattn
from keras_rfattn.layers.recording import in_order, linear_layers
from keras_rfattn.uptraining import Stage, features
from keras_rfattn.uptraining.attention import AttentionStage
from tests import helpers as h
from tests.marks import first, slow_on_jax
from tests.uptraining import models as m

LEARNED = ("hedgehog", "favorpp_learned")


def outputs(model, data=None):
    model.predict_function = None
    return model.predict(m.tokens() if data is None else data, verbose=0)


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="of PyTorch's graph")
@pytest.mark.parametrize("trainable", ["maps", "query_key"])
def test_stage_attention_does_not_hold_rows_of_attention(monkeypatch, trainable):
    import torch

    held, sizes, call = weakref.WeakSet(), [], AttentionStage.call

    class Held:
        def __init__(self, x):
            self.x = x.detach()  # else a node would hold itself
            held.add(self)

    def watched(stage, inputs):
        if not torch.is_grad_enabled():
            return call(stage, inputs)
        with torch.autograd.graph.saved_tensors_hooks(Held, lambda x: x.x):
            found = call(stage, inputs)
        sizes.append(max((x.x.numel() for x in held), default=0))
        return found

    monkeypatch.setattr(AttentionStage, "call", watched)
    stage = Stage("attention", trainable=trainable)
    m.uptrain(m.linear_model(), stages=stage, steps=2)
    # Rows: 16 sequences of m.TOKENS queries and keys each, by heads.
    assert len(sizes) == 2 and max(sizes) < 16 * m.TOKENS**2
    assert (max(sizes) > 0) == (trainable == "query_key")


@pytest.mark.once
@pytest.mark.full
@pytest.mark.parametrize("name", LEARNED)
def test_learned_maps_compiled_come_near_and_leave_the_checkpoint_alone(name):
    softmax = m.softmax_model()
    wanted, before = outputs(softmax), m.weights(softmax)
    model = keras_rfattn.replace_attention(softmax, name, seed=0)
    report = m.uptrain(model, steps=60)
    assert report.after < 0.8 * report.before
    # A head that attends evenly would have the mean of V.
    assert report.after < 0.7 * report.uniform_attention
    features = report.stages[-1]
    assert features.last < features.first < features.no_attention
    assert report.trained == () and report.parameters > 0
    keras_rfattn.restore_attention(model)
    for a, b in zip(m.weights(model), before, strict=True):
        np.testing.assert_array_equal(a, b)
    h.assert_same(outputs(model), wanted)


@pytest.mark.full
@pytest.mark.once
def test_stages_take_up_where_the_others_end():
    both = m.linear_model()
    report = m.uptrain(both, steps=16)
    assert [(x.name, x.steps) for x in report.stages] == [
        ("attention", 8), ("features", 8),
    ]  # fmt: skip
    alone = m.linear_model()
    only = m.uptrain(alone, steps=8, stages="attention")
    assert only.stages[0].last == pytest.approx(report.stages[0].last, rel=1e-4)
    assert [x.name for x in only.stages] == ["attention"]


def test_the_model_is_as_compiled_and_as_trainable_as_before():
    model = m.linear_model()
    model.layers[1].trainable = False
    model.compile("sgd", "mse")
    flags = [w.trainable for w in model.weights]
    optimizer = model.optimizer
    m.uptrain(model)
    assert [w.trainable for w in model.weights] == flags
    assert model.optimizer is optimizer
    assert all(x.recorder is None for x in model.layers if hasattr(x, "feature_map"))
    # Nothing of the teacher is left, in files neither.
    assert len(model.weights) == len(m.linear_model().weights)


@pytest.mark.full
@pytest.mark.once
def test_seeds_decide():
    found = []
    for seed in (0, 0, 1):
        model = m.linear_model()
        m.uptrain(model, seed=seed)
        found.append(m.weights(model))
    same, other = (
        all(np.array_equal(a, b) for a, b in zip(found[0], x, strict=True))
        for x in found[1:]
    )
    assert same and not other


class Backwards(keras.Model):
    """Makes its layers in another order than it calls them."""

    def __init__(self):
        super().__init__()
        for name in ("last", "first"):
            layer = keras.layers.MultiHeadAttention(1, 4, name=name)
            layer.build((None, 5, 4), (None, 5, 4))
            setattr(self, name, layer)

    def call(self, x):
        x = x + self.first(x, x)
        return x + self.last(x, x)


def test_layers_come_in_the_order_in_which_tokens_reach_them():
    model, data = Backwards(), np.ones((2, 5, 4), "float32")
    model(data)
    keras_rfattn.replace_attention(model, "hedgehog", seed=0)
    layers = linear_layers(model)
    assert [x.name for x in layers] == ["last", "first"]
    assert [x.name for x in in_order(model, layers, data)] == ["first", "last"]
    assert in_order(keras.Sequential([keras.layers.ReLU()]), layers, data) == layers


@pytest.mark.full
@pytest.mark.once
def test_logits_of_language_models():
    softmax = m.softmax_model(causal=True)
    logits = keras.layers.Dense(m.WORDS)(softmax.output)
    model = keras.Model(softmax.input, logits)
    keras_rfattn.replace_attention(model, "hedgehog", seed=0)
    # Faster than by default, as the few steps are.
    report = m.uptrain(
        model, stages=Stage("features", objective="logits"), steps=30,
        optimizer=keras.optimizers.Adam(0.02),
    )  # fmt: skip
    stage = report.stages[0]
    assert stage.last < 0.9 * stage.first and stage.last < stage.no_attention


def test_loss_of_next_tokens(monkeypatch):
    monkeypatch.setattr(features, "LARGEST", 4)
    generator = np.random.default_rng(0)
    wanted, given = generator.normal(size=(2, 2, 5, 9)).astype("float32")
    ids = generator.integers(9, size=(2, 5))
    mask = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    weight = (mask * generator.uniform(0.5, 2, (2, 5))).astype("float32")
    inputs = {"token_ids": ids, "padding_mask": mask}
    error, loss = features._prediction(
        *map(keras.ops.convert_to_tensor, (wanted, given, weight)),
        keras.tree.map_structure(keras.ops.convert_to_tensor, inputs),
    )
    entropies, divergences, all_divergences = [], [], []
    for row, place in np.argwhere(mask):
        p, q = (np.exp(x[row, place].astype("float64")) for x in (wanted, given))
        largest = np.argsort(p)[-4:]
        for among, found in ((largest, divergences), (slice(None), all_divergences)):
            a, b = (x[among] / x[among].sum() for x in (p, q))
            found.append((weight[row, place], (a * np.log(a / b)).sum()))
        if place < 4 and mask[row, place + 1]:
            entropy = -np.log(q[ids[row, place + 1]] / q.sum())
            entropies.append((weight[row, place], entropy))
    assert len(entropies) == 6 and len(divergences) == 8
    entropy, divergence, expected = (
        np.average(pairs[:, 1], weights=pairs[:, 0])
        for pairs in map(np.array, (entropies, divergences, all_divergences))
    )
    assert float(error) == pytest.approx(expected, rel=1e-4)
    assert float(loss) == pytest.approx(0.9 * entropy + 0.1 * divergence, rel=1e-4)


@pytest.mark.full
@slow_on_jax
@pytest.mark.parametrize("objective", first(["next_token", "logits"]))
def test_next_tokens_that_the_checkpoint_does_not_know(objective):
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.GPT2Backbone(
        30, num_layers=1, num_heads=2, hidden_dim=16, intermediate_dim=16,
        max_sequence_length=12,
    )  # fmt: skip
    model = keras_hub.models.GPT2CausalLM(backbone)
    keras_rfattn.replace_attention(model, "hedgehog", seed=0)
    ids = np.tile(np.arange(1, 13), (16, 1))
    data = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    stage = Stage("features", objective=objective, trainable="all")
    m.uptrain(
        model, data, stages=stage, steps=40, optimizer=keras.optimizers.Adam(0.02)
    )
    found = outputs(model, data)[0, :-1].argmax(-1)
    assert np.mean(found == ids[0, 1:]) == (1 if objective == "next_token" else 0)


@pytest.mark.full
@pytest.mark.once
@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(dtype):
    model = m.linear_model(dtype=dtype)
    report = m.uptrain(model, steps=40)
    assert report.after < 0.8 * report.before
    assert all(w.dtype == "float32" for w in model.trainable_weights)


@pytest.mark.full
@pytest.mark.once
def test_any_optimizer_and_gradient_accumulation():
    model = m.linear_model()
    optimizer = keras.optimizers.SGD(0.5, gradient_accumulation_steps=4)
    before = m.weights(model)
    m.uptrain(model, stages="attention", steps=3, optimizer=optimizer)
    same = zip(m.weights(model), before, strict=True)
    assert all(np.array_equal(a, b) for a, b in same)
    m.uptrain(model, stages="attention", steps=4, optimizer=optimizer)
    same = zip(m.weights(model), before, strict=True)
    assert not all(np.array_equal(a, b) for a, b in same)


@pytest.mark.once
@slow_on_jax
@pytest.mark.parametrize(
    ("arguments", "rate"),
    [
        ({"name": "attention"}, 0.02),
        ({"name": "attention", "trainable": "query_key"}, 0.001),
        ({"name": "features"}, 0.005),
        ({"name": "features", "objective": "logits"}, 0.001),
        ({"name": "features", "trainable": "query_key"}, 0.001),
        ({"name": "features", "trainable": "all"}, 0.0001),
    ],
)
def test_rates(arguments, rate):
    found = []

    class Look(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            schedule = self.model.optimizer.get_config()["learning_rate"]["config"]
            found.append(schedule["warmup_target"])

    model = m.linear_model("favorpp_learned", num_features=8)
    m.uptrain(model, stages=Stage(**arguments), steps=1, callbacks=[Look()])
    assert found == [rate]


@slow_on_jax
@pytest.mark.parametrize("window_dropout", first([0.999, 0.0]))
def test_windows_are_dropped_so_that_features_learn(window_dropout):
    # A window over everything is softmax itself: nothing is left to learn.
    model = m.linear_model(window=m.TOKENS)
    before = m.weights(model)
    stages = m.stages(window_dropout=window_dropout)
    report = m.uptrain(model, stages=stages)
    assert report.before == pytest.approx(0, abs=1e-6)
    changed = max(
        np.abs(a - b).max() for a, b in zip(m.weights(model), before, strict=True)
    )
    assert (changed > 1e-3) == (window_dropout > 0)


@pytest.mark.full
@pytest.mark.once
def test_generators_of_just_enough_batches():
    rows = m.tokens()
    expected = m.linear_model()
    m.uptrain(expected, lambda: (rows[:16] for _ in range(9)))
    model = m.linear_model()
    report = m.uptrain(model, (rows[:16] for _ in range(12)))
    assert sum(stage.steps for stage in report.stages) == 12
    for a, b in zip(m.weights(model), m.weights(expected), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="none for step 11"):
        m.uptrain(m.linear_model(), (rows[:16] for _ in range(11)))


@pytest.mark.full
@pytest.mark.once
def test_lists_of_inputs():
    inputs = [keras.Input((None, 8)), keras.Input((None, 8))]
    layer = keras.layers.MultiHeadAttention(2, 4)
    model = keras.Model(inputs, layer(*inputs))
    keras_rfattn.replace_attention(model, "hedgehog", seed=0)
    x = np.random.default_rng(0).normal(size=(2, 32, 6, 8)).astype("float32")
    report = m.uptrain(model, [x[0, :, :3], x[1]])
    assert [x.steps for x in report.stages] == [6, 6]


@pytest.mark.full
@pytest.mark.once
@pytest.mark.parametrize("kind", ["list", "none"])
def test_outputs_without_names(kind):
    softmax = m.softmax_model()

    class Outer(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = softmax

        def call(self, x):
            y = self.inner(x)
            return [y, keras.ops.mean(y, axis=1)] if kind == "list" else None

    model = Outer()
    model(m.tokens())
    keras_rfattn.replace_attention(model, "hedgehog", seed=0)
    if kind == "list":
        report = m.uptrain(model, steps=20)
        assert report.stages[-1].last < 0.5 * report.stages[-1].no_attention
        return
    before = m.weights(model)
    with pytest.raises(ValueError, match="Outer, whose output holds no tensor"):
        m.uptrain(model)
    for a, b in zip(m.weights(model), before, strict=True):
        np.testing.assert_array_equal(a, b)


@slow_on_jax
def test_batches_of_any_length():
    # Keras looks at the first two on TensorFlow.
    rows = m.tokens()
    inputs = {k: keras.Input((None,), name=k) for k in ("tokens", "padding_mask")}
    x = keras.layers.Embedding(m.WORDS, 8)(inputs["tokens"])
    x = keras.layers.MultiHeadAttention(2, 4)(x, x, key_mask=inputs["padding_mask"])
    model = keras.Model(inputs, x)
    keras_rfattn.replace_attention(model, "hedgehog", seed=0)

    def batches():
        for length in (5, 5, 12, 7, 5, 12):
            yield {"tokens": rows[:8, :length], "padding_mask": rows[:8, :length] > 0}

    report = m.uptrain(model, batches, steps=6, stages="attention")
    assert report.stages[-1].steps == 6


@pytest.mark.full
@pytest.mark.once
@pytest.mark.parametrize(
    ("family", "trainable"), [("llama", "maps"), ("gpt_neo_x", "query_key")]
)
def test_decoders_with_grouped_heads(family, trainable):
    families = pytest.importorskip("tests.models.families")
    model, data = families.build(family)
    softmax = families.outputs(model, data)
    keras_rfattn.replace_attention(model, "hedgehog", seed=0)
    stages = m.stages(trainable=trainable, objective="features")
    report = m.uptrain(model, data, steps=20, stages=stages, batch_size=2)
    assert report.after < report.before
    for stage in report.stages:
        assert stage.last < stage.first
    keras_rfattn.restore_attention(model)
    restored = families.outputs(model, data)
    same = all(np.array_equal(a, b) for a, b in zip(softmax, restored, strict=True))
    assert same == (trainable == "maps")


@pytest.mark.once
def test_sample_weights_weigh_the_tokens_of_stage_features():
    data = m.tokens()
    ones, half = np.ones((2, *data.shape), "float32")
    half[:, ::2] = 0
    weights = {"none": None, "ones": ones, "rows": ones[:, 0], "half": half}
    trained = {}
    for name, weight in weights.items():
        model = m.linear_model()
        m.uptrain(model, (data, None, weight), stages="features", steps=3)
        trained[name] = np.concatenate([x.ravel() for x in m.weights(model)])
    h.assert_close(trained["ones"], trained["none"], 1e-6)
    h.assert_close(trained["rows"], trained["none"], 1e-6)
    with pytest.raises(AssertionError, match="relative error"):
        h.assert_close(trained["half"], trained["none"], 1e-4)
