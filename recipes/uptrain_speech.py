"""Uptrain a Conformer for speech recognition to linear attention.

Chefs' Random Tables, figure 3 (Likhosherstov et al., 2022), and Hybrid Random Features,
table 2 (Choromanski et al., 2022), at a size for one core: a Conformer encoder trained
by CTC on utterances of 3 to 12 spoken digits, each joined on the fly from recordings of
one speaker. Softmax is trained first, then every mechanism from scratch, and uptrained,
that is, from the weights of softmax, with equal steps at equal rates.

    KERAS_BACKEND=torch python recipes/uptrain_speech.py --data-dir DIR --seeds 0 1 2

DIR holds spoken_digits/spoken_digits.npz, the Free Spoken Digit Dataset: `samples` (8
kHz, int16, one recording after the other), `lengths`, `digit`, `speaker`, `index` and
`rate`. The metric is edits divided by digits, for speakers who are not in the training
data ("new voices"), and for recordings 0 to 4 of the others ("new takes").

The clustered hybrid is the paper's HRF-C(2, 2): FAVOR+ for a quarter of the steps, then
clusters are computed once and kept. It is four times as wide as its number of vectors.
Controls are trained in the same way: softmax, uniform and no attention.
Cost: an hour a seed on one busy core. Seen: docs/pages/reproductions (crt.md, hrf.md).
"""

import pathlib
import time

from common.program import make_parser, parse, tell

CLUSTERS = {"num_clusters": (2, 2)}
MECHANISMS = {
    f"{name}-{m}": (name, {"num_features": m, **arguments}, {})
    for name, arguments in
    {"favorplus": {}, "favorpp": {}, "hybrid_clustered": CLUSTERS}.items()
    for m in (8, 16)
}  # fmt: skip
ARMS = ["softmax", *MECHANISMS, "uniform", "no_attention"]
STARTS = ["scratch", "uptrained"]
DIM, HEADS, KERNEL, DROPOUT = 96, 4, 3, 0.1
BATCH, RATE, WEIGHT_DECAY = 8, 1e-3, 1e-3
NEW_VOICES = "theo", "yweweler"
SHORTEST, LONGEST = 3, 12  # digits per utterance
# There is a spectrum of 32 ms every 10 ms, and a token covers 4 of them.
MELS, FRAMES, STRIDE = 40, 512, 4
TOKENS = FRAMES // STRIDE

parser = make_parser(
    __doc__, data_dir=pathlib.Path, arms=ARMS, starts=STARTS, seeds=[0],
)  # fmt: skip
parser.set_defaults(steps=2500, arm_steps=600, tested=400, blocks=3)
args = parse(
    parser, steps=2, arm_steps=2, tested=4, blocks=1, starts=["uptrained"],
    arms=["favorpp-8", "hybrid_clustered-8", "no_attention"],
)  # fmt: skip

import keras
import numpy as np
from common import controls
from keras import layers, ops

from keras_rfattn.papers.calibrate_after import CalibrateAfter


def main(args):
    data = SpokenDigits(args.data_dir / "spoken_digits" / "spoken_digits.npz")
    for seed in args.seeds:
        softmax = conformer(seed, args.blocks)
        row = {"seed": seed, "start": "pretraining", "arm": "softmax"}
        tell(args, trained(softmax, data, row, args.steps, args.tested))
        for start in args.starts:
            for arm in args.arms:
                model = conformer(seed, args.blocks)
                if start == "uptrained":
                    model.set_weights(softmax.get_weights())
                row = {"seed": seed, "start": start, "arm": arm}
                row |= controls.set_attention(model, arm, MECHANISMS.get(arm), seed)
                tell(args, trained(model, data, row, args.arm_steps, args.tested))


def conformer(seed, blocks):
    """Builds a Conformer (Gulati et al., 2020) with logits for blank and digits."""
    keras.utils.set_random_seed(seed)
    features = keras.Input((FRAMES, MELS), name="features")
    real = keras.Input((TOKENS,), dtype="bool", name="real")
    shown, x = ops.cast(real, "float32")[..., None], features
    for stride in (2, STRIDE // 2):
        x = layers.Conv1D(DIM, 3, stride, padding="same", activation="silu")(x)
    angles = np.arange(TOKENS)[:, None] / 1e4 ** (2 * np.arange(DIM // 2) / DIM)
    positions = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)
    x = DIM**0.5 * x + positions.astype("float32")
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
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, steps, warmup_target=RATE, warmup_steps=steps // 10 + 1
    )
    model.compile(keras.optimizers.AdamW(rate, WEIGHT_DECAY, clipnorm=1.0), ctc)
    callbacks = []
    if "clustered" in row["arm"]:
        batch, _ = data.utterances("train", 4 * BATCH, np.random.default_rng(0))
        after = max(1, steps // 4)
        callbacks = [CalibrateAfter([batch], after, exact=False)]

    def batches():
        while True:
            yield data.utterances("train", BATCH, generator)

    model.fit(
        batches(), steps_per_epoch=steps, callbacks=callbacks, verbose=0, shuffle=False
    )
    for part in ("new takes", "new voices"):
        inputs, targets = data.utterances(part, tested, np.random.default_rng(1))
        logits = model.predict(inputs, batch_size=50, verbose=0)
        row[part] = error_rate(logits, targets)
    row["test"] = (row["new takes"] + row["new voices"]) / 2
    return row | {"steps": steps, "minutes": round((time.time() - start) / 60, 2)}


class SpokenDigits:
    """Log-mel spectrograms of digits, which are joined to utterances on the fly."""

    def __init__(self, path):
        with np.load(path) as file:
            self.digit, self.speaker = file["digit"], file["speaker"]
            self.index, lengths = file["index"], file["lengths"]
            ends, rate = np.cumsum(lengths), int(file["rate"])
            sound = file["samples"] / np.float32(2**15)
        samples = np.zeros((len(lengths), lengths.max()), "float32")
        for row, end, length in zip(samples, ends, lengths, strict=True):
            row[:length] = sound[end - length : end]
        hop = rate // 100
        mel = layers.MelSpectrogram(
            256, hop, sampling_rate=rate, num_mel_bins=MELS, top_db=200.0
        )
        spectra = [ops.convert_to_numpy(mel(x)) for x in np.array_split(samples, 10)]
        pairs = zip(np.concatenate(spectra), 1 + lengths // hop, strict=True)
        self.features = [standardized(x[:, :count].T) for x, count in pairs]

    def of(self, part):
        """Returns the indices of the recordings of a part, one array per speaker."""
        known = ~np.isin(self.speaker, NEW_VOICES)
        chosen = {
            "train": known & (self.index >= 10),
            "new takes": known & (self.index < 5),
            "new voices": ~known,
        }[part]
        names = np.unique(self.speaker[chosen])
        return [np.flatnonzero(chosen & (self.speaker == name)) for name in names]

    def utterances(self, part, count, generator):
        """Returns `(inputs, targets)`; a target ends with its number of tokens."""
        speakers = self.of(part)
        features = np.zeros((count, FRAMES, MELS), "float32")
        real = np.zeros((count, TOKENS), bool)
        targets = np.zeros((count, LONGEST + 1), "int32")
        for i in range(count):
            numbers = speakers[generator.integers(len(speakers))]
            size = generator.integers(SHORTEST, LONGEST + 1)
            numbers = generator.choice(numbers, size)
            ends = np.cumsum([len(self.features[n]) for n in numbers])
            numbers = numbers[ends <= FRAMES]  # digits that fit
            joined = np.concatenate([self.features[n] for n in numbers])
            if part == "train":
                mask(joined, generator)
            features[i, : len(joined)] = joined
            tokens = -(-len(joined) // STRIDE)
            real[i, :tokens], targets[i, -1] = True, tokens
            targets[i, : len(numbers)] = 1 + self.digit[numbers]
        return {"features": features, "real": real}, targets


def standardized(x):
    """Normalizes each band, which removes the effect of a speaker's microphone."""
    return (x - x.mean(0)) / (x.std(0) + 1e-3)


def mask(x, generator):
    """SpecAugment (Park et al., 2019): bands of frequency and of time become 0."""
    low = generator.integers(MELS - 8)
    x[:, low : low + generator.integers(9)] = 0
    for start in generator.integers(len(x), size=len(x) // 100):
        x[start : start + generator.integers(21)] = 0


def ctc(targets, logits):
    """Computes the CTC loss, with digits from 1 on and 0 for the blank."""
    targets = ops.cast(targets, "int32")
    digits, tokens = targets[:, :-1], targets[:, -1]
    count = ops.sum(ops.cast(digits > 0, "int32"), -1)
    return ops.ctc_loss(digits, logits, count, tokens)


def error_rate(logits, targets):
    """Returns the edits divided by the number of digits, after greedy decoding."""
    decoded = ops.ctc_decode(logits, targets[:, -1])[0][0]
    pairs = zip(ops.convert_to_numpy(decoded), targets[:, :-1], strict=True)
    edits = sum(distance(a[a > 0], b[b > 0]) for a, b in pairs)
    return float(edits / np.sum(targets[:, :-1] > 0))


def distance(a, b):
    """Returns the edits (Levenshtein distance) from a sequence to an array."""
    row = place = np.arange(len(b) + 1)
    for x in a:
        last, row = row, row + 1
        row[1:] = np.minimum(row[1:], last[:-1] + (b != x))
        # Insertions cost 1 for each position.
        row = np.minimum.accumulate(row - place) + place
    return int(row[-1])


if __name__ == "__main__":
    main(args)
