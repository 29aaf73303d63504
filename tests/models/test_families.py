"""Every KerasHub family: replace, train, save, reload, restore."""

import importlib.util
import json
import subprocess
import sys

import keras
import keras_hub
import numpy as np
import pytest

import keras_rfattn
from tests.environment import environment
from tests.marks import ONE_BACKEND, SLOW_ON_JAX
from tests.models import families


def originals(model):
    return [(w.path, id(w)) for w in model.weights if "/feature_map/" not in w.path]


def chosen(*names, not_on_jax=()):
    """Parameters for all families, of which only these run by default."""
    others = (x for x in families.FAMILIES if x not in (*names, *not_on_jax))
    return [
        *names,
        *(pytest.param(x, marks=SLOW_ON_JAX) for x in not_on_jax),
        *(pytest.param(x, marks=ONE_BACKEND) for x in others),
    ]


def replace(model):
    keras_rfattn.replace_attention(model, "favorpp", num_features=64, seed=0)


# One family for each class of `models/adapters` that changes attention or its masks.
ONE_OF_EACH = chosen(
    "bert", "gpt2", "llama", "gpt_neo_x", "esm",
    not_on_jax=("gemma", "mixtral", "moonshine", "roformer_v2", "dinov3"),
)  # fmt: skip


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_is_replaced_and_restored(name):
    model, inputs = families.build(name)
    softmax = families.outputs(model, inputs)
    weights, classes = originals(model), [type(x) for x in model._flatten_layers()]

    replace(model)
    report = keras_rfattn.describe_attention(model)
    assert report.replaced
    assert all("one query" in row.note for row in report.kept)
    assert originals(model) == weights
    linear = families.outputs(model, inputs)
    moved = max(
        np.abs(a - b).max() / np.abs(a).max()
        for a, b in zip(softmax, linear, strict=True)
    )
    assert moved > 1e-4

    keras_rfattn.restore_attention(model)
    assert [type(x) for x in model._flatten_layers()] == classes
    assert originals(model) == weights and len(model.weights) == len(weights)
    for a, b in zip(families.outputs(model, inputs), softmax, strict=True):
        np.testing.assert_array_equal(a, b)

    replace(model)
    for a, b in zip(families.outputs(model, inputs), linear, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", chosen("bert"))
def test_is_trained_and_saved(name, tmp_path):
    model, inputs = families.build(name)
    replace(model)
    linear = families.outputs(model, inputs)
    fit_one_step(model, inputs)
    trained = families.outputs(model, inputs)
    assert any(np.any(a != b) for a, b in zip(trained, linear, strict=True))
    assert all(np.isfinite(x).all() for x in trained)

    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert type(again).original_class is type(model).original_class
    for a, b in zip(families.outputs(again, inputs), trained, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(b).max())


def fit_one_step(model, inputs):
    before = [keras.ops.convert_to_numpy(w) for w in model.trainable_weights]
    if isinstance(model, keras_hub.models.Task):
        labels = np.zeros(model(inputs).shape[:-1], "int32")
        model.compile(optimizer=keras.optimizers.SGD(0.1))
        model.fit(inputs, labels, batch_size=2, epochs=1, verbose=0)
    else:
        flat = keras.tree.flatten(model(model.input))
        # No square of a difference: of normalized outputs, its mean is the same always.
        # Times 1, as Moonshine's mask is boolean on PyTorch where its spec says float.
        means = [
            keras.ops.mean(keras.ops.softplus(1.0 * x), axis=tuple(range(1, x.ndim)))
            for x in flat
            if "float" in keras.backend.standardize_dtype(x.dtype)
        ]
        trainer = keras.Model(model.input, sum(means))
        trainer.compile(optimizer=keras.optimizers.SGD(0.1), loss="mae")
        trainer.fit(inputs, np.zeros(2), batch_size=2, epochs=1, verbose=0)
    queries = [
        np.any(keras.ops.convert_to_numpy(w) != old)
        for w, old in zip(model.trainable_weights, before, strict=True)
        if w.path.endswith(families.QUERIES_AND_KEYS)
    ]
    assert queries and any(queries)


# One of each way in which a block is found and rebuilt: a head, a fused projection,
# grouped queries, an encoder with a decoder, images.
WAYS = ("bert", "gpt_neo_x", "llama", "bart", "vit")


RELOAD = """
import gc, json, sys
import numpy as np
exec(sys.argv[3])
from tests.models import families
gc.freeze()  # see conftest.py
folder, names = sys.argv[1], json.loads(sys.argv[2])
for name, cls in names.items():
    model, inputs = families.FAMILIES[name]()
    expected = list(np.load(f"{folder}/{name}.npz").values())
    base = keras_hub.models.Backbone
    for parent in getattr(keras_hub.models, cls).__mro__:
        if parent.__module__.startswith("keras_hub") and parent.__name__ in (
            "CausalLM", "Seq2SeqLM", "TextClassifier", "ImageClassifier"
        ):
            base = parent
    # The base class finds the model's own and calls its `from_preset`.
    loaded = [
        keras.saving.load_model(f"{folder}/{name}.keras", safe_mode=True),
        base.from_preset(f"{folder}/{name}"),
    ]
    fresh = keras_rfattn.replace_attention(model, "favorpp", num_features=64, seed=9)
    fresh.load_weights(f"{folder}/{name}.weights.h5")
    for model in [*loaded, fresh]:
        assert isinstance(model, getattr(keras_hub.models, cls)), type(model)
        assert keras_rfattn.describe_attention(model).replaced
        for a, b in zip(families.outputs(model, inputs), expected, strict=True):
            error = np.abs(a - b).max() / np.abs(b).max()
            assert error <= float(sys.argv[4]), (name, error)
    print("reloaded", name)
"""
ORDERS = (
    "import keras, keras_hub, keras_rfattn",
    "import keras_rfattn, keras, keras_hub",
)


def reload(folder, names, order, backend=None, tolerance="0"):
    command = [sys.executable, "-c", RELOAD, str(folder), json.dumps(names), order]
    done = subprocess.run(
        [*command, tolerance],
        env=environment(backend),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout.count("reloaded")


def save(name, folder):
    """Saves a linear model of a family in every way, and the name of its class."""
    model, inputs = families.build(name)
    replace(model)
    target = folder / name
    model.save(f"{target}.keras")
    model.save_to_preset(str(target))
    model.save_weights(f"{target}.weights.h5")
    np.savez(f"{target}.npz", *families.outputs(model, inputs))
    return type(model).original_class.__name__


@pytest.mark.full
@pytest.mark.once
def test_reload_in_a_fresh_process(tmp_path):
    saved = {name: save(name, tmp_path) for name in WAYS}
    assert reload(tmp_path, saved, ORDERS[0], tolerance="1e-6") == len(WAYS)


# In a circle, so that runs on all backends write and read on each.
NEXT = {"jax": "tensorflow", "tensorflow": "torch", "torch": "jax"}


@pytest.mark.full
@pytest.mark.once
def test_reload_on_another_backend_after_the_other_order_of_imports(tmp_path):
    other = NEXT[keras.backend.backend()]
    if importlib.util.find_spec(other) is None:
        other = None
    saved = {name: save(name, tmp_path) for name in ("bert", "llama")}
    assert reload(tmp_path, saved, ORDERS[1], other, "1e-4") == len(saved)
