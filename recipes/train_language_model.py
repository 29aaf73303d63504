"""Train a character language model with softmax and with linear attention.

PolySketchFormer (Kacham et al., 2024), section 4 and figure 2, at a size for 2 cores:
Transformer++ blocks, equal steps for every mechanism, perplexity on held-out text.

    python recipes/train_language_model.py --data-dir DIR [--steps 1000]

DIR holds `wikitext2/{valid,test}.txt` (WikiText-2): valid is for training. The control
for models with a window is "local", which has softmax in such windows and nothing
beyond, trained in the same way. Each linear model is also evaluated with its window
alone and with its features alone. Heads have the paper's 64 dimensions.
Cost: 9 to 42 minutes each on one core.
Seen: docs/pages/reproductions/polysketchformer.md.
"""

import pathlib
import time

from common.program import make_parser, parse, tell

WINDOW, SKETCH, WIDTH = 64, {"num_features": 16}, {"num_features": 256}
MECHANISMS = {
    "softmax": ("softmax", {}, None),
    "polysketch_learned + local": ("polysketch_learned", SKETCH, WINDOW),
    "polysketch + local": ("polysketch", SKETCH, WINDOW),
    "polysketch_learned": ("polysketch_learned", SKETCH, None),
    "polysketch": ("polysketch", SKETCH, None),
    "polynomial (degree 2)": ("polynomial", {"degree": 2}, None),
    "polynomial (degree 4)": ("polynomial", {"degree": 4}, None),
    "favorplus": ("favorplus", WIDTH, None),
    "favorpp": ("favorpp", WIDTH, None),
    "favorpp + local": ("favorpp", WIDTH, WINDOW),
    # Control: softmax in windows of the same size, and no attention beyond.
    "local": ("window_alone", {}, WINDOW),
}
LEARNING_RATE, WARMUP, WEIGHT_DECAY = 3e-3, 0.1, 0.05
PARTS = 131_073  # test characters to evaluate the window or the features alone

parser = make_parser(
    __doc__, data_dir=pathlib.Path,
    mechanisms=list(MECHANISMS), seeds=[0], num_layers=3, num_heads=2, head_dim=64,
    steps=1000, batch=16, context=256,
)  # fmt: skip
args = parse(
    parser, steps=2, context=16, num_layers=1, batch=4, head_dim=8,
    mechanisms=["softmax", "favorpp", "local"],
)  # fmt: skip

import keras
import numpy as np
from common import characters, training

from keras_rfattn import diagnostics


def main(args):
    text = characters.load(args.data_dir)
    for seed in args.seeds:
        for name in args.mechanisms:
            start = time.time()
            model = training.build(MECHANISMS[name], seed, text.vocabulary, args)
            fit(model, text.train, args, seed)
            row = {"mechanism": name, "seed": seed, "steps": args.steps}
            row["parameters"] = model.count_params()
            row["test"] = perplexity(model, text.test)
            row["minutes"] = round((time.time() - start) / 60, 2)
            if name != "softmax":
                parts = diagnostics.attribute(model, text.test[:PARTS], perplexity)
                row["parts"] = vars(parts)
            tell(args, row)


def fit(model, text, args, seed):
    optimizer = keras.optimizers.AdamW(
        Warmup(args.steps), weight_decay=WEIGHT_DECAY, clipnorm=1.0
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    generator = np.random.default_rng(seed)

    def batches():
        while True:
            length = args.context + 1
            rows = characters.pieces(text, args.batch, length, generator)
            yield rows[:, :-1], rows[:, 1:]

    model.fit(batches(), steps_per_epoch=args.steps, verbose=2)


class Warmup(keras.optimizers.schedules.LearningRateSchedule):
    """A linear decay whose first steps rise linearly from 0."""

    def __init__(self, steps):
        self.decay = keras.optimizers.schedules.PolynomialDecay(LEARNING_RATE, steps)
        self.warmup = max(1, int(WARMUP * steps))

    def __call__(self, step):
        rise = keras.ops.cast(step + 1, "float32") / self.warmup
        return self.decay(step) * keras.ops.minimum(rise, 1.0)


def perplexity(model, text):
    """Returns the perplexity per character on disjoint pieces of context length."""
    count = (text.size - 1) // args.context
    x = text[: count * args.context].reshape(count, args.context)
    y = text[1 : count * args.context + 1].reshape(count, args.context)
    return float(np.exp(model.evaluate(x, y, batch_size=args.batch, verbose=0)))


if __name__ == "__main__":
    main(args)
