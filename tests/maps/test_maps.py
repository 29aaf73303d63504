"""Saving trained maps as a folder, and applying them: same numbers, or a refusal."""

import hashlib
import json

import keras
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import keras_rfattn
from keras_rfattn.models import Plan, stable_names
from keras_rfattn.ops import Options
from tests.helpers import assert_close, assert_same, to_numpy
from tests.uptraining.models import stages

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


def test_float16_rounds_the_weights_once(tmp_path):
    model = trained()
    sizes = []
    for dtype in ("float32", "float16"):
        folder = keras_rfattn.save_maps(model, tmp_path / dtype, dtype=dtype)
        sizes.append(
            sum(x.nbytes for x in load_file(folder / "maps.safetensors").values())
        )
        fresh = keras_rfattn.load_maps(two_layers(), folder)
        assert_close(output(fresh), output(model), 0 if dtype == "float32" else 2e-3)
    assert sizes[1] < 0.6 * sizes[0]
    # Rounded again, the numbers stay as they are.
    again = keras_rfattn.save_maps(fresh, tmp_path / "again", dtype="float16")
    reloaded = keras_rfattn.load_maps(two_layers(), again)
    assert_same(output(reloaded), output(fresh))


def test_a_calibrated_map_is_not_trained_after_rounding(tmp_path):
    model = keras_rfattn.replace_attention(two_layers(), "favorpp_learned", seed=0)
    plain = keras_rfattn.save_maps(model, tmp_path / "plain", dtype="float16")
    layer = keras_rfattn.load_maps(two_layers(), plain).layers[1]
    assert not layer.feature_map.was_trained
    keras_rfattn.calibrate(model, [X], verbose=0)
    folder = keras_rfattn.save_maps(model, tmp_path / "good", dtype="float16")
    fresh = keras_rfattn.load_maps(two_layers(), folder)
    layers = [x for x in fresh.layers if hasattr(x, "feature_map")]
    assert [x.feature_map.was_trained for x in layers] == [False, False]
    assert [x.feature_map.is_calibrated for x in layers] == [True, True]


def uptrained(trainable):
    model = keras_rfattn.replace_attention(two_layers(), "hedgehog", seed=0)
    options = {"steps": 2, "batch_size": 2, "verbose": 0, "seed": 0}
    keras_rfattn.uptrain(model, X, stages=stages(trainable=trainable), **options)
    return model


def saved_with_a_warning(model, folder):
    with pytest.warns(UserWarning, match="but not the checkpoint's own weights"):
        return keras_rfattn.save_maps(model, folder)


def assert_refused(model, folder):
    """Asserts that `load_maps` refuses the model's weights, and changes nothing."""
    before = output(model)
    with pytest.raises(ValueError, match="whose weights are different"):
        keras_rfattn.load_maps(model, folder)
    assert_same(output(model), before)


def test_trained_weights_of_the_checkpoint_are_saved_by_keras(tmp_path):
    model = uptrained("query_key")
    folder = saved_with_a_warning(model, tmp_path / "maps")
    expected, file = output(model), tmp_path / "softmax.weights.h5"
    assert_refused(two_layers(), folder)
    with pytest.warns(UserWarning, match="but not the checkpoint"):
        keras_rfattn.restore_attention(model)
    model.save_weights(file)
    fresh = two_layers(seed=1)
    fresh.load_weights(file)
    keras_rfattn.load_maps(fresh, folder)
    assert_same(output(fresh), expected)
    assert "2 steps of uptrain" in keras_rfattn.describe_attention(fresh).rows[0].note


def test_adapters_are_loaded_before_maps(tmp_path):
    model = uptrained("lora")
    folder = saved_with_a_warning(model, tmp_path)
    assert_refused(two_layers(), folder)
    fresh = two_layers()
    for old, new in zip(model.layers[1:], fresh.layers[1:], strict=True):
        for side in ("query", "key", "value", "output"):
            old_dense, new_dense = (getattr(x, f"_{side}_dense") for x in (old, new))
            new_dense.enable_lora(old_dense.lora_rank)
            for end in ("a", "b"):
                weight = getattr(old_dense, f"lora_kernel_{end}")
                getattr(new_dense, f"lora_kernel_{end}").assign(to_numpy(weight.value))
    keras_rfattn.load_maps(fresh, folder)
    assert_same(output(fresh), output(model))


@pytest.mark.parametrize("trainable", ["maps", "query_key"])
@pytest.mark.filterwarnings("ignore:The maps of")
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


def test_saved_models_keep_the_origin(tmp_path):
    keras_rfattn.save_maps(
        trained(), tmp_path / "good", metrics={"share_of_softmax": 1}
    )
    model = keras_rfattn.load_maps(two_layers(), tmp_path / "good")
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for x in (model, loaded):
        note = keras_rfattn.describe_attention(x).rows[0].note
        assert note == "trained (good, 1.000 of softmax's quality)"


def byte_changed(folder):
    file = folder / "maps.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def torn(folder):
    file = folder / "maps.safetensors"
    file.write_bytes(file.read_bytes()[:-9])


def tensor_removed(folder):
    arrays = load_file(folder / "maps.safetensors")
    arrays.pop(next(iter(arrays)))
    save_file(arrays, folder / "maps.safetensors")


def weights_removed(folder):
    (folder / "maps.safetensors").unlink()


def manifest_removed(folder):
    (folder / "maps.json").unlink()


def manifest_torn(folder):
    file = folder / "maps.json"
    file.write_text(file.read_text()[:-20])


def manifest_foreign(folder):
    (folder / "maps.json").write_text("[1, 2]")


def layer_renamed(folder):
    edit(folder, lambda x: x["layers"][0].update(path="last"))


def newer(folder):
    edit(folder, lambda x: x.update(format=99))


def layer_torn(folder):
    edit(folder, lambda x: x["layers"][0].pop("feature_map"))


def layer_repeated(folder):
    edit(folder, lambda x: x["softmax"].append("first"))


def class_removed(folder):
    edit(folder, lambda x: x["base"].pop("class"))


def window_changed(folder):
    edit(folder, lambda x: x["layers"][0]["options"].update(window=4))


def with_adapters(folder):
    adapter = {"first/query": {"rank": 2, "alpha": 1}}
    edit(folder, lambda x: x.update(adapters=adapter))


def with_weights_of_the_checkpoint(folder):
    edit(folder, lambda x: x.update(checkpoint_weights=["first/query/kernel"]))


def not_finite(folder, value=np.nan):
    """Changes a number, and all that would tell of it."""
    arrays = load_file(folder / "maps.safetensors")
    next(iter(arrays.values())).flat[0] = value
    save_file(arrays, folder / "maps.safetensors")
    data = (folder / "maps.safetensors").read_bytes()
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    edit(folder, lambda x: x.update(checksum=digest))


def infinite(folder):
    not_finite(folder, -np.inf)


DAMAGE = {
    byte_changed: "has changed since it was saved",
    torn: "must be a safetensors file. It is torn",
    tensor_removed: "Received: 3 tensors; missing, surplus",
    weights_removed: "but not the weights 'maps.safetensors'",
    manifest_removed: "must hold 'maps.json'",
    manifest_torn: "must be JSON",
    manifest_foreign: "must be a manifest of trained maps",
    layer_renamed: r"It lacks last. The maps do not know its first",
    newer: "has format 99, and this version",
    layer_torn: "must have the keys path",
    layer_repeated: "must name each layer once",
    class_removed: "must name each layer once",
    window_changed: "does not describe the mechanism that was saved",
    with_adapters: r"must be a set of maps alone. Received: \['adapters'\]",
    with_weights_of_the_checkpoint: r"Received: \['checkpoint_weights'\]",
    not_finite: "must be finite. Received: NaN or infinities in first/feature_map",
    infinite: "must be finite",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda x: x.__name__)
def test_damage_is_refused_by_its_own_message(damage, tmp_path):
    folder = keras_rfattn.save_maps(trained(), tmp_path)
    model = two_layers()
    before = output(model)
    damage(folder)
    with pytest.raises(ValueError, match=DAMAGE[damage]):
        keras_rfattn.load_maps(model, folder)
    assert keras_rfattn.describe_attention(model).replaced == ()
    assert_same(output(model), before)


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
        (lambda: two_layers(seed=1), "whose weights are different"),
        (lambda: two_layers(heads=4), "whose weights are different"),
        (lambda: two_layers(name="other"), "It lacks first"),
        (deeper, "do not know its multi_head_attention#2"),
        (linear_otherwise, "Call `restore_attention"),
        (of_another_class, "belong to a Functional"),
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
    assert "trained for another checkpoint" in str(
        keras_rfattn.describe_attention(model)
    )
    with pytest.raises(ValueError, match="must fit the heads of 'first'"):
        keras_rfattn.load_maps(two_layers(heads=4), folder, base="any")
    with pytest.raises(ValueError, match="`base` must be None or 'any'"):
        keras_rfattn.load_maps(two_layers(), folder, base="other")


def test_narrow_weights_are_of_the_same_checkpoint(tmp_path):
    folder = keras_rfattn.save_maps(trained(), tmp_path)
    model = two_layers()
    for weight in model.weights:
        rounded = keras.ops.cast(keras.ops.cast(weight.value, "bfloat16"), "float32")
        weight.assign(rounded)
    assert keras_rfattn.load_maps(model, folder) is model


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"dtype": "bfloat16"}, "`dtype` must be one of"),
        ({"report": "good"}, "`report` must be the `UptrainingReport`"),
        ({"metrics": {"share": float("nan")}}, "finite numbers or texts"),
        ({"license": 3}, "`license` must be a string"),
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
    weight.assign(to_numpy(weight.value) + 1e5)
    with pytest.raises(ValueError, match="Use dtype='float32'"):
        keras_rfattn.save_maps(model, tmp_path / "maps", dtype="float16")
    weight.assign(to_numpy(weight.value) * np.nan)
    with pytest.raises(ValueError, match="must be finite"):
        keras_rfattn.save_maps(model, tmp_path / "maps")
    assert not (tmp_path / "maps").exists()


def test_folders_are_not_overwritten_unasked(tmp_path):
    (tmp_path / "thesis.tex").write_text("chapter 1")
    with pytest.raises(ValueError, match="must be new, empty"):
        keras_rfattn.save_maps(trained(), tmp_path)
    folder = keras_rfattn.save_maps(trained(), tmp_path / "maps")
    with pytest.raises(ValueError, match="holds trained maps already"):
        keras_rfattn.save_maps(trained(), folder)
    keras_rfattn.save_maps(trained("favorplus"), folder, overwrite=True)
    model = keras_rfattn.load_maps(two_layers(), folder)
    assert keras_rfattn.describe_attention(model).rows[0].mechanism == "favorplus"


def test_the_card_tells_what_is_known(tmp_path):
    folder = keras_rfattn.save_maps(
        trained(), tmp_path, base_model="someone/model", license="apache-2.0",
        metrics={"share_of_softmax": 0.99, "mean_of_v": 0.5}, data="Some texts",
        command="python train.py",
    )  # fmt: skip
    card = (folder / "README.md").read_text()
    for line in (
        "base_model: someone/model", "license: apache-2.0", "hedgehog, 32 features",
        "| share of softmax | 0.99 |", "| data | Some texts |", "2 attention layers",
    ):  # fmt: skip
        assert line in card


@pytest.mark.once
def test_rounding_is_that_of_bfloat16():
    x = np.random.default_rng(0).normal(size=1000).astype("float32")
    x[:3] = 1.00390625, 1.01171875, -0.0  # two ties, and a zero with a sign
    expected = keras.ops.cast(keras.ops.convert_to_tensor(x), "bfloat16")
    bits = stable_names._as_bfloat16(x).astype("uint32") << 16
    assert_same(bits.view("float32"), to_numpy(keras.ops.cast(expected, "float32")))


def test_options_of_cost_may_differ_from_the_saved_ones(tmp_path):
    model = trained(block_size=3, max_segments=2, window=4)
    folder = keras_rfattn.save_maps(model, tmp_path)
    fresh = keras_rfattn.load_maps(
        two_layers(), folder, block_size=5, implementation="xla"
    )
    options = Options(block_size=5, max_segments=2, window=4, implementation="xla")
    assert [x.options for x in fresh.layers[1:]] == [options, options]
    assert_close(output(fresh), output(model), 1e-5)
    keras_rfattn.load_maps(fresh, folder, block_size=2)
    assert {x.options.block_size for x in fresh.layers[1:]} == {2}
    assert_close(output(fresh), output(model), 1e-5)
    for wrong in ({"block_size": 0}, {"implementation": "cuda"}):
        softmax = two_layers()
        with pytest.raises(ValueError, match="`{}` must".format(*wrong)):
            keras_rfattn.load_maps(softmax, folder, **wrong)
        assert not keras_rfattn.describe_attention(softmax).replaced


def test_a_set_for_a_device_loads_where_there_is_none(tmp_path):
    folder = keras_rfattn.save_maps(trained("favorplus"), tmp_path)
    # Kernels of another backend.
    name = "triton" if keras.backend.backend() == "jax" else "pallas"

    def for_a_device(manifest):
        for entry in manifest["layers"]:
            entry["options"]["implementation"] = name

    edit(folder, for_a_device)
    with pytest.raises(ValueError, match="kernels cannot answer"):
        keras_rfattn.load_maps(two_layers(), folder)
    fresh = keras_rfattn.load_maps(two_layers(), folder, implementation="xla")
    assert_same(output(fresh), output(trained("favorplus")))
