"""Uptrain a Conformer for speech recognition to linear attention.

Chefs' Random Tables, figure 3 (Likhosherstov et al., 2022), and Hybrid Random Features,
table 2 (Choromanski et al., 2022), at a size for one core: a Conformer encoder trained
by CTC on utterances of 3 to 12 spoken digits, each joined on the fly from recordings of
one speaker. Softmax is trained first. Then every mechanism is trained from scratch, and
uptrained, that is, trained from the weights of softmax. All arms take equal steps at
equal rates.

    KERAS_BACKEND=torch python recipes/uptrain_speech.py --data-dir DIR --seeds 0 1 2

DIR holds spoken_digits/spoken_digits.npz, the Free Spoken Digit Dataset: `samples` (8
kHz, int16, one recording after the other), `lengths`, `digit`, `speaker`, `index` and
`rate`. Tests are on speakers who are not in the training data ("new voices"), and on
recordings 0 to 4 of the others, the set's own test split ("new takes"). The metric is
the token error rate: edits divided by digits. "test" is the mean of both.

The clustered hybrid is the paper's HRF-C(2, 2): FAVOR+ for a quarter of the steps, then
clusters are computed once and kept. The angular hybrid is its HRF-A (8, 8) and (16, 8).
"unit" has queries and keys of length one: without this the hybrid hardly trains, but it
makes attention differ from softmax. Hybrids of m vectors are wider than m; widths are
printed, and FAVOR+ of 256 is included as in the paper's table. Controls are trained in
the same way: softmax, uniform attention (the mean of V), no attention. "estimates" are
errors of untrained maps against the model's softmax, and against a softmax that is
blunter or sharper by four.

Sizes and rates were set by short trainings of softmax and of no attention on recordings
5 to 9, which no arm trains on. Kernels have 3 tokens, not the paper's 31: with 7, no
attention was as good as softmax there, as digits hardly need each other.
Cost: an hour or two a seed on one busy core. Found, three seeds (docs/pages/lab/
crt.md): maps hardly differ; uptrained 0.14 to 0.18, from scratch 0.23 to 0.31.
"""

import pathlib
import time

from common.flags import make_parser, parse

COEFFICIENTS, UNIT = {"num_coefficients": 8}, {"temperature": 1.0}
MAPS = {
    "favorplus": ("favorplus", {}, {}),
    "favorpp": ("favorpp", {}, {}),
    "hybrid_clustered": ("hybrid_clustered", {"num_clusters": (2, 2)}, {}),
    "hybrid_angular_unit": ("hybrid_angular", COEFFICIENTS, UNIT),
    "hybrid_angular": ("hybrid_angular", COEFFICIENTS, {}),
}
WIDTHS = {"favorplus": (8, 16, 256), "hybrid_angular": (8,)}
MECHANISMS = {
    f"{key}-{m}": (name, {"num_features": m, **arguments}, options)
    for key, (name, arguments, options) in MAPS.items()
    for m in WIDTHS.get(key, (8, 16))
}
FAVOR = ["favorplus", "favorpp"]
ARMS = ["softmax", *MECHANISMS, "uniform", "no_attention"]
STARTS = ["scratch", "uptrained", "estimates"]
DIM, HEADS, KERNEL, DROPOUT = 96, 4, 3, 0.1
BATCH, RATE, WEIGHT_DECAY = 8, 1e-3, 1e-3
COMPARED = (8, 16, 64), 5, (0.25, 1, 4)  # widths; number of draws; factors of q · k

# Flags are parsed before the slow imports.
parser = make_parser(
    __doc__, data_dir=pathlib.Path, arms=ARMS, starts=STARTS, seeds=[0],
    results="uptrain_speech.jsonl",
)  # fmt: skip
parser.set_defaults(steps=2500, arm_steps=600, tested=400, blocks=3)
args = parse(
    parser, steps=2, arm_steps=2, tested=4, blocks=1, starts=["uptrained"],
    arms=["favorpp-8", "hybrid_clustered-8", "no_attention"],
)  # fmt: skip

import keras
import numpy as np
from common import controls
from common.estimates import estimates
from common.results import record, tell
from common.schedules import cosine
from common.spoken_digits import (
    FRAMES,
    MELS,
    STRIDE,
    TOKENS,
    SpokenDigits,
    ctc,
    error_rate,
)
from keras import layers, ops

import keras_rfattn


def main(args):
    data = SpokenDigits(args.data_dir / "spoken_digits" / "spoken_digits.npz")
    rows = []

    def run(model, steps, **row):
        rows.append(trained(model, data, row, steps, args.tested))
        tell(args, rows[-1])

    for seed in args.seeds:
        softmax = conformer(seed, args.blocks)
        run(softmax, args.steps, seed=seed, start="pretraining", arm="softmax")
        if "estimates" in args.starts:
            inputs, _ = data.utterances("train", 4 * BATCH, np.random.default_rng(0))
            for found in estimates(softmax, inputs, FAVOR, *COMPARED):
                record(args, {"seed": seed, **found})
        for start in (x for x in args.starts if x != "estimates"):
            for arm in args.arms:
                model = conformer(seed, args.blocks)
                if start == "uptrained":
                    model.set_weights(softmax.get_weights())
                width = controls.set_attention(model, arm, MECHANISMS.get(arm), seed)
                run(model, args.arm_steps, seed=seed, start=start, arm=arm, **width)
    columns = "width", "before", "new takes", "new voices", "test"
    controls.summarize(rows, columns, pairs())


def pairs():
    """Returns pairs of arms, the first of which should have the lower error."""
    chain = "hybrid_clustered-16", "hybrid_angular_unit-16", "favorplus-256"
    found = [("favorpp-8", "favorplus-8"), ("favorpp-16", "favorplus-16")]
    found += zip(chain, chain[1:], strict=False)
    compared = [((x, a), (x, b)) for x in STARTS for a, b in found]
    return compared + [(("uptrained", x), ("scratch", x)) for x in ARMS]


def conformer(seed, blocks):
    """Builds a Conformer (Gulati et al., 2020) with logits for blank and digits."""
    keras.utils.set_random_seed(seed)
    features = keras.Input((FRAMES, MELS), name="features")
    real = keras.Input((TOKENS,), dtype="bool", name="real")
    shown, x = ops.cast(real, "float32")[..., None], features
    for stride in (2, STRIDE // 2):
        x = layers.Conv1D(DIM, 3, stride, padding="same", activation="silu")(x)
    angles = np.arange(TOKENS)[:, None] / 1e4 ** (2 * np.arange(DIM // 2) / DIM)
    places = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)
    x = DIM**0.5 * x + places.astype("float32")
    for _ in range(blocks):
        x = x + 0.5 * feed_forward(x)
        y = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(HEADS, DIM // HEADS)
        y = attention(y, y, attention_mask=real[:, None])
        x = x + layers.Dropout(DROPOUT)(y)
        x = x + convolution(x, shown)
        x = x + 0.5 * feed_forward(x)
        x = layers.LayerNormalization()(x)
    return keras.Model([features, real], layers.Dense(11)(x))


def feed_forward(x):
    x = layers.Dense(2 * DIM, "silu")(layers.LayerNormalization()(x))
    return layers.Dropout(DROPOUT)(layers.Dense(DIM)(x))


def convolution(x, shown):
    x = layers.Dense(2 * DIM)(layers.LayerNormalization()(x))
    x = shown * x[..., :DIM] * ops.sigmoid(x[..., DIM:])
    x = layers.DepthwiseConv1D(KERNEL, padding="same")(x)
    # The paper normalizes over the batch, whose statistics would include padding here.
    x = layers.Activation("silu")(layers.LayerNormalization()(x))
    return layers.Dropout(DROPOUT)(layers.Dense(DIM)(x))


def trained(model, data, row, steps, tested):
    """Trains a model, and adds the results to its row."""
    start, generator = time.time(), np.random.default_rng(row["seed"])
    rate = cosine(RATE, steps)
    model.compile(keras.optimizers.AdamW(rate, WEIGHT_DECAY, clipnorm=1.0), ctc)
    row["before"] = error_rates(model, data, tested)["test"]
    callbacks = []
    if "clustered" in row["arm"]:
        some, _ = data.utterances("train", 4 * BATCH, np.random.default_rng(0))
        after = max(1, steps // 4)
        callbacks = [keras_rfattn.CalibrateAfter([some], after, exact=False)]

    def batches():
        while True:
            yield data.utterances("train", BATCH, generator)

    history = model.fit(
        batches(), steps_per_epoch=steps, callbacks=callbacks, verbose=0,
        shuffle=False,
    ).history  # fmt: skip
    row |= {"steps": steps, "loss": history["loss"][-1]}
    row |= error_rates(model, data, tested)
    row["minutes"] = round((time.time() - start) / 60, 2)
    return row


def error_rates(model, data, tested):
    rates = {}
    for part in ("new takes", "new voices"):
        inputs, targets = data.utterances(part, tested, np.random.default_rng(1))
        logits = model.predict(inputs, batch_size=50, verbose=0)
        rates[part] = error_rate(logits, targets)
    return rates | {"test": sum(rates.values()) / 2}


if __name__ == "__main__":
    main(args)
