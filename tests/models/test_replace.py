"""Surgery on plain Keras models, and everything it refuses."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest

import keras_rfattn
from keras_rfattn import feature_maps, papers
from keras_rfattn.models import Plan
from keras_rfattn.ops import Options
from tests.marks import first

LAYERS = keras.layers


@keras.saving.register_keras_serializable("test")
class Block(LAYERS.Layer):
    """A user's block that builds its attention from hyper-parameters."""

    def __init__(self, heads=2, causal=False, **kwargs):
        super().__init__(**kwargs)
        self.heads, self.causal = heads, causal
        self.attention = LAYERS.MultiHeadAttention(heads, 8, name="attention")

    def build(self, input_shape):
        self.attention.build(input_shape, input_shape)

    def call(self, x):
        return x + self.attention(x, x, use_causal_mask=self.causal)

    def get_config(self):
        return {**super().get_config(), "heads": self.heads, "causal": self.causal}


class Unregistered(keras.Model):
    def __init__(self):
        super().__init__()
        self.block, self.head = Block(name="block"), LAYERS.Dense(3)

    def call(self, x):
        return self.head(self.block(x))


def functional(causal=False):
    inputs = keras.Input((None, 8))
    x = LAYERS.MultiHeadAttention(2, 4, name="first")(
        inputs, inputs, use_causal_mask=causal
    )
    x = LAYERS.GroupQueryAttention(4, 4, 2, name="second")(x, x, use_causal_mask=causal)
    return keras.Model(inputs, LAYERS.Dense(3, name="head")(x))


def sequential():
    return keras.Sequential([keras.Input((6, 8)), Block(), LAYERS.Dense(3)])


def nested():
    inputs = keras.Input((6, 8))
    inner = keras.Model(inputs, Block(name="inner_block")(inputs), name="inner")
    outer = keras.Input((6, 8))
    x = inner(outer)
    return keras.Model(outer, LAYERS.MultiHeadAttention(2, 4, name="top")(x, x))


def subclassed():
    model = Unregistered()
    model(data())
    return model


MODELS = {
    "functional": functional,
    "functional_causal": lambda: functional(causal=True),
    "sequential": sequential,
    "nested": nested,
    "subclassed": subclassed,
}


def data():
    return np.random.default_rng(0).normal(size=(2, 6, 8)).astype("float32")


def make(name="functional"):
    keras.utils.set_random_seed(0)
    return MODELS[name]()


def output(model):
    return keras.ops.convert_to_numpy(model(data()))


def snapshot(model):
    return [(type(x), x.name) for x in model._flatten_layers()], [
        (w.path, id(w)) for w in model.weights
    ]


@pytest.mark.parametrize("name", MODELS)
def test_replace_and_restore(name):
    model = make(name)
    softmax, before = output(model), snapshot(model)
    assert keras_rfattn.replace_attention(model, "favorplus", seed=0) is model
    assert np.abs(output(model) - softmax).max() > 1e-4 * np.abs(softmax).max()
    assert len(keras_rfattn.describe_attention(model).replaced) >= 1
    assert keras_rfattn.restore_attention(model) is model
    assert snapshot(model) == before
    np.testing.assert_array_equal(output(model), softmax)


def test_some_layers_are_restored(tmp_path):
    first, second = (x.path for x in keras_rfattn.describe_attention(make()).rows)
    model = keras_rfattn.replace_attention(make(), "favorplus", seed=0)
    assert keras_rfattn.restore_attention(model, include=first) is model
    expected = make()
    keras_rfattn.replace_attention(expected, "favorplus", seed=0, include=second)
    np.testing.assert_array_equal(output(model), output(expected))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(output(loaded), output(model))
    before = snapshot(model)
    for include in (first, [first, second]):
        with pytest.raises(ValueError, match="`include` must select layers with lin"):
            keras_rfattn.restore_attention(model, include=include)
    with pytest.raises(ValueError, match="`include`"):
        keras_rfattn.restore_attention(model, include="nowhere")
    assert snapshot(model) == before
    keras_rfattn.restore_attention(model, include=second)
    assert not keras_rfattn.describe_attention(model).replaced


@pytest.mark.smoke
@pytest.mark.parametrize("name", [n for n in MODELS if n != "subclassed"])
def test_keras_file_round_trip(name, tmp_path):
    model = keras_rfattn.replace_attention(make(name), "favorpp", seed=3)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(output(loaded), output(model))
    assert len(keras_rfattn.describe_attention(loaded).replaced) == len(
        keras_rfattn.describe_attention(model).replaced
    )


@pytest.mark.parametrize("name", [n for n in MODELS if n != "subclassed"])
def test_clone_model(name):
    model = keras_rfattn.replace_attention(make(name), "favorplus", seed=3)
    clone = keras.models.clone_model(model)
    assert len(keras_rfattn.describe_attention(clone).replaced) == len(
        keras_rfattn.describe_attention(model).replaced
    )
    clone.set_weights(model.get_weights())
    np.testing.assert_allclose(output(clone), output(model), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["functional", "nested"])
def test_config_round_trip(name):
    model = keras_rfattn.replace_attention(make(name), "favorplus", seed=3)
    rebuilt = type(model).from_config(model.get_config())
    report = keras_rfattn.describe_attention(rebuilt)
    assert len(report.replaced) == len(report.rows) == 2
    rebuilt.set_weights(model.get_weights())
    np.testing.assert_allclose(output(rebuilt), output(model), rtol=1e-6, atol=1e-6)


def test_subclassed_model_never_reverts_in_silence(tmp_path):
    model = keras_rfattn.replace_attention(make("subclassed"), "elu")
    model.save_weights(tmp_path / "m.weights.h5")
    fresh = make("subclassed")
    with pytest.raises(ValueError, match="objects could not be loaded"):
        fresh.load_weights(tmp_path / "m.weights.h5")
    keras_rfattn.replace_attention(fresh, "elu")
    fresh.load_weights(tmp_path / "m.weights.h5")
    np.testing.assert_array_equal(output(fresh), output(model))


def test_softmax_weights_load_into_a_replaced_model(tmp_path):
    model = make()
    softmax = output(model)
    model.save_weights(tmp_path / "softmax.weights.h5")
    keras.utils.set_random_seed(5)
    other = keras_rfattn.replace_attention(MODELS["functional"](), "favorpp", seed=0)
    other.load_weights(tmp_path / "softmax.weights.h5")
    keras_rfattn.restore_attention(other)
    np.testing.assert_array_equal(output(other), softmax)


def test_weights_of_another_mechanism_are_refused(tmp_path):
    saved = keras_rfattn.replace_attention(make(), "favorplus", num_features=16)
    saved.save_weights(tmp_path / "m.weights.h5")
    other = keras_rfattn.replace_attention(make(), "relu", num_features=16)
    with pytest.raises(ValueError, match="mechanism"):
        other.load_weights(tmp_path / "m.weights.h5")


def test_a_config_without_its_entry_is_refused():
    model = keras_rfattn.replace_attention(make("sequential"), "favorplus")
    block = model.layers[0]
    config = block.get_config()
    config.pop("attention")
    with pytest.raises(ValueError, match="attention"):
        type(block).from_config(config)
    newer = block.get_config()
    newer["attention"]["format"] = 99
    with pytest.raises(ValueError, match="format"):
        type(block).from_config(newer)


def test_projection_and_statistics_come_back(tmp_path):
    model = keras_rfattn.replace_attention(make("functional_causal"), "favorpp", seed=1)
    maps = [model.get_layer(n).feature_map for n in ("first", "second")]
    maps[0].redraw()
    for i, feature_map in enumerate(maps):
        feature_map.adapt([np.random.default_rng(i).normal(size=(2, 2, 9, 4))] * 3)
    model.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    for a, b in zip(model.weights, loaded.weights, strict=True):
        np.testing.assert_array_equal(
            keras.ops.convert_to_numpy(a), keras.ops.convert_to_numpy(b)
        )
    rows = keras_rfattn.describe_attention(loaded).rows
    assert [row.note for row in rows] == ["calibrated"] * 2
    assert int(loaded.get_layer("first").feature_map.draws) == 1


def test_layers_draw_different_vectors_and_seeds_reproduce():
    def vectors(seed):
        model = keras_rfattn.replace_attention(
            functional(), "favorplus", num_features=8, seed=seed
        )
        layers = [model.get_layer(n) for n in ("first", "second")]
        return [
            keras.ops.convert_to_numpy(x.feature_map.vectors)[0].ravel() for x in layers
        ]

    a, b = vectors(0)
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.9 and not np.array_equal(a, b)
    for x, y in zip(vectors(0), (a, b), strict=True):
        np.testing.assert_array_equal(x, y)
    assert not np.array_equal(vectors(1)[0], a)


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("first", None, ["first"]),
        (["*o*d"], None, ["second"]),
        (None, "first", ["second"]),
        ("*", ["s*"], ["first"]),
    ],
)
def test_include_and_exclude(include, exclude, expected):
    model = make()
    keras_rfattn.replace_attention(model, "elu", include=include, exclude=exclude)
    report = keras_rfattn.describe_attention(model)
    assert [row.path for row in report.replaced] == expected
    assert [row.note for row in report.kept] == ["kept: not selected"]
    # What was left can follow.
    keras_rfattn.replace_attention(model, "favorplus", exclude=expected)
    assert len(keras_rfattn.describe_attention(model).replaced) == 2


BAD = {
    "unknown mechanism": (dict(feature_map="favourplus"), ValueError, "favorplus"),
    "zero features": (dict(num_features=0), ValueError, "num_features"),
    "negative features": (dict(num_features=-4), ValueError, "num_features"),
    "fractional features": (dict(num_features=2.5), ValueError, "num_features"),
    "wrong type": (dict(feature_map=3), TypeError, "feature_map"),
    "seed": (dict(seed=-1), ValueError, "seed"),
    "block size": (dict(block_size=0), ValueError, "block_size"),
    "pattern": (dict(include="nowhere*"), ValueError, "first"),
    "include type": (dict(include=3), TypeError, "include"),
    "no such layer": (
        dict(feature_map=Plan({"nowhere": Options()})),
        ValueError,
        "`maps` must have paths.*Received: .nowhere., which matches none",
    ),
    "no such head": (
        dict(softmax_heads=[3]),
        ValueError,
        "heads of first, from 0 to 1. Received: softmax_heads=.3,",
    ),
    "no such head of a plan": (
        dict(feature_map=Plan({"second": Options(softmax_heads=[2]), "*": "elu"})),
        ValueError,
        "heads of second, from 0 to 1. Received: softmax_heads=.2,",
    ),
    "every head": (
        dict(softmax_heads=[0, 1]),
        ValueError,
        "all 2 key/value heads of first",
    ),
    "window of a plan": (
        dict(feature_map=Plan({"*": ("elu", Options(window=3))})),
        ValueError,
        "`window` must be `None` for 'elu'",
    ),
    "an option's name": (dict(windw=3), TypeError, "windw=3. Did you mean `window`"),
    "an argument's name": (dict(excude="a"), TypeError, "Did you mean `exclude`"),
    "nothing left": (dict(exclude="*"), ValueError, "must leave layers to replace"),
    "map and width": (
        dict(feature_map=papers.Favor(8), num_features=8),
        ValueError,
        "num_features",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_change_nothing(case):
    arguments, error, text = BAD[case]
    model = make("functional_causal")
    before, softmax = snapshot(model), output(model)
    with pytest.raises(error, match=text):
        keras_rfattn.replace_attention(model, **arguments)
    assert snapshot(model) == before
    np.testing.assert_array_equal(output(model), softmax)


def test_bad_models():
    dense = keras.Sequential([keras.Input((3,)), LAYERS.Dense(2)])
    with pytest.raises(ValueError, match="must have attention.*Dense"):
        keras_rfattn.replace_attention(dense)
    for thing in (None, "model", LAYERS.MultiHeadAttention, object()):
        with pytest.raises(TypeError, match="Keras model or layer"):
            keras_rfattn.replace_attention(thing)
        with pytest.raises(TypeError, match="Keras model or layer"):
            keras_rfattn.describe_attention(thing)
    with pytest.raises(ValueError, match="built"):
        keras_rfattn.replace_attention(Unregistered())
    with pytest.raises(ValueError, match="must have linear attention"):
        keras_rfattn.restore_attention(make())
    layer = LAYERS.MultiHeadAttention(2, 4)
    layer.build((2, 3, 8), (2, 3, 8))
    with pytest.raises(ValueError, match="keras_rfattn.layers"):
        keras_rfattn.replace_attention(layer)


def test_replacing_twice_is_refused():
    model = keras_rfattn.replace_attention(make(), "favorplus", seed=0)
    before, linear = snapshot(model), output(model)
    with pytest.raises(ValueError, match="already linear"):
        keras_rfattn.replace_attention(model, "elu")
    assert snapshot(model) == before
    np.testing.assert_array_equal(output(model), linear)


def test_unsupported_attention_is_refused_by_name():
    inputs = keras.Input((6, 8))
    x = LAYERS.MultiHeadAttention(2, 4, sliding_window=3, name="window")(inputs, inputs)
    x = LAYERS.MultiHeadAttention(2, 4, name="plain")(x, x)
    x = LAYERS.Attention(name="single")([x, x])
    model = keras.Model(inputs, x)
    before = snapshot(model)
    with pytest.raises(ValueError, match="(?s)linear.*single .Attention.: a single"):
        keras_rfattn.replace_attention(model, "favorplus")
    assert snapshot(model) == before
    keras_rfattn.replace_attention(model, "favorplus", exclude="single")
    report = keras_rfattn.describe_attention(model)
    assert [row.path for row in report.replaced] == ["plain"]
    assert [row.path for row in report.local] == ["window"]


def test_windows_of_cross_attention_are_refused_before_anything_changes():
    inputs, others = keras.Input((6, 8)), keras.Input((9, 8))
    x = LAYERS.MultiHeadAttention(2, 4, name="own")(inputs, value=inputs)
    x = LAYERS.MultiHeadAttention(2, 4, name="cross")(x, others)
    model = keras.Model([inputs, others], x)
    before = snapshot(model)
    by_key = LAYERS.MultiHeadAttention(2, 4, name="by_key")(inputs, inputs, key=-inputs)
    with pytest.raises(ValueError, match="(?s)needs self-attention.*by_key"):
        keras_rfattn.replace_attention(keras.Model(inputs, by_key), window=3)
    with pytest.raises(ValueError, match="(?s)needs self-attention.*cross"):
        keras_rfattn.replace_attention(model, "favorplus", window=3)
    assert snapshot(model) == before
    keras_rfattn.replace_attention(model, "favorplus", window=3, exclude="cross")
    assert model([data(), np.ones((2, 9, 8), "float32")]).shape == (2, 6, 8)


def test_attention_scores_and_dense_masks_are_refused():
    model = keras_rfattn.replace_attention(make(), "favorplus")
    layer, x = model.get_layer("first"), keras.ops.convert_to_tensor(data())
    with pytest.raises(ValueError, match="return_attention_scores"):
        layer(x, x, return_attention_scores=True)
    random = np.random.default_rng(0).random((2, 6, 6)) > 0.5
    with pytest.raises(ValueError, match="neither key padding nor causal"):
        layer(x, x, attention_mask=random)
    causal = np.tril(np.ones((2, 6, 6), bool))
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(layer(x, x, attention_mask=causal)),
        keras.ops.convert_to_numpy(layer(x, x, use_causal_mask=True)),
        rtol=1e-6,
        atol=1e-6,
    )


def test_traced_dense_masks_are_refused():
    if keras.backend.backend() == "torch":
        pytest.skip("PyTorch runs eagerly: mask values are always at hand")
    inputs, mask = keras.Input((6, 8)), keras.Input((6, 6), dtype="bool")
    x = LAYERS.MultiHeadAttention(2, 4)(inputs, inputs, attention_mask=mask)
    model = keras.Model([inputs, mask], x)
    keras_rfattn.replace_attention(model, "favorplus")
    with pytest.raises(ValueError, match="compiled function"):
        model.predict([data(), np.tril(np.ones((2, 6, 6), bool))], verbose=0)


@pytest.mark.smoke
@pytest.mark.parametrize("when", first(["compiled", "trained"]))
def test_compiled_models_keep_training(when):
    model, target = make(), np.zeros((2, 6, 3), "float32")
    model.compile("adam", "mse")
    if when == "trained":
        model.fit(data(), target, verbose=0)
    softmax = model.predict(data(), verbose=0)
    keras_rfattn.replace_attention(model, "favorpp", num_features=32, seed=0)
    linear = model.predict(data(), verbose=0)
    assert np.abs(linear - softmax).max() > 1e-4
    np.testing.assert_allclose(linear, output(model), rtol=1e-4, atol=1e-5)
    loss = model.fit(data(), target, epochs=3, verbose=0).history["loss"]
    assert loss[-1] < loss[0]
    # Training stores no statistics of FAVOR++.
    notes = [row.note for row in keras_rfattn.describe_attention(model).rows]
    assert notes == ["statistics per sequence"] * 2
    keras_rfattn.restore_attention(model)
    model.fit(data(), target, verbose=0)


def test_report_prints_a_table():
    model = keras_rfattn.replace_attention(
        make("functional_causal"), "favorplus", num_features=32, exclude="second"
    )
    text = str(keras_rfattn.describe_attention(model))
    for part in ("first", "second", "favorplus", "causal", "width 32", "not selected"):
        assert part in text
    report = keras_rfattn.describe_attention(model)
    added = 2 * 4 * 32 + 2 * 32 + 2 + 1
    assert report.parameters_added == report.replaced[0].parameters_added == added
    crossover = report.replaced[0].crossover
    for length, is_short in ((crossover, True), (crossover + 1, False)):
        text = str(dataclasses.replace(report, max_length=length))
        assert ("but the model takes" in text) == is_short


@pytest.mark.parametrize("name, beside", [
    ("functional_causal", "the window before"), ("functional", "the windows beside"),
])  # fmt: skip
def test_report_tells_what_a_sliding_window_sees(name, beside):
    model = keras_rfattn.replace_attention(
        make(name), "favorplus", window=4, sliding=True
    )
    notes = [row.note for row in keras_rfattn.describe_attention(model).rows]
    assert notes == [f"exact within 4 tokens and {beside}"] * 2


def test_weights_live_under_the_layers_name():
    model = keras_rfattn.replace_attention(make(), "favorplus", num_features=8)
    paths = {w.path for w in model.weights}
    assert "first/feature_map/vectors" in paths
    assert "first/query/kernel" in paths


@pytest.mark.full
@pytest.mark.once
def test_a_fresh_process_without_the_package_refuses(tmp_path):
    model = keras_rfattn.replace_attention(make(), "favorplus")
    model.save(tmp_path / "m.keras")
    script = f"import keras; keras.saving.load_model(r'{tmp_path / 'm.keras'}')"
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "Could not locate class" in done.stderr


def test_a_path_with_brackets_is_found():
    x = keras.Input((6, 8))
    layer = keras.layers.MultiHeadAttention(2, 4, name="block[0]")
    model = keras.Model(x, layer(x, x))
    keras_rfattn.replace_attention(model, "favorplus", include="block[0]")
    assert len(keras_rfattn.describe_attention(model).replaced) == 1


def planned(values, **arguments):
    """Mechanism and options of both layers of a model."""
    model = make("functional_causal")
    keras_rfattn.replace_attention(model, Plan(values), **arguments)
    layers = [model.get_layer(name) for name in ("first", "second")]
    names = [row.mechanism for row in keras_rfattn.describe_attention(model).rows]
    return names, [getattr(x, "options", None) for x in layers]


def test_plans_give_maps_and_options():
    window, heads = Options(window=3), Options(softmax_heads=[1])
    assert planned({"first": "elu"}) == (["elu", "softmax"], [Options(), None])
    assert planned({"s*": None, "*": "elu"}) == (["elu", "softmax"], [Options(), None])
    # The first pattern counts, and the call's options are for those without their own.
    assert planned({"first": ("favorplus", window), "*": "relu"}, block_size=2) == (
        ["favorplus", "relu"], [window, Options(block_size=2)]
    )  # fmt: skip
    # Options alone leave the map to later patterns, or to the default.
    assert planned({"first": heads, "*": ("favorplus", window)}) == (
        ["favorplus"] * 2, [heads, window]
    )  # fmt: skip
    assert planned({"first": heads, "s*": window, "*": None}) == (
        [feature_maps.DEFAULT] * 2, [heads, window]
    )  # fmt: skip


def test_include_and_exclude_are_short_for_plans():
    model, outputs = make(), []
    for arguments in (
        {"feature_map": Plan({"first": None, "*": "favorplus"})},
        {"feature_map": Plan({"second": "favorplus"})},
        {"feature_map": "favorplus", "exclude": "first"},
        {"feature_map": "favorplus", "include": "second"},
    ):
        keras_rfattn.replace_attention(model, seed=0, **arguments)
        outputs.append(output(model))
        keras_rfattn.restore_attention(model)
        np.testing.assert_array_equal(outputs[-1], outputs[0])
    assert np.abs(outputs[0] - output(model)).max() > 1e-4


def test_one_default_map_for_models_and_layers():
    model = keras_rfattn.replace_attention(make())
    layer = keras_rfattn.layers.MultiHeadAttention(2, 4)
    grouped = keras_rfattn.layers.GroupedQueryAttention(4, 4, 2)
    for made in (model.get_layer("first"), layer, grouped):
        name = feature_maps.name_of(made.feature_map)
        assert name == feature_maps.DEFAULT == "favorpp_learned"
