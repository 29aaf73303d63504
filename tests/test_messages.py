"""Wrong arguments of public functions: one form of error, before anything changes."""

import re
from functools import partial

import keras
import numpy as np
import pytest

import keras_rfattn
from keras_rfattn import (
    diagnostics,
    distribution,
    feature_maps,
    generation,
    layers,
    models,
    ops,
    papers,
    projections,
)
from tests.helpers import NAMES
from tests.marks import first_on_jax

pytestmark = pytest.mark.once

X = np.random.default_rng(0).normal(size=(2, 4, 8)).astype("float32")
IDS = np.ones((1, 2), "int32")


def softmax_model():
    x = keras.Input((4, 8))
    return keras.Model(x, keras.layers.MultiHeadAttention(2, 4, name="a")(x, x))


def linear_model():
    return keras_rfattn.replace_attention(
        softmax_model(), "favorplus", num_features=4, seed=0
    )


class Unbuilt(keras.Model):
    def call(self, x):
        return x


def refused(call, text=""):
    """Asserts that a call is refused in Keras' form, and by this package."""
    with pytest.raises((TypeError, ValueError)) as error:
        call()
    message = str(error.value)
    assert "Received" in message and re.search(r"`\w+`", message), message
    assert re.search(text, message, re.DOTALL), message
    last = error.traceback[-1].path
    assert "keras_rfattn" in str(last), f"raised in {last}: {message}"


TAKE_A_MODEL = {
    "replace_attention": keras_rfattn.replace_attention,
    "restore_attention": keras_rfattn.restore_attention,
    "describe_attention": keras_rfattn.describe_attention,
    "calibrate": lambda x: keras_rfattn.calibrate(x, [X]),
    "uptrain": lambda x: keras_rfattn.uptrain(x, [X], steps=1),
    "extend_positions": lambda x: keras_rfattn.extend_positions(x, 8),
    "approximation_report": lambda x: diagnostics.approximation_report(x, [X]),
    "attribute": lambda x: diagnostics.attribute(x, X, lambda m, d: 1.0),
    "select_heads": lambda x: keras_rfattn.select_heads(x, X),
    "prefill": lambda x: generation.prefill(x, IDS),
    "step": lambda x: generation.step(x, IDS, None),
    "load": lambda x: generation.load("nowhere.npz", x),
    "layout_map": lambda x: distribution.layout_map(x, None),
    "distribute": lambda x: distribution.distribute(x, None),
}
NO_MODELS = {
    "nothing": (None, "of type NoneType"),
    "a preset's name": ("bert_base_en", r"Backbone\.from_preset\('bert_base_en'\)"),
    "a number": (3, "of type int"),
    "a list": ([], "of type list"),
    "a class": (keras.Sequential, r"Make a model of the class first: `Sequential\("),
    "an unbuilt model": (Unbuilt, "must be built.*Call it once on data"),
}


@pytest.mark.parametrize("function", TAKE_A_MODEL)
@pytest.mark.parametrize("kind", NO_MODELS)
def test_what_is_no_model(function, kind):
    given, text = NO_MODELS[kind]
    if given is Unbuilt:
        given = Unbuilt()
    refused(partial(TAKE_A_MODEL[function], given), text)


@pytest.mark.parametrize("function", ["replace_attention", "restore_attention"])
def test_a_model_without_attention(function):
    dense = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    refused(partial(TAKE_A_MODEL[function], dense), "Sequential")


WRONG = {
    "feature_map": [
        "performer", "", 3, None, True, ["favor"], ("favor",), {}, {"a": "favor"}, abs,
        feature_maps.FavorPlus, keras.layers.Dense, models.Plan,
    ],
    "num_features": ["8", 2.5, -1, 0, True, [4], np.float32(3)],
    "seed": ["0", -1, 2.5, True, [1]],
    "include": [3, "nowhere", [3], {"a": 1}, b"a", lambda path: True],
    "exclude": [3, "nowhere", [None], lambda: True],
    "block_size": ["4", -1, 0, 2.5, True],
    "window": ["4", -1, 0, 2.5, True, [4]],
    "sliding": [1, "yes", None, True],
    "max_segments": ["2", 0, 2.5],
    "temperature": ["1", 0, -1, float("nan"), float("inf"), True],
    "implementation": [None, "cuda", 3],
    "softmax_heads": [
        0, [5], "0", [-1], [0, 1], {"a": [5]}, None, [[0]],
    ],
    "drop_sliding_window": ["yes", 3, None],
    "drop_soft_cap": ["yes", 3, None],
}  # fmt: skip
CASES = [(name, i) for name, values in WRONG.items() for i in range(len(values))]


@pytest.mark.parametrize("name, i", CASES)
def test_wrong_arguments_of_replace_attention_change_nothing(name, i):
    model = softmax_model()
    types = [type(x) for x in model._flatten_layers()]
    paths = [w.path for w in model.weights]
    arguments = {"feature_map": "favorplus", name: WRONG[name][i]}
    refused(partial(keras_rfattn.replace_attention, model, **arguments), name)
    assert [type(x) for x in model._flatten_layers()] == types
    assert [w.path for w in model.weights] == paths


ACCEPTED = {
    "num_features": np.int64(4),
    "seed": np.uint32(3),
    "block_size": np.int32(4),
    "window": np.int64(2),
    "temperature": np.float32(0.5),
    "include": ("a",),
    "exclude": [],
    "softmax_heads": np.array([0]),
}


@pytest.mark.parametrize("name", first_on_jax(ACCEPTED))
def test_numbers_of_numpy_are_numbers(name, tmp_path):
    model = softmax_model()
    arguments = {"num_features": 4, "seed": 0, name: ACCEPTED[name]}
    keras_rfattn.replace_attention(model, "favorplus", **arguments)
    # Also in a file.
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    expected = keras.ops.convert_to_numpy(model(X))
    assert np.abs(expected).max() > 1e-3
    found = keras.ops.convert_to_numpy(again(X))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


LAYERS = {
    "MultiHeadAttention": lambda **kw: layers.MultiHeadAttention(2, 4, **kw),
    "GroupedQueryAttention": lambda **kw: layers.GroupedQueryAttention(4, 2, 1, **kw),
}


@pytest.mark.parametrize("cls", LAYERS)
@pytest.mark.parametrize(
    "name", ["feature_map", "num_features", "seed", "window", "block_size", "sliding",
             "temperature", "implementation"],
)  # fmt: skip
def test_wrong_arguments_of_layers(cls, name):
    for wrong in WRONG[name]:
        arguments = {"feature_map": "favorplus", name: wrong}
        refused(partial(LAYERS[cls], **arguments), name)


@pytest.mark.parametrize("sizes", [("2", 8, 2), (2.5, 8, 2), (0, 8, 2), (2, 8, None)])
def test_sizes_of_grouped_query_attention(sizes):
    refused(partial(layers.GroupedQueryAttention, *sizes), "must be a positive integer")


def test_masks_of_layers():
    layer = layers.MultiHeadAttention(2, 4, feature_map="favorplus", num_features=4)
    layer(X, X)
    for arguments in (
        {"attention_mask": "causal"},
        {"attention_mask": np.ones(4, bool)},
        {"attention_mask": np.ones((2, 3), bool)},
        {"key_mask": np.ones((2, 3), bool)},
    ):
        name = next(iter(arguments))
        with pytest.raises((TypeError, ValueError), match=f"`{name}` must"):
            layer(X, X, **arguments)
    # One column is for all tokens.
    layer(X, X, key_mask=np.ones((2, 1), bool))


NUMBERS = {
    "geometric": ("parameter",),
    "poisson_positive": ("parameter",),
    "hybrid_gaussian": ("sigma", "radius"),
    "hybrid_gaussian_mixture": ("tau",),
    "hybrid_clustered": ("num_clusters", "num_pairs"),
}
ARGUMENTS = [(name, x) for name, xs in NUMBERS.items() for x in xs]


@pytest.mark.parametrize("name, argument", ARGUMENTS)
def test_wrong_arguments_of_maps(name, argument):
    for wrong in ("x", [], object, -1, float("nan")):
        cls = feature_maps.class_of(name)
        refused(partial(cls, **{argument: wrong}), f"`{argument}`")


@pytest.mark.parametrize("name", NAMES)
def test_seeds_of_maps(name):
    for wrong in ("x", [], -1, 2.5, True, float("nan")):
        cls = feature_maps.class_of(name)
        refused(partial(cls, seed=wrong), "`seed` must be")


def test_maps_that_are_not_built():
    feature_map = feature_maps.get("favorplus", num_features=4, seed=0)
    refused(partial(feature_map.key_features, X), "built=False")


def test_the_registry():
    for wrong in (3, None, ""):
        refused(partial(feature_maps.register, wrong, papers.Elu), "`name`")
    for wrong in ("favor", papers.Favor, None):
        refused(partial(feature_maps.serialize, wrong), "`feature_map` must be a")
        refused(partial(feature_maps.deserialize, wrong), "serialize")


@pytest.mark.parametrize("name", sorted(projections.PROJECTIONS))
def test_seeds_of_projections(name):
    for wrong in ("a", -1, 2.5, None, True):
        refused(partial(projections.get, name, wrong), "`seed` must be")


def test_plans():
    for wrong in (None, [], {}, ["favor"], {3: "favor"}):
        refused(partial(models.Plan, wrong), "`maps` must be")
    for wrong in (3, "performer", feature_maps.FavorPlus, ["favor"]):
        refused(partial(models.Plan, {"a": wrong}), "`feature_map` must be")
    options = ops.Options()
    refused(partial(models.Plan, {"a": (3, options)}), "`feature_map` must be")
    for wrong in ((), ("favor",), ("favor", {}), ("favor", options, 3)):
        refused(partial(models.Plan, {"a": wrong}), "`maps` must have pairs")
    plan = models.Plan({"nowhere": "favor"})
    refused(partial(keras_rfattn.replace_attention, softmax_model(), plan), "nowhere")
    # To check a name draws nothing.
    keras.utils.set_random_seed(0)
    expected = keras.random.uniform((3,))
    keras.utils.set_random_seed(0)
    models.Plan({"a": "favor"})
    found = keras.random.uniform((3,))
    np.testing.assert_array_equal(*map(keras.ops.convert_to_numpy, (found, expected)))


def test_kernel_features():
    for arguments in (
        {"feature_map": papers.Favor}, {"feature_map": "elu"}, {"feature_map": 3},
        {"kernel": "rbf"}, {"gamma": 0}, {"gamma": "scale"}, {"gamma": True},
        {"num_features": "4"}, {"seed": "a"}, {"seed": 2.5},
    ):  # fmt: skip
        refused(partial(papers.KernelFeatures, **arguments), next(iter(arguments)))
    layer = papers.KernelFeatures(num_features=4, seed=0)
    for wrong in (None, "a", np.ones(3), X):
        refused(partial(layer.adapt, wrong), r"`x` must be an array .*\(n, H\)")
    with pytest.raises(ValueError, match=r"`inputs` must have shape \(\.\.\., H\)"):
        layer(np.float32(3))
    layer(X)
    with pytest.raises(ValueError, match="expected axis -1 .* to have value 8"):
        layer(X[..., :3])


def test_states():
    for wrong in (None, "a", X):
        refused(partial(generation.take_rows, wrong, [0]), "`state` must be")
        refused(partial(generation.join_rows, wrong), "`states` must be")
        refused(partial(generation.join_rows, [wrong]), "`state` must be")
        refused(partial(generation.save, "nowhere.npz", wrong), "`state` must be")


def test_meshes():
    model = softmax_model()
    for wrong in (None, "mesh", 3):
        refused(partial(distribution.layout_map, model, wrong), "`mesh` must be")
        refused(partial(distribution.distribute, model, wrong), "`layouts` must be")


def test_metrics():
    model = linear_model()
    for metric in (None, "accuracy", lambda m, d: "x", lambda m, d: np.ones(3)):
        refused(partial(diagnostics.attribute, model, X, metric), "`metric` must")


def test_heads():
    select = partial(keras_rfattn.select_heads, linear_model(), X)
    for share in (0, -1, "1", 1.0, None, True):
        refused(partial(select, share), "`share` must be")
