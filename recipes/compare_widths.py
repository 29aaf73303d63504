"""Choose a number of features: quality and time of a model at several widths.

    python recipes/compare_widths.py

Trains a small model from scratch, with softmax and with "favorpp_learned". It
classifies scikit-learn's digits, of which it reads every pixel as a token: 64 tokens,
two layers of 2 heads of 8. Rows have the accuracy on 397 images that it was not trained
on, and the processor time of an epoch as a multiple of softmax's. The control has no
attention: its layers return zeros.
Cost: three minutes on one core. Seen: docs/pages/guides/choose.md#how-many-features.
"""

import time

from common.program import make_parser, parse, tell

parser = make_parser(__doc__, widths=[8, 16, 32, 64, 256], epochs=30, seed=0)
args = parse(parser, widths=[16], epochs=1)

import keras
import numpy as np
from sklearn.datasets import load_digits

import keras_rfattn

HEADS, HEAD_DIM = 2, 8


class NoAttention(keras.layers.Layer):
    def call(self, x):
        return 0 * x


def build(attention):
    """Returns a small model with softmax, a number of features, or no attention."""
    dim = HEADS * HEAD_DIM
    inputs = keras.Input((64,))
    x = keras.layers.Dense(dim)(keras.layers.Reshape((64, 1))(inputs))
    positions = keras.layers.Embedding(64, dim)(np.arange(64)[None])
    # Constants: positions are random and not trained.
    x = x + keras.ops.convert_to_numpy(positions)
    for _ in range(2):
        y = keras.layers.LayerNormalization()(x)
        if attention == "no attention":
            x = x + NoAttention()(y)
        else:
            x = x + keras.layers.MultiHeadAttention(HEADS, HEAD_DIM)(y, y)
        y = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.Dense(dim)(keras.layers.Dense(4 * dim, "gelu")(y))
    x = keras.layers.LayerNormalization()(x)
    x = keras.layers.GlobalAveragePooling1D()(x)
    model = keras.Model(inputs, keras.layers.Dense(10)(x))
    if isinstance(attention, int):
        keras_rfattn.replace_attention(model, num_features=attention, seed=args.seed)
    return model


def main(args):
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    x, y = (digits.data / 16).astype("float32")[order], digits.target[order]
    softmax = None
    for attention in ("softmax", *args.widths, "no attention"):
        keras.utils.set_random_seed(args.seed)
        model, times = build(attention), []
        clock = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda *_, times=times: times.append(time.process_time())
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
        model.fit(
            x[:1400], y[:1400], batch_size=32, epochs=args.epochs, verbose=0,
            callbacks=[clock],
        )  # fmt: skip
        seconds = float(np.median(np.diff([*times, time.process_time()])))
        softmax = softmax or seconds
        row = {"attention": attention, "parameters": model.count_params()}
        row["accuracy"] = model.evaluate(x[1400:], y[1400:], verbose=0)[1]
        tell(args, row | {"time relative to softmax": seconds / softmax})


if __name__ == "__main__":
    main(args)
