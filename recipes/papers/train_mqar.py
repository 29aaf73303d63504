"""Train two-layer models to recall values by their keys, at several feature widths.

Zoology (Arora et al., 2023) and Based (Arora et al., 2024): a sequence lists pairs of a
key and a value, and then asks for the value of each key (multi-query associative
recall). A state of constant size holds only so many pairs, so accuracy should rise with
the width of the features. Every linear model has a window of `--window` tokens, which
lets a token see the one before it but not the pairs; the window alone is the control.

    python recipes/papers/train_mqar.py [--length 64] [--pairs 8] [--steps 1500]

Seen: docs/pages/results/decoders.md.
"""

import pathlib
import sys
import time

sys.path.append(str(pathlib.Path(__file__).parents[1]))  # where `common` is

from common.program import make_parser, parse, tell

MECHANISMS = ["favorplus", "favorpp_learned"]

parser = make_parser(
    __doc__, mechanisms=MECHANISMS, widths=[16, 64, 256],
    seeds=[0], length=64, pairs=8, vocabulary=256, window=4, steps=1500, num_layers=2,
    num_heads=2, head_dim=32, examples=512, batch=64, rate=2e-3,
)  # fmt: skip
args = parse(
    parser, steps=2, num_layers=1, mechanisms=["favorplus"], widths=[16], examples=8,
    length=16, pairs=2,
)  # fmt: skip

import keras
import numpy as np
from common.training import build


def main(args):
    cases = {("softmax", None): ("softmax", {}, None)}
    cases[("window alone", None)] = ("window_alone", {}, args.window)
    cases |= {
        (name, width): (name, {"num_features": width}, args.window)
        for name in args.mechanisms
        for width in args.widths
    }
    for seed in args.seeds:
        for (name, width), mechanism in cases.items():
            start = time.time()
            model = build(mechanism, seed, args.vocabulary, args)
            fit(model, args, seed)
            row = {"mechanism": name, "width": width, "seed": seed}
            row["accuracy"] = accuracy(model, args, np.random.default_rng([seed, 1]))
            tell(args, row | {"minutes": round((time.time() - start) / 60, 2)})


def sequences(args, count, generator, power=0.01):
    """Returns inputs, targets, and weights that are 1 at queries, `(count, length)`.

    Keys are tokens of the vocabulary's first half, and values of its second. A query
    stands in the i-th place behind the pairs with a probability proportional to
    `i ** (power - 1)`. The other tokens there are random values.
    """
    half, first = args.vocabulary // 2, 2 * args.pairs

    def distinct(stop):
        order = np.argsort(generator.random((count, stop)), axis=1)
        return order[:, : args.pairs]

    keys, values = 1 + distinct(half - 1), half + distinct(args.vocabulary - half)
    inputs = generator.integers(half, args.vocabulary, (count, args.length))
    inputs[:, 0:first:2], inputs[:, 1:first:2] = keys, values
    gaps = (args.length - first) // 2
    # The largest sums with Gumbel noise are a draw without replacement (Vieira, 2014).
    noise = generator.gumbel(size=(count, gaps))
    scores = (power - 1) * np.log(np.arange(1, gaps + 1)) + noise
    places = first + 2 * np.argsort(-scores, axis=1)[:, : args.pairs]
    targets, weights = np.zeros_like(inputs), np.zeros(inputs.shape, "float32")
    np.put_along_axis(inputs, places, keys, axis=1)
    np.put_along_axis(targets, places, values, axis=1)
    np.put_along_axis(weights, places, 1, axis=1)
    return inputs.astype("int32"), targets.astype("int32"), weights


def fit(model, args, seed):
    """Trains on fresh sequences, with a learning rate that falls to 0."""
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, args.steps, warmup_target=args.rate, warmup_steps=args.steps // 20
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate, clipnorm=1.0), loss)
    generator = np.random.default_rng([seed, 0])

    def batches():
        while True:
            inputs, targets, weights = sequences(args, args.batch, generator)
            # Keras divides by all tokens, of which few are queries.
            yield inputs, targets, weights * (args.length / args.pairs)

    model.fit(batches(), steps_per_epoch=args.steps, verbose=0)


def accuracy(model, args, generator):
    """Returns the share of queries whose value is the most probable token."""
    inputs, targets, weights = sequences(args, args.examples, generator)
    tokens = model.predict(inputs, batch_size=args.batch, verbose=0).argmax(-1)
    return float(np.sum((tokens == targets) * weights) / np.sum(weights))


if __name__ == "__main__":
    main(args)
