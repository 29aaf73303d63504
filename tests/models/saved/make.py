"""Makes the files beside this one, which guard the format of saved models.

    KERAS_BACKEND=jax python tests/models/saved/make.py FOLDER

A file that no longer loads, or gives other outputs, shows that the format has changed.
Make the files again only for a change that is meant, before a release.
"""

import json
import pathlib
import sys
import zipfile

import keras
import numpy as np

import keras_rfattn

X = np.random.default_rng(0).normal(size=(2, 6, 8)).astype("float32")
TOKENS = np.array([[5, 7, 9, 4, 2, 0], [3, 8, 6, 2, 0, 0]], "int32")


@keras.saving.register_keras_serializable("saved")
class Own(keras.Model):
    """A container without a `build` of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = keras.layers.MultiHeadAttention(2, 4)
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        return self.dense(self.attention(x, x))


def replaced_own():
    model = Own()
    model(X)
    return keras_rfattn.replace_attention(model, "favorplus", num_features=4, seed=1)


def replaced_functional():
    inputs = keras.Input((6, 8))
    x = keras.layers.MultiHeadAttention(2, 4, name="attention")(inputs, inputs)
    return keras_rfattn.replace_attention(
        keras.Model(inputs, x), "favorpp", num_features=4, seed=1
    )


def bert():
    import keras_hub

    backbone = keras_hub.models.BertBackbone(30, 2, 2, 8, 16, max_sequence_length=12)
    keras_rfattn.replace_attention(backbone, "favorpp", num_features=4, seed=1)
    return backbone


def gpt2_task(folder):
    import keras_hub

    models = keras_hub.models
    backbone = models.GPT2Backbone(30, 1, 2, 8, 16, max_sequence_length=12)
    vocabulary = ["<|endoftext|>", *"abcdefghijklmnopqrstuvwxyz", "Ġ", "ab", "Ġa"]
    tokenizer = models.GPT2Tokenizer(
        {t: i for i, t in enumerate(vocabulary)}, ["a b", "Ġ a"]
    )
    preprocessor = models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=12)
    task = models.GPT2CausalLM(backbone, preprocessor)
    keras_rfattn.replace_attention(task, "favorplus", num_features=4, seed=2)
    task.save_to_preset(str(folder))
    return task


def segments():
    mask = (TOKENS != 0).astype("int32")
    return {"token_ids": TOKENS, "segment_ids": 0 * mask, "padding_mask": mask}


def output(model, x):
    return np.concatenate(
        [keras.ops.convert_to_numpy(y).ravel() for y in keras.tree.flatten(model(x))]
    )


def compress(path):
    """Rewrites a zip file with compression, which Keras does not use."""
    with zipfile.ZipFile(path) as file:
        parts = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in parts.items():
            file.writestr(name, data)


def main(folder):
    folder = pathlib.Path(folder)
    keras.utils.set_random_seed(0)
    outputs = {}

    model = replaced_own()
    model.save(folder / "own.keras")
    model.save_weights(folder / "own.weights.h5")
    outputs["own"] = output(model, X)

    model = replaced_functional()
    model.save_weights(folder / "functional.weights.h5")
    model.save(folder / "functional.h5")
    outputs["functional"] = output(model, X)

    model = bert()
    model.save(folder / "bert.keras")
    outputs["bert"] = output(model, segments())

    inputs = {k: segments()[k] for k in ("token_ids", "padding_mask")}
    outputs["gpt2"] = output(gpt2_task(folder / "gpt2"), inputs)

    for path in folder.glob("*.keras"):
        compress(path)
    np.savez(folder / "outputs.npz", **outputs)
    print(json.dumps({k: v.shape for k, v in outputs.items()}))


if __name__ == "__main__":
    main(sys.argv[1])
