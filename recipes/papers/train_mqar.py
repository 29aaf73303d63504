"""Train two-layer models to recall values by their keys, at several feature widths.

Zoology (Arora et al., 2023) and Based (Arora et al., 2024): a sequence lists pairs of a
key and a value, and then asks for the value of each key (multi-query associative
recall). Softmax attention solves it; a state of constant size holds only so many pairs,
so accuracy should rise with the width of the features. Every linear model has a window
of `--window` tokens, which lets a token see the one before it but not the pairs; the
window alone is the control.

    python recipes/papers/train_mqar.py [--length 64] [--pairs 8] [--steps 1500]

Each run appends a line to `--results`: command, mechanism, width, seed, accuracy of the
queries in `--examples` fresh sequences, and minutes.
"""

import pathlib
import sys
import time

sys.path.append(str(pathlib.Path(__file__).parents[1]))  # where `common` is

from common.flags import TINY, make_parser, parse

# From name to feature map and the arguments that give it a width.
MECHANISMS = {
    "favorplus": lambda width: ("favorplus", {"num_features": width}),
    "favorpp_learned": lambda width: ("favorpp_learned", {"num_features": width}),
    "hedgehog": lambda width: ("hedgehog", {"num_features": width // 2}),
    "polysketch": lambda width: ("polysketch", {"num_features": round(width**0.5)}),
    "polysketch_learned": lambda width: (
        "polysketch_learned", {"num_features": round(width**0.5)}
    ),
}  # fmt: skip

# Flags are parsed before the slow imports.
parser = make_parser(
    __doc__, results="train_mqar.jsonl", mechanisms=list(MECHANISMS),
    widths=[16, 64, 256], seeds=[0], length=64, pairs=8, vocabulary=256, window=4,
    steps=1500, num_layers=2,
    num_heads=2, head_dim=32, examples=512, batch=64, rate=2e-3,
)  # fmt: skip
tiny = {k: x for k, x in TINY.items() if k != "context"}
args = parse(
    parser, **tiny, mechanisms=["hedgehog"], widths=[16], examples=8, length=16, pairs=2
)

import common.control_maps  # noqa: F401 (registers "window_alone")
import keras
import numpy as np
from common.results import tell
from common.training import build
from keras import ops

from keras_rfattn.diagnostics import recall


def main(args):
    cases = {("softmax", None): ("softmax", {}, None)}
    cases[("window alone", None)] = ("window_alone", {}, args.window)
    cases |= {
        (name, width): (*MECHANISMS[name](width), args.window)
        for name in args.mechanisms
        for width in args.widths
    }
    for seed in args.seeds:
        for (name, width), mechanism in cases.items():
            start = time.time()
            model = build(mechanism, seed, args.vocabulary, args)
            fit(model, args, seed)
            row = {"mechanism": name, "width": width, "seed": seed,
                   "accuracy": accuracy(model, args, seed),
                   "minutes": round((time.time() - start) / 60, 2)}  # fmt: skip
            tell(args, row)


def sequences(args, count, seed):
    return recall.mqar(count, args.length, args.pairs, args.vocabulary, seed)


def fit(model, args, seed):
    """Trains on fresh sequences, with a learning rate that falls to 0."""
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, args.steps, warmup_target=args.rate, warmup_steps=args.steps // 20
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate, clipnorm=1.0), loss)

    def batches():
        for step in range(args.steps):
            inputs, targets, weights = sequences(args, args.batch, (seed << 32) + step)
            # Keras divides by all tokens, of which few are queries.
            yield inputs, targets, weights * (args.length / args.pairs)

    model.fit(batches(), steps_per_epoch=args.steps, verbose=0)


def accuracy(model, args, seed):
    """Returns the share of queries whose value is the most probable token."""
    held_out = (1 << 62) + seed
    inputs, targets, weights = sequences(args, args.examples, held_out)
    found = [
        ops.convert_to_numpy(ops.argmax(model.predict_on_batch(inputs[i : i + 64]), -1))
        for i in range(0, args.examples, 64)
    ]
    right = np.concatenate(found) == targets
    return float(np.sum(right * weights) / np.sum(weights))


if __name__ == "__main__":
    main(args)
