"""Saving trained maps as a folder, and applying them: same numbers, or a refusal."""

import json
import shutil
import types
import warnings

import keras
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import keras_rfattn
from keras_rfattn.maps import base as bases
from keras_rfattn.maps import folder as folders
from keras_rfattn.models import Plan
from keras_rfattn.ops import Options
from keras_rfattn.uptraining import Stage
from tests.helpers import assert_close, assert_same, to_numpy

X = np.random.default_rng(0).normal(size=(2, 9, 16)).astype("float32")


def two_layers(seed=0, heads=2, name="first"):
    """A softmax model of two attention layers, one with an automatic name."""
    keras.utils.set_random_seed(seed)
    x = keras.Input((None, 16))
    y = keras.layers.MultiHeadAttention(heads, 8, name=name)(x, x)
    return keras.Model(x, keras.layers.MultiHeadAttention(heads, 8)(y, y))


def train(model, seed=1):
    """Changes the weights of maps as training would."""
    rng = np.random.default_rng(seed)
    for layer in model._flatten_layers():
        if isinstance(layer, keras_rfattn.layers.LinearAttention):
            for weight in layer.feature_map.trainable_weights:
                value = to_numpy(weight.value)
                noise = rng.normal(scale=0.1, size=value.shape)
                weight.assign(value - np.abs(noise).astype("float32"))
    return model


def trained(mechanism="hedgehog", **options):
    options = {"num_features": 16, "seed": 0, **options}
    return train(keras_rfattn.replace_attention(two_layers(), mechanism, **options))


def output(model, x=X):
    return to_numpy(model(x))


def edit(folder, function):
    """Changes the manifest of a folder."""
    file = folder / "maps.json"
    manifest = json.loads(file.read_text())
    function(manifest)
    file.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "options",
    [
        {"mechanism": "favorpp_learned"},
        {"window": 4, "sliding": True, "softmax_heads": [1]},
        {"mechanism": Plan({"first": ("favorplus", Options(softmax_heads=[0]))})},
        {"exclude": "first"},
        {"mechanism": "favorplus"},
    ],
)
def test_a_fresh_checkpoint_gets_the_same_numbers(options, tmp_path):
    model = trained(**options)
    folder = keras_rfattn.save_maps(model, tmp_path / "maps")
    assert sorted(x.name for x in folder.iterdir()) == [
        "README.md", "maps.json", "maps.safetensors"
    ]  # fmt: skip
    fresh = two_layers()
    assert np.any(output(fresh) != output(model))
    assert keras_rfattn.load_maps(fresh, folder) is fresh
    assert_same(output(fresh), output(model))
    rows = keras_rfattn.describe_attention(fresh).rows
    expected = [row.mechanism for row in keras_rfattn.describe_attention(model).rows]
    assert [row.mechanism for row in rows] == expected
    keras_rfattn.restore_attention(fresh)
    assert_same(output(fresh), output(two_layers()))


def test_a_model_replaced_the_same_way_takes_the_weights(tmp_path):
    model = trained()
    folder = keras_rfattn.save_maps(model, tmp_path)
    other = keras_rfattn.replace_attention(two_layers(), "hedgehog", num_features=16)
    assert_same(output(keras_rfattn.load_maps(other, str(folder))), output(model))


def test_a_calibrated_map_is_not_trained(tmp_path):
    model = keras_rfattn.replace_attention(two_layers(), "favorpp_learned", seed=0)
    keras_rfattn.calibrate(model, [X], verbose=0)
    folder = keras_rfattn.save_maps(model, tmp_path)
    fresh = keras_rfattn.load_maps(two_layers(), folder)
    layers = [x for x in fresh.layers if hasattr(x, "feature_map")]
    assert [x.feature_map.was_trained for x in layers] == [False, False]
    assert [x.feature_map.is_calibrated for x in layers] == [True, True]


def uptrained(trainable, with_adapters=False):
    model = keras_rfattn.replace_attention(two_layers(), "hedgehog", seed=0)
    if with_adapters:
        for layer in model.layers[1:]:
            for side in ("query", "key", "value", "output"):
                dense = getattr(layer, f"_{side}_dense")
                dense.enable_lora(2)
                dense.bias.trainable = False
    options = {"steps": 2, "batch_size": 2, "verbose": 0, "seed": 0}
    trained = [Stage("attention", trainable="query_key")]
    trained += [Stage("features", trainable=trainable)]
    keras_rfattn.uptrain(model, X, stages=trained, **options)
    return model


def assert_refused(model, folder):
    """Asserts that `load_maps` refuses the model's weights, and changes nothing."""
    before = output(model)
    with pytest.raises(ValueError, match="must have the weights with which"):
        keras_rfattn.load_maps(model, folder)
    assert_same(output(model), before)


def test_trained_weights_of_the_checkpoint_are_saved_by_keras(tmp_path):
    model = uptrained("query_key")
    folder = keras_rfattn.save_maps(model, tmp_path / "maps")
    expected, file = output(model), tmp_path / "softmax.weights.h5"
    assert_refused(two_layers(), folder)
    keras_rfattn.restore_attention(model)
    model.save_weights(file)
    fresh = two_layers(seed=1)
    fresh.load_weights(file)
    keras_rfattn.load_maps(fresh, folder)
    assert_same(output(fresh), expected)


def test_adapters_are_loaded_before_maps(tmp_path):
    model = uptrained("all", with_adapters=True)
    with pytest.warns(UserWarning, match="such as 'first/query/lora_kernel'"):
        folder = keras_rfattn.save_maps(model, tmp_path / "maps")
    assert_refused(two_layers(), folder)

    def adapted(fresh):
        for old, new in zip(model.layers[1:], fresh.layers[1:], strict=True):
            for side in ("query", "key", "value", "output"):
                dense = [getattr(x, f"_{side}_dense") for x in (old, new)]
                dense[1].enable_lora(dense[0].lora_rank)
                for name in ("lora_kernel_a", "lora_kernel_b"):
                    value = to_numpy(getattr(dense[0], name).value)
                    getattr(dense[1], name).assign(value)
        return fresh

    before = keras_rfattn.load_maps(adapted(two_layers()), folder)
    assert_same(output(before), output(model))
    after = adapted(keras_rfattn.load_maps(two_layers(), folder, base="any"))
    assert_same(output(after), output(model))
    # Keras merges adapters into the kernels that it saves.
    keras_rfattn.restore_attention(model).save_weights(tmp_path / "merged.weights.h5")
    merged = two_layers(seed=1)
    merged.load_weights(tmp_path / "merged.weights.h5")
    keras_rfattn.load_maps(merged, folder)
    assert_close(output(merged), output(before), 1e-5)


@pytest.mark.parametrize("trainable", ["maps", "query_key"])
def test_the_hash_is_that_of_the_weights_in_the_model(trainable, tmp_path):
    model = uptrained(trainable)
    before = keras_rfattn.save_maps(model, tmp_path / "before")
    # As `fit` would, of a weight that `uptrain` did not train.
    kernel = model.layers[1]._value_dense.kernel
    kernel.assign(1.1 * to_numpy(kernel.value))
    after = keras_rfattn.save_maps(model, tmp_path / "after")
    assert_refused(two_layers(), after)
    assert_refused(model, before)
    assert keras_rfattn.load_maps(model, after) is model
    # Maps on a checkpoint that they were not trained for belong to that one.
    other = keras_rfattn.load_maps(two_layers(seed=1), before, base="any")
    again = keras_rfattn.save_maps(other, tmp_path / "again")
    assert_refused(two_layers(), again)
    fresh = keras_rfattn.load_maps(two_layers(seed=1), again)
    assert_same(output(fresh), output(other))


def test_a_second_set_brings_all_of_its_numbers(tmp_path):
    folders = [
        keras_rfattn.save_maps(trained(window=w), tmp_path / str(w)) for w in (2, 4)
    ]
    model = keras_rfattn.load_maps(two_layers(), folders[0])
    keras_rfattn.restore_attention(model)
    keras_rfattn.load_maps(model, folders[1])
    expected = output(keras_rfattn.load_maps(two_layers(), folders[1]))
    assert_same(output(model), expected)


def test_saved_models_keep_the_training(tmp_path):
    keras_rfattn.save_maps(trained(), tmp_path / "good")
    model = keras_rfattn.load_maps(two_layers(), tmp_path / "good")
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for x in (model, loaded):
        assert keras_rfattn.describe_attention(x).rows[0].note == "trained"


def seal(folder):
    """Makes the checksum of a folder agree with its files."""
    data = (folder / "maps.safetensors").read_bytes()
    edit(folder, lambda x: x.update(checksum=folders._checksum(x, data)))


def of_first_format(manifest):
    """Changes a manifest to what the first format held."""
    for name in ("adapters", "limits", "sketch"):
        manifest["base"].pop(name)
    manifest["base"]["name"], manifest["format"] = None, 1


def with_array(folder, value):
    arrays = load_file(folder / "maps.safetensors")
    next(iter(arrays.values())).flat[0] = value
    save_file(arrays, folder / "maps.safetensors")


def places(tree, at=()):
    """Yields the path of every entry of a manifest that loading depends on."""
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in entries:
        yield (*at, key)
        if isinstance(value, (dict, list)):
            yield from places(value, (*at, key))


def assert_damaged(folder, message="must hold 'maps.json'"):
    model = two_layers()
    before = output(model)
    with pytest.raises(ValueError, match=message):
        keras_rfattn.load_maps(model, folder)
    assert keras_rfattn.describe_attention(model).replaced == ()
    assert_same(output(model), before)


def test_damaged_files_are_refused(tmp_path):
    good = keras_rfattn.save_maps(trained(), tmp_path / "good")
    for number, file in enumerate(("maps.json", "maps.safetensors")):
        for change in (
            None, b"", b"[1, 2]", b"null", (good / file).read_bytes()[:-9],
        ):  # fmt: skip
            folder = shutil.copytree(good, tmp_path / str(number), dirs_exist_ok=True)
            (folder / file).unlink()
            if change is not None:
                (folder / file).write_bytes(change)
            assert_damaged(folder)
    for value in (np.nan, np.inf, -np.inf, 1e30):
        folder = shutil.copytree(good, tmp_path / f"array {value}")
        with_array(folder, value)
        assert_damaged(folder, "has changed since it was saved")
        seal(folder)
        if not np.isfinite(value):
            assert_damaged(folder, "NaN or infinite")
    edit(good, lambda x: x.update(format=99))
    assert_damaged(good, "format 99: use a newer")


@pytest.mark.parametrize("version", [1, 2])
def test_every_change_of_a_manifest_is_refused(version, tmp_path):
    folder = keras_rfattn.save_maps(trained(), tmp_path)
    if version == 1:
        edit(folder, of_first_format)
    seal(folder)
    fresh = keras_rfattn.load_maps(two_layers(), folder)
    assert_same(output(fresh), output(trained()))
    good = json.loads((folder / "maps.json").read_text())
    essential = {name: good[name] for name in ("base", "layers", "softmax")}
    found = [x for x in places(essential) if "feature_map" not in x[:-1]]
    assert len(found) > 25
    model = two_layers()
    before = output(model)
    for *way, last in found:
        for value in (None, "other", [3]):
            manifest = json.loads(json.dumps(good))
            owner = manifest
            for key in way:
                owner = owner[key]
            if owner[last] == value:
                continue
            owner[last] = value
            (folder / "maps.json").write_text(json.dumps(manifest))
            if version == 2:
                with pytest.raises(ValueError, match="has changed since it was saved"):
                    keras_rfattn.load_maps(model, folder)
                seal(folder)
            # What was meant is unknown: it loads as it was, or not at all.
            try:
                keras_rfattn.load_maps(model, folder)
            except ValueError:
                assert_same(output(model), before)
            else:
                assert_same(output(model), output(fresh))
                keras_rfattn.restore_attention(model)


def deeper():
    keras.utils.set_random_seed(0)
    x = keras.Input((None, 16))
    y = keras.layers.MultiHeadAttention(2, 8, name="first")(x, x)
    y = keras.layers.MultiHeadAttention(2, 8)(y, y)
    return keras.Model(x, keras.layers.MultiHeadAttention(2, 8)(y, y))


def linear_otherwise():
    return keras_rfattn.replace_attention(two_layers(), "hedgehog", num_features=8)


def of_another_class():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((9, 16)), Block()])


class Block(keras.layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first = keras.layers.MultiHeadAttention(2, 8, name="first")

    def call(self, x):
        return self.first(x, x)


@pytest.mark.parametrize(
    "model, message",
    [
        (lambda: two_layers(seed=1), "must have the weights with which"),
        (lambda: two_layers(heads=4), "heads that need first/feature_map/"),
        (lambda: two_layers(name="other"), "where the maps have"),
        (deeper, "where the maps have"),
        (linear_otherwise, "Call `restore_attention"),
        (of_another_class, "of a Functional. Received: layers"),
    ],
)
def test_other_models_are_refused(model, message, tmp_path):
    folder = keras_rfattn.save_maps(trained(), tmp_path)
    model = model()
    before = output(model)
    with pytest.raises(ValueError, match=message):
        keras_rfattn.load_maps(model, folder)
    assert_same(output(model), before)


def test_any_base_is_accepted_if_asked_for(tmp_path):
    folder = keras_rfattn.save_maps(trained(), tmp_path)
    model = keras_rfattn.load_maps(two_layers(seed=1), folder, base="any")
    assert keras_rfattn.describe_attention(model).rows[0].note == "trained"
    with pytest.raises(ValueError, match="heads that need first/feature_map/"):
        keras_rfattn.load_maps(two_layers(heads=4), folder, base="any")
    with pytest.raises(ValueError, match="`base` must be None or 'any'"):
        keras_rfattn.load_maps(two_layers(), folder, base="other")


def as_bfloat16(model):
    for weight in model.weights:
        rounded = keras.ops.cast(keras.ops.cast(weight.value, "bfloat16"), "float32")
        weight.assign(rounded)


def as_float16(model):
    for weight in model.weights:
        weight.assign(to_numpy(weight.value).astype("float16").astype("float32"))


def as_int8(model):
    model.quantize("int8")


@pytest.mark.parametrize("round_to", [as_bfloat16, as_float16, as_int8])
def test_rounded_weights_are_of_the_same_checkpoint(round_to, tmp_path):
    folder = keras_rfattn.save_maps(trained(), tmp_path)
    model = two_layers()
    round_to(model)
    assert_same(output(model), output(model))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", UserWarning)
        assert keras_rfattn.load_maps(model, folder) is model
    told = [str(x.message) for x in found if "as after rounding" in str(x.message)]
    assert len(told) == (round_to is not as_bfloat16)
    assert_close(output(model), output(trained()), 0.05)


def by_one_step(model):
    model.compile(keras.optimizers.Adam(1e-3), "mse")
    model.fit(X, X, batch_size=2, verbose=0)


def by_a_kernel(model, change=1.05):
    kernel = model.layers[2]._value_dense.kernel
    kernel.assign(change * to_numpy(kernel.value))


def by_a_bias(model):
    bias = model.layers[1]._output_dense.bias
    bias.assign(to_numpy(bias.value) + 1e-3)


def by_an_adapter(model):
    dense = model.layers[1]._query_dense
    dense.enable_lora(1)
    # A change far below what rounding to eight bits explains.
    dense.lora_kernel_b.assign(np.full(dense.lora_kernel_b.shape, 1e-3))


def to_nan(model):
    by_a_kernel(model, np.nan)


CHANGES = [by_one_step, by_a_kernel, by_a_bias, by_an_adapter, to_nan]


@pytest.mark.parametrize("change", CHANGES, ids=lambda x: x.__name__)
def test_weights_that_were_trained_are_refused(change, tmp_path):
    folder = keras_rfattn.save_maps(trained(), tmp_path)
    model = two_layers()
    change(model)
    assert_refused(model, folder)


def test_estimated_distances_are_right():
    generator = np.random.default_rng(0)
    for shape in ((40, 4, 8), (30,), (3, 50), (1, 1)):
        x, y = generator.normal(size=(2, *shape)).astype("float32")
        for size in (1e-3, 1.0):
            layer = types.SimpleNamespace()
            found = [
                bases._sketch(keras.Variable(value), layer)
                for value in (x, x + size * y)
            ]
            true = size * np.linalg.norm(y) / np.linalg.norm(x)
            assert 0.4 < bases._relative(*found) / true < 2.5


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"report": "good"}, "`report` what `uptrain` returned"),
        ({"metrics": {"share": float("nan")}}, "finite numbers or texts"),
        ({"metrics": {"share": two_layers}}, "finite numbers or texts"),
        ({"metrics": 3}, "finite numbers or texts"),
        ({"overwrite": 2}, "overwrite"),
    ],
)
def test_arguments_are_checked_before_anything_is_written(arguments, message, tmp_path):
    with pytest.raises((TypeError, ValueError), match=message):
        keras_rfattn.save_maps(trained(), tmp_path / "maps", **arguments)
    assert not (tmp_path / "maps").exists()


def test_what_cannot_be_saved_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no linear attention to save"):
        keras_rfattn.save_maps(two_layers(), tmp_path / "maps")
    model = trained()
    weight = model.layers[1].feature_map.trainable_weights[0]
    weight.assign(to_numpy(weight.value) * np.nan)
    with pytest.raises(ValueError, match="must be finite"):
        keras_rfattn.save_maps(model, tmp_path / "maps")
    assert not (tmp_path / "maps").exists()


def test_folders_are_not_overwritten_unasked(tmp_path):
    (tmp_path / "thesis.tex").write_text("chapter 1")
    with pytest.raises(ValueError, match="must be new, empty"):
        keras_rfattn.save_maps(trained(), tmp_path)
    folder = keras_rfattn.save_maps(trained(), tmp_path / "maps")
    with pytest.raises(ValueError, match="`overwrite=True`"):
        keras_rfattn.save_maps(trained(), folder)
    keras_rfattn.save_maps(trained("favorplus"), folder, overwrite=True)
    model = keras_rfattn.load_maps(two_layers(), folder)
    assert keras_rfattn.describe_attention(model).rows[0].mechanism == "favorplus"


def test_the_card_tells_what_is_known(tmp_path):
    folder = keras_rfattn.save_maps(
        trained(), tmp_path, base_model="someone/model", license="apache-2.0",
        metrics={"share_of_softmax": 0.99, "data": "Some texts"},
    )  # fmt: skip
    card = (folder / "README.md").read_text()
    for line in (
        "base_model: someone/model", "license: apache-2.0", "hedgehog of 32 features",
        "| share of softmax | 0.99 |", "| data | Some texts |", "2 attention layers",
    ):  # fmt: skip
        assert line in card


@pytest.mark.once
def test_options_of_cost_may_differ_from_the_saved_ones(tmp_path):
    model = trained(block_size=3, window=4)
    folder = keras_rfattn.save_maps(model, tmp_path)
    fresh = keras_rfattn.load_maps(two_layers(), folder)
    options = Options(block_size=3, window=4)
    assert [x.options for x in fresh.layers[1:]] == [options, options]
    other, arguments = two_layers(), {"num_features": 16, "block_size": 5, "window": 4}
    keras_rfattn.replace_attention(other, "hedgehog", **arguments)
    keras_rfattn.load_maps(other, folder)
    assert {x.options.block_size for x in other.layers[1:]} == {5}
    assert_close(output(other), output(model), 1e-5)


def test_a_set_for_a_device_loads_where_there_is_none(tmp_path):
    folder = keras_rfattn.save_maps(trained("favorplus"), tmp_path)

    def for_a_device(manifest):
        for entry in manifest["layers"]:
            entry["options"]["implementation"] = "triton"

    edit(folder, for_a_device)
    seal(folder)
    fresh = keras_rfattn.load_maps(two_layers(), folder)
    assert_same(output(fresh), output(trained("favorplus")))
