"""Train a character language model with softmax and with linear attention.

PolySketchFormer (Kacham et al., 2024), section 4 and figure 2, at a size for 2 cores:
Transformer++ blocks, equal steps for every mechanism, perplexity on held-out text.

    python recipes/train_language_model.py --data-dir DIR [--steps 1000]

DIR holds `wikitext2/{valid,test}.txt` (WikiText-2). The first 90 % of valid are for
training, and its last 10 % for validation. test is read once, at the end of each run.
The control for models with a window is "local", which has softmax in such windows and
nothing beyond, trained in the same way. Each linear model is also evaluated with its
window alone and with its features alone. Configurations are below; heads have the
paper's 64 dimensions. (In polynomial attention of degree 4, a key equal to the query
has weight `head_dim²`, and one of random direction has 3 on average. With heads of 32,
a context of 256 nearly drowns it.) Each run appends a line to `--results`: command,
mechanism, seed, minutes, perplexities. Cost: 9 to 42 minutes each on one core.
"""

import pathlib
import time

from common.flags import TINY, make_parser, parse

LEARNING_RATE, WARMUP, WEIGHT_DECAY = 3e-3, 0.1, 0.05
WINDOW, SKETCH, WIDTH = 64, {"num_features": 16}, {"num_features": 256}
PARTS = 131_073  # test characters to evaluate the window or the features alone
MECHANISMS = {
    "softmax": ("softmax", {}, None),
    "polysketch_learned + local": ("polysketch_learned", SKETCH, WINDOW),
    "polysketch + local": ("polysketch", SKETCH, WINDOW),
    "favorplus": ("favorplus", WIDTH, None),
    "favorpp": ("favorpp", WIDTH, None),
    "favorpp + local": ("favorpp", WIDTH, WINDOW),
    "polynomial (degree 4)": ("polynomial", {"degree": 4}, None),
    "polysketch_learned": ("polysketch_learned", SKETCH, None),
    # Control: softmax in windows of the same size, and no attention beyond.
    "local": ("window_alone", {}, WINDOW),
    # Variations of the mechanisms above.
    "polynomial (degree 2)": ("polynomial", {"degree": 2}, None),
    "polynomial (degree 8)": ("polynomial", {"degree": 8}, None),
    "polysketch_learned + local 128": ("polysketch_learned", SKETCH, 128),
    "polysketch_learned 32 + local": (
        "polysketch_learned",
        {"num_features": 32},
        WINDOW,
    ),
    "polysketch": ("polysketch", SKETCH, None),
}

# Flags are parsed before the slow imports.
parser = make_parser(
    __doc__, data_dir=pathlib.Path, results="train_language_model.jsonl",
    mechanisms=list(MECHANISMS), seeds=[0], num_layers=3, num_heads=2, head_dim=64,
    steps=1000, batch=16, context=256,
)  # fmt: skip
mechanisms = ["softmax", "favorpp", "local"]
args = parse(parser, **TINY, batch=4, head_dim=8, mechanisms=mechanisms)

import keras
import numpy as np
from common import characters, training
from common.results import record

from keras_rfattn import diagnostics


def main(args):
    text, watched, test, vocabulary = characters.load(args.data_dir)
    print(
        f"{text.size:,} characters of training, {test.size:,} of test, {vocabulary} "
        f"kinds; {args.steps} steps of {args.batch} x {args.context}"
    )
    rows = []
    for seed in args.seeds:
        for name in args.mechanisms:
            start = time.time()
            model = training.build(MECHANISMS[name], seed, vocabulary, args)
            fit(model, text, args, seed)
            row = {
                "mechanism": name,
                "seed": seed,
                "steps": args.steps,
                **training.sizes(args),
                "parameters": model.count_params(),
                "watched": perplexity(model, watched, args),
                "test": perplexity(model, test, args),
                "minutes": round((time.time() - start) / 60, 2),
            }
            if name != "softmax":
                parts = diagnostics.attribute(
                    model, test[:PARTS], lambda *x: perplexity(*x, args)
                )
                row["parts"] = vars(parts)
            rows.append(row)
            print_row(row, rows)
            record(args, row)


def fit(model, text, args, seed):
    warmup = max(1, int(WARMUP * args.steps))
    rate = keras.optimizers.schedules.PolynomialDecay(LEARNING_RATE, args.steps)
    model.compile(
        keras.optimizers.AdamW(
            Warmup(rate, warmup), weight_decay=WEIGHT_DECAY, clipnorm=1.0
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    generator = np.random.default_rng(seed)

    def batches():
        while True:
            length = args.context + 1
            rows = characters.pieces(text, args.batch, length, generator)
            yield rows[:, :-1], rows[:, 1:]

    model.fit(batches(), steps_per_epoch=args.steps, verbose=2)


@keras.saving.register_keras_serializable("recipes")
class Warmup(keras.optimizers.schedules.LearningRateSchedule):
    """Another schedule, preceded by a linear warmup over the first steps."""

    def __init__(self, schedule, steps):
        self.schedule, self.steps = schedule, steps

    def __call__(self, step):
        rise = keras.ops.cast(step + 1, "float32") / self.steps
        return self.schedule(step) * keras.ops.minimum(rise, 1.0)


def perplexity(model, text, args):
    """Returns the perplexity per character on disjoint pieces of context length."""
    count = (text.size - 1) // args.context
    rows = text[: count * args.context + 1]
    x = rows[:-1].reshape(count, args.context)
    y = rows[1:].reshape(count, args.context)
    return float(np.exp(model.evaluate(x, y, batch_size=args.batch, verbose=0)))


def print_row(row, rows):
    softmax = [r["test"] for r in rows if r["mechanism"] == "softmax"]
    gap = f"{row['test'] / softmax[-1] - 1:+.1%}" if softmax else ""
    print(
        f"{row['mechanism']:28} seed {row['seed']} {row['parameters']:9,} weights  "
        f"test perplexity {row['test']:.3f} {gap:>7}  watched {row['watched']:.3f}  "
        f"{row['minutes']:.1f} min",
        flush=True,
    )


if __name__ == "__main__":
    main(args)
