"""Small models that tests uptrain."""

import keras
import numpy as np

import keras_rfattn
from keras_rfattn.uptraining import Stage
from keras_rfattn.uptraining.uptrain import OPTIONS

TOKENS, DIM, HEADS, WORDS = 12, 8, 2, 30


def checkpoint(folder, every=100):
    """The callback with which an interrupted call is resumed."""
    return keras.callbacks.BackupAndRestore(
        folder, save_freq=every, delete_checkpoint=False
    )


def softmax_model(layers=2, causal=False, dtype=None):
    """Attention that chooses, over tokens of which the last are padding."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((TOKENS,), dtype="int32")
    x = keras.layers.Embedding(WORDS, DIM, mask_zero=True, dtype=dtype)(inputs)
    # Counted from 1, as 0 is masked.
    places = keras.ops.cumsum(keras.ops.sign(inputs), axis=1)
    positions = keras.layers.Embedding(
        TOKENS + 1, DIM, mask_zero=True, name="positions", dtype=dtype
    )
    x = keras.layers.Add(dtype=dtype)([x, positions(places)])
    for i in range(layers):
        attention = keras.layers.MultiHeadAttention(
            HEADS, DIM // HEADS, name=f"attention_{i}", dtype=dtype
        )
        y = attention(x, x, use_causal_mask=causal)
        x = keras.layers.Add(dtype=dtype)([x, y])
        x = keras.layers.LayerNormalization(dtype=dtype)(x)
    model = keras.Model(inputs, x)
    generator = np.random.default_rng(0)
    for weight in model.weights:
        # Embeddings of Keras are nearly 0, and attention to them uniform.
        scale = 1.0 if "embedding" in weight.path or "positions" in weight.path else 0.8
        if "gamma" not in weight.path and "bias" not in weight.path:
            weight.assign(scale * generator.normal(size=weight.shape))
    return model


def linear_model(feature_map="hedgehog", seed=0, causal=False, dtype=None, **arguments):
    model = softmax_model(causal=causal, dtype=dtype)
    return keras_rfattn.replace_attention(model, feature_map, seed=seed, **arguments)


def tokens(rows=64):
    generator = np.random.default_rng(2)
    found = generator.integers(1, WORDS, (rows, TOKENS)).astype("int32")
    found[::2, 9:] = 0
    return found


def stages(names=tuple(OPTIONS), **options):
    """Returns stages, each with those of the options that it has."""
    return [
        Stage(name, **{k: x for k, x in options.items() if k in OPTIONS[name]})
        for name in ([names] if isinstance(names, str) else names)
    ]


def uptrain(model, data=None, **arguments):
    arguments = {"steps": 12, "seed": 0, "verbose": 0, "batch_size": 16} | arguments
    data = tokens() if data is None else data
    return keras_rfattn.uptrain(model, data, **arguments)


def weights(model):
    return [keras.ops.convert_to_numpy(w) for w in model.weights]
