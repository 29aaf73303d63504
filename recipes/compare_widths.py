"""Choose a number of features: quality and time of a model at several widths.

    python recipes/compare_widths.py digits
    python recipes/compare_widths.py sentences --data-dir DIR

`digits` trains a small model from scratch, with softmax and with "favorpp_learned". It
classifies scikit-learn's digits, of which it reads every pixel as a token: 64 tokens,
two layers of 2 heads of 8. It prints the accuracy on 397 images that it was not trained
on, and the processor time of an epoch as a multiple of softmax's. The control has no
attention: its layers return zeros.

`sentences` uptrains the MiniLM checkpoint, whose heads have 32 numbers, for a short
while on the sentences of replace_bert_attention.py. It prints the rank correlation on
STS 2012 to 2016 (every `--stride`-th pair), also relative to softmax. DIR is that of
uptrain_bert.py. The times of a forward pass are printed by

    python benchmarks/models.py --models bert --shapes 8x128 2x512 \
        --mechanisms "favorpp_learned 32" "favorpp_learned 64" ...

Cost: three minutes on one core for `digits`, two minutes a width for `sentences`.
Expected: docs/pages/guides/choose.md#how-many-features.
"""

import pathlib
import time

from common.program import make_parser, parse

# Flags are parsed before the slow imports.
parser = make_parser(__doc__, epochs=30, steps=100, batch=16, stride=10, seed=0)
parser.add_argument("task", choices=["digits", "sentences"])
parser.add_argument("--data-dir", type=pathlib.Path, help="for sentences")
parser.add_argument("--widths", type=int, nargs="+", help="default: H to 8 H, and 256")
args = parse(parser, epochs=1, steps=2, stride=100, widths=[16])

import keras
import numpy as np
from sklearn.datasets import load_digits

import keras_rfattn

HEADS, HEAD_DIM = 2, 8


class Clock(keras.callbacks.Callback):
    """Measures the processor time of each epoch."""

    def __init__(self):
        super().__init__()
        self.times = []

    def on_epoch_begin(self, epoch, logs=None):
        self.start = time.process_time()

    def on_epoch_end(self, epoch, logs=None):
        self.times.append(time.process_time() - self.start)


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


def train_on_digits(widths):
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    x, y = (digits.data / 16).astype("float32")[order], digits.target[order]
    softmax = None
    for attention in ("softmax", *widths, "no attention"):
        keras.utils.set_random_seed(args.seed)
        model, clock = build(attention), Clock()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
        model.fit(
            x[:1400], y[:1400], batch_size=32, epochs=args.epochs, verbose=0,
            callbacks=[clock],
        )  # fmt: skip
        accuracy = model.evaluate(x[1400:], y[1400:], verbose=0)[1]
        seconds = np.median(clock.times)
        softmax = softmax or seconds
        print(
            f"{attention:>12}  accuracy {accuracy:.3f}  {model.count_params():,} "
            f"parameters  {seconds:.2f} s per epoch, {seconds / softmax:.2f} times "
            "softmax's",
            flush=True,
        )


def uptrain_on_sentences(widths):
    from common import made_up, sentences

    pairs = sentences.pairs_of(args.data_dir, "*.test.tsv", args.stride)
    model, tokenizer = sentences.load()
    preprocessor = sentences.preprocessor(tokenizer, length=32)
    softmax = sentences.correlation(model, (tokenizer, pairs))
    print(f"softmax: rank correlation {softmax:.4f} on {len(pairs)} pairs", flush=True)
    generator = np.random.default_rng(args.seed)
    texts = made_up.sentences(generator, args.batch * args.steps)
    for width in widths:
        keras_rfattn.replace_attention(model, num_features=width, seed=args.seed)
        report = keras_rfattn.uptrain(
            model, texts, steps=args.steps, batch_size=args.batch,
            preprocessor=preprocessor, seed=args.seed, verbose=0,
        )  # fmt: skip
        found = sentences.correlation(model, (tokenizer, pairs))
        print(
            f"{width:>7}  rank correlation {found:.4f}, {found / softmax:.4f} of "
            f"softmax's; relative squared error of attention {report.after:.3f}",
            flush=True,
        )
        keras_rfattn.restore_attention(model)


if __name__ == "__main__":
    head_dim = HEAD_DIM if args.task == "digits" else 32
    default = sorted({head_dim * n for n in (1, 2, 4, 8)} | {256})
    run = train_on_digits if args.task == "digits" else uptrain_on_sentences
    run(args.widths or default)
