import weakref

import keras
import numpy as np
import pytest
from keras import ops

import keras_rfattn
from keras_rfattn.layers.recording import in_order, linear_layers
from keras_rfattn.uptraining.attention import AttentionStage
from keras_rfattn.uptraining.fitting import rate_for
from keras_rfattn.uptraining.plan import planned
from tests import helpers as h
from tests.marks import first
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
    m.uptrain(m.linear_model(), stages="attention", steps=2, trainable=trainable)
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
    report = m.uptrain(model, steps=60, jit_compile="auto")
    assert report.after < 0.8 * report.before
    # A head that attends evenly would have the mean of V.
    assert report.after < 0.7 * report.mean_of_v
    features = report.stages[-1]
    assert features.last < features.first < features.zero
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


@pytest.mark.full
@pytest.mark.once
@pytest.mark.parametrize("trainable", ["query_key", "lora", "all"])
def test_own_weights_train_against_what_they_were(trainable):
    softmax = m.softmax_model()
    wanted = outputs(softmax)
    model = keras_rfattn.replace_attention(softmax, "favorpp", num_features=16, seed=0)
    caught = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            stage = self.model
            if stage.name == "features_stage" and batch == 3:
                ((output, _),) = stage.teacher(stage.outputs, m.tokens())
                caught.append(ops.convert_to_numpy(output))

    report = m.uptrain(
        model, trainable=trainable, callbacks=[Look()], lora_rank=2,
        optimizer=keras.optimizers.Adam(0.01),
    )  # fmt: skip
    # Three steps into the second stage the teacher is the checkpoint still.
    h.assert_close(caught[0], wanted, 1e-5)
    trained = {path.split("/")[-2] for path in report.trained}
    assert trained >= {"query", "key"}
    assert ("attention_output" in trained) == (trainable != "query_key")
    assert report.after < report.before
    with pytest.warns(UserWarning, match="not the checkpoint.*attention_0/query"):
        keras_rfattn.restore_attention(model)
    if trainable != "lora":
        with pytest.raises(AssertionError):
            h.assert_close(outputs(model), wanted, 1e-5)


@pytest.mark.full
@pytest.mark.once
def test_each_stage_trains_what_it_is_told_to():
    model = m.linear_model()
    own = {w.path: h.to_numpy(w) for w in model.weights if "feature_map" not in w.path}
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            moved = {
                w.path for w in model.weights
                if w.path in own and not np.array_equal(h.to_numpy(w), own[w.path])
            }  # fmt: skip
            seen.append((self.model.name, moved))

    trainable = {"attention": "maps", "features": "all"}
    report = m.uptrain(model, trainable=trainable, callbacks=[Look()])
    (first, before), (second, after) = seen
    assert (first, second) == ("attention_stage", "features_stage")
    assert not before and after == set(report.trained)
    assert any("embedding" in path for path in after)


@pytest.mark.once
@pytest.mark.parametrize(
    ("stage", "trainable", "rate"),
    [
        ("attention", "maps", 0.02),
        ("attention", "all", 0.001),
        ("features", "maps", 0.005),
        ("features", "query_key", 0.001),
        ("features", "all", 0.0001),
    ],
)
def test_rates(stage, trainable, rate):
    layers = m.linear_model("favorpp_learned", num_features=8).layers
    layers = [x for x in layers if hasattr(x, "feature_map")]
    assert rate_for(stage, trainable, "features", layers) == rate


@pytest.mark.full
@pytest.mark.once
def test_what_was_trained_is_known_after_loading(tmp_path):
    model = m.linear_model("favorpp", num_features=8)
    m.uptrain(model, trainable="query_key", steps=2)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    h.assert_same(outputs(loaded), outputs(model))
    with pytest.warns(UserWarning, match="attention_1/key/bias"):
        keras_rfattn.restore_attention(loaded)


@pytest.mark.full
@pytest.mark.once
def test_bottom_up_meets_the_linear_layers_below():
    model = m.linear_model()
    first = model.get_layer("attention_0").feature_map
    before = m.weights(first)
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            seen.append(m.weights(first))

    report = m.uptrain(model, order="bottom_up", stages="attention", callbacks=[Look()])
    assert [x.name for x in report.stages] == ["attention 0", "attention 1"]
    assert np.any(seen[0][0] != before[0])
    np.testing.assert_array_equal(seen[1][0], seen[0][0])
    # The second layer's inputs are not those of the softmax path.
    together = m.linear_model()
    m.uptrain(together, stages="attention", steps=24)
    maps = [x.get_layer("attention_1").feature_map for x in (model, together)]
    assert np.any(m.weights(maps[0])[0] != m.weights(maps[1])[0])


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


def test_bottom_up_goes_by_what_tokens_meet():
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
        model, stages="features", objective="logits", steps=30,
        optimizer=keras.optimizers.Adam(0.02),
    )  # fmt: skip
    stage = report.stages[0]
    assert stage.last < 0.9 * stage.first and stage.last < stage.zero


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


@pytest.mark.parametrize("window_dropout", first([0.999, 0.0]))
def test_windows_are_dropped_so_that_features_learn(window_dropout):
    # A window over everything is softmax itself: nothing is left to learn.
    model = m.linear_model(window=m.TOKENS)
    before = m.weights(model)
    report = m.uptrain(model, window_dropout=window_dropout)
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
    with pytest.raises(ValueError, match="`data` ended after 11 batches"):
        m.uptrain(m.linear_model(), (rows[:16] for _ in range(11)))


@pytest.mark.once
def test_a_callback_may_stop_a_stage():
    class Enough(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 2

    report = m.uptrain(m.linear_model(), callbacks=[Enough()])
    assert [stage.steps for stage in report.stages] == [3, 3]


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


class Poison(keras.utils.PyDataset):
    """Batches of vectors, one of them with a NaN."""

    def __init__(self, bad):
        super().__init__()
        self.bad = bad

    @property
    def num_batches(self):
        return None

    def __getitem__(self, index):
        x = np.random.default_rng(index).normal(size=(4, 6, 8)).astype("float32")
        if index == self.bad:
            x[0, 0] = np.nan
        return x


def test_nan_stops_and_the_last_good_weights_stay():
    def model():
        keras.utils.set_random_seed(0)
        x = keras.Input((6, 8))
        attention = keras.layers.MultiHeadAttention(2, 4, name="attention")
        result = keras.Model(x, attention(x, x))
        return keras_rfattn.replace_attention(result, "hedgehog", seed=0)

    arguments = {"stages": "attention", "optimizer": keras.optimizers.Adam(0.01)}
    broken = model()
    with pytest.raises(ValueError, match=r"not finite at its step 7 \(batch 7"):
        m.uptrain(broken, Poison(7), steps=9, **arguments)
    good = model()
    m.uptrain(good, Poison(99), steps=6, **arguments)
    for a, b in zip(m.weights(broken), m.weights(good), strict=True):
        np.testing.assert_array_equal(a, b)


def test_weights_that_turn_nan_are_not_kept():
    model = m.linear_model()
    with pytest.raises(ValueError, match="not finite"):
        m.uptrain(model, optimizer=keras.optimizers.SGD(1e39), stages="attention")
    with pytest.raises(ValueError, match="not finite at its step 1"):
        # No loss has seen the weights of the only step.
        m.uptrain(
            model, optimizer=keras.optimizers.SGD(1e39), stages="features", steps=1
        )
    assert all(np.all(np.isfinite(w)) for w in m.weights(model))


@pytest.mark.once
def test_a_training_that_breaks_off_says_what_it_has_changed():
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    model = m.linear_model("favorpp", num_features=8)
    with pytest.raises(KeyboardInterrupt):
        m.uptrain(model, trainable="query_key", callbacks=[Stop()])
    with pytest.warns(UserWarning, match="not the checkpoint.*attention_0/query"):
        keras_rfattn.restore_attention(model)


@pytest.mark.once
def test_a_training_that_breaks_off_says_where():
    class Broken(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                raise OSError("of a callback")

    with pytest.raises(OSError, match="of a callback") as found:
        m.uptrain(m.linear_model(), callbacks=[Broken()], stages="attention", steps=4)
    assert "after 2 of the 4 steps of AttentionStage" in found.value.__notes__[-1]


@pytest.mark.full
@pytest.mark.once
def test_a_teacher_that_changes_is_noticed():
    model = m.linear_model()

    class Meddle(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            weight = model.get_layer("attention_0")._value_dense.kernel
            weight.assign(weight + 1)

    with pytest.raises(ValueError, match="Weights of the teacher changed.*'attention'"):
        m.uptrain(model, callbacks=[Meddle()])


BAD = {
    "softmax": (dict(), "has no linear attention to train"),
    "stage": ({"stages": ("attention", "logits")}, "`stages` must be some of"),
    "order of stages": ({"stages": ("features", "attention")}, "in that order"),
    "no stage": ({"stages": ()}, "`stages` must be some of"),
    "steps": ({"steps": 0}, "`steps` must be a positive integer"),
    "trainable": ({"trainable": "query"}, "`trainable` must be one of"),
    "trainable of": ({"trainable": {"feature": "all"}}, "`trainable` must be one of"),
    "order": ({"order": "top_down"}, "`order` must be one of"),
    "verbose": ({"verbose": 3}, "`verbose` must be one of"),
    "seed": ({"seed": -1}, "`seed` must be"),
    "share": ({"window_dropout": 1}, "`window_dropout` must be in"),
    "padding": ({"data": np.zeros((8, m.TOKENS), "int32")}, "must hold a real token"),
    "padding, LoRA": (
        {"data": np.zeros((8, m.TOKENS), "int32"), "trainable": "lora"},
        "must hold a real token",
    ),
    "shape": ({"data": np.ones((8, m.TOKENS, 3, 3))}, "Each batch of `data` must be"),
    "texts": ({"data": ["some", "texts"]}, "has no preprocessor"),
    "stages": ({"stages": 5}, "`stages` must be some of"),
    "callbacks": ({"callbacks": 5}, "`callbacks` must be Keras callbacks"),
    "compiling": ({"jit_compile": 3}, "`jit_compile` must be one of"),
    "number": ({"data": 5}, "`data` must be arrays, texts"),
    "scalar": ({"data": np.float32(5)}, "`data` must be arrays, texts"),
    "text": ({"data": "text"}, "`data` must be arrays, texts"),
    "no row": ({"data": lambda: iter([m.tokens()[:0]])}, "must hold a row"),
    "excluded": ({"exclude": 5}, "`exclude` must be a list of texts"),
    "preprocessor": ({"preprocessor": "bert"}, "`preprocessor` must be a function"),
    "folder": ({"checkpoint_dir": 5}, "`checkpoint_dir` must be a path"),
    "folder in a file": (
        {"checkpoint_dir": f"{__file__}/folder", "trainable": "lora"},
        "`checkpoint_dir` must be a folder",
    ),
}


@pytest.mark.once
@pytest.mark.parametrize("label", BAD)
def test_bad_input_changes_nothing(label):
    arguments, message = BAD[label]
    model = m.softmax_model() if label == "softmax" else m.linear_model()
    before, flags = m.weights(model), [w.trainable for w in model.weights]
    with pytest.raises(ValueError, match=message):
        m.uptrain(model, **arguments)
    for a, b in zip(m.weights(model), before, strict=True):
        np.testing.assert_array_equal(a, b)
    assert [w.trainable for w in model.weights] == flags


class Silent(keras.Model):
    """Calls a model and puts nothing out."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x):
        self.inner(x)


def vectors(dtype=None, constraint=None, is_silent=False):
    """Two layers of attention between vectors, the second with a constraint."""
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((None, 8))
    for i, kind in enumerate((None, constraint)):
        layer = keras.layers.MultiHeadAttention(
            2, 4, dtype=dtype, kernel_constraint=kind, name=f"attention_{i}"
        )
        x = layer(x, x)
    model = keras.Model(inputs, x)
    if is_silent:
        model = Silent(model)
        model(np.ones((1, 2, 8), "float32"))
    return keras_rfattn.replace_attention(model, "hedgehog", seed=0)


@pytest.mark.once
@pytest.mark.parametrize(
    ("kinds", "trainable", "message"),
    [
        ({}, "lora", "not finite, of .*attention_0.* in batch 0"),
        ({"constraint": "max_norm"}, "lora", "`kernel_constraint`"),
        ({"is_silent": True}, "lora", "Stage 'features' compares"),
        ({"dtype": "bfloat16"}, "query_key", "are bfloat16"),
        (
            {"dtype": "bfloat16"}, {"attention": "lora", "features": "all"},
            "are bfloat16",
        ),
    ],
)  # fmt: skip
def test_refusals_add_no_adapter(kinds, trainable, message):
    model = vectors(**kinds)
    before, x = m.weights(model), np.ones((8, 5, 8), "float32")
    x[0, 0, 0] = 1.0 if kinds else np.nan  # in the first batch: it has all rows
    with pytest.raises(ValueError, match=message):
        m.uptrain(model, x, trainable=trainable)
    found = m.weights(model)
    assert len(found) == len(before)
    assert all(map(np.array_equal, found, before))


@pytest.mark.full
@pytest.mark.once
def test_narrow_weights_train_by_an_optimizer_of_ones_own():
    model = vectors(dtype="bfloat16")
    before = [x.astype("float32") for x in m.weights(model)]
    x = np.random.default_rng(0).normal(size=(8, 5, 8)).astype("float32")
    m.uptrain(model, x, trainable="query_key", optimizer=keras.optimizers.SGD(1.0))
    after = [x.astype("float32") for x in m.weights(model)]
    names = [w.path for w in model.weights]
    moved = {n for n, a, b in zip(names, before, after, strict=True) if np.any(a != b)}
    assert {n for n in names if "query/kernel" in n} <= moved


@pytest.mark.full
@pytest.mark.once
@pytest.mark.parametrize("compiles", [True, False])
def test_lists_of_inputs(compiles):
    inputs = [keras.Input((None, 8)), keras.Input((None, 8))]
    layer = keras.layers.MultiHeadAttention(2, 4)
    model = keras.Model(inputs, layer(*inputs))
    keras_rfattn.replace_attention(model, "hedgehog", seed=0)
    x = np.random.default_rng(0).normal(size=(2, 32, 6, 8)).astype("float32")
    report = m.uptrain(model, [x[0, :, :3], x[1]], jit_compile=compiles and "auto")
    assert [x.steps for x in report.stages] == [6, 6]


@pytest.mark.once
def test_nothing_to_train():
    model = m.linear_model("favorpp")
    with pytest.raises(ValueError, match="Nothing would train.*query_key"):
        m.uptrain(model)
    with pytest.raises(TypeError, match="must be a Keras model"):
        keras_rfattn.uptrain("bert", m.tokens(), steps=1)


def test_calibration_alone():
    model = m.linear_model("favorpp", num_features=8)
    report = m.uptrain(model, stages="calibrate", trainable="lora")
    assert [x.name for x in report.stages] == ["calibrate"]
    assert not any("lora" in x.path for x in model.weights)


@pytest.mark.once
def test_numbers_and_callbacks_of_other_kinds():
    model, seen = m.linear_model(), []
    callback = keras.callbacks.LambdaCallback(on_train_end=lambda logs: seen.append(1))
    report = m.uptrain(
        model, steps=np.int64(2), seed=np.int32(3), window_dropout=np.float32(0.25),
        callbacks=callback,
    )  # fmt: skip
    assert report.seed == 3 and sum(seen) == 2
    with pytest.raises(ValueError, match="`callbacks` must be Keras callbacks"):
        m.uptrain(model, callbacks=["checkpoint"])
    saver = keras.callbacks.ModelCheckpoint("best.keras")
    with pytest.raises(ValueError, match="'ModelCheckpoint'.*checkpoint_dir="):
        m.uptrain(model, callbacks=[saver])
    with pytest.raises(ValueError, match="Received: data=None"):
        keras_rfattn.uptrain(model, None, steps=2)


@pytest.mark.once
def test_a_second_uptraining_has_another_teacher():
    model = m.linear_model()
    m.uptrain(model, steps=2, stages="attention", trainable="query_key")
    with pytest.warns(UserWarning, match="as they are now, not the checkpoint's"):
        m.uptrain(model, steps=2, stages="features")


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
        assert report.stages[-1].last < 0.5 * report.stages[-1].zero
        return
    before = m.weights(model)
    with pytest.raises(ValueError, match="Outer, whose output holds no tensor"):
        m.uptrain(model)
    for a, b in zip(m.weights(model), before, strict=True):
        np.testing.assert_array_equal(a, b)


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


def test_steps_are_shared_out():
    settings = {"stages": ["attention", "features"], "steps": 5, "order": "bottom_up"}

    def plan(trains):
        found = planned(settings, [0, 1], trains)
        return [(x.name, x.steps, x.layer) for x in found]

    last = "features", 2, None
    assert plan([0, 1].__contains__) == [("attention", 2, 0), ("attention", 1, 1), last]
    # Nothing is lost on a layer that has nothing to train.
    assert plan([1].__contains__) == [("attention", 3, 1), last]


@pytest.mark.full
@pytest.mark.once
@pytest.mark.parametrize(
    ("family", "trainable"),
    [
        ("llama", "maps"),
        ("gpt_neo_x", "query_key"),
        ("smollm3", "lora"),
    ],
)
def test_decoders_with_grouped_heads(family, trainable):
    families = pytest.importorskip("tests.models.families")
    model, data = families.build(family)
    softmax = families.outputs(model, data)
    keras_rfattn.replace_attention(model, "hedgehog", seed=0)
    report = m.uptrain(
        model, data, steps=20, trainable=trainable, batch_size=2, objective="features"
    )
    assert report.after < report.before
    for stage in report.stages:
        assert stage.last < stage.first
    keras_rfattn.restore_attention(model)
    restored = families.outputs(model, data)
    same = all(np.array_equal(a, b) for a, b in zip(softmax, restored, strict=True))
    assert same == (trainable == "maps")
