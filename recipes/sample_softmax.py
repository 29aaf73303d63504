"""Sample classes of a language model from random features of its softmax.

Hybrid Random Features (Choromanski et al., 2022), section 4.2, I.1, tables 4 and 5: how
far estimated softmax distributions over classes are from the true ones, and training
with sampled softmax whose negatives come from the estimate (Rawat et al., 2019).

    python recipes/sample_softmax.py --data-dir DIR [--plot out.png] [--epochs 4]

DIR holds `wikitext2/{valid,test}.txt`; trained on valid (217k words), tested on test:
perplexities are not those of the paper, which trains on PennTree Bank and WikiText-2
whole. A 2-layer LSTM; hidden states and class embeddings of length √τ, as the sampling
needs bounded norms (Rawat et al.). Cost: 20 minutes on 2 cores that do other work too.

First table: Kolmogorov-Smirnov and 1-d Wasserstein distance (classes by frequency, on
[0, 1]) and the fraction of estimates below 0, mean ± std over draws, with the paper's
of PennTree Bank (table 4, its Wasserstein distances over its 10000 classes) in
brackets. Hybrids have the paper's m = width / 8 and n = 8. Second: test perplexity
under full softmax after training with each sampler, beside the exact distribution as
sampler. A sampler is half uniform, so that no class that an estimate misses is never
drawn, and linear in the number of classes: features of the states are averaged first.
"""

import argparse
import collections
import os
import pathlib
import time

TAU = 4.0
# What a map takes besides its width, and the share of it that its vectors are: a hybrid
# has as many products as others vectors (section I).
MAPS = {
    "favor": (1, {}),
    "favorplus": (1, {}),
    "favorpp": (1, {}),
    "hybrid_gaussian": (8, {"num_coefficients": 8, "radius": TAU**0.5}),
    "hybrid_angular": (8, {"num_coefficients": 8}),
}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", required=True, help="folder with wikitext2/")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--draws", type=int, default=10, help="of every map")
    parser.add_argument(
        "--samplers", nargs="+", default=list(MAPS), choices=MAPS, metavar="MAP",
        help="to train with, beside the exact and the uniform one: " + ", ".join(MAPS),
    )  # fmt: skip
    parser.add_argument("--plot", help="save the plot to this file")
    return parser.parse_args()


if __name__ == "__main__":  # before imports that take seconds
    args = parse_arguments()

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from keras import ops

from keras_rfattn import feature_maps
from keras_rfattn.diagnostics import errors
from keras_rfattn.layers import KernelFeatures
from keras_rfattn.layers.recording import Sequence

VOCABULARY, DIM, LENGTH, BATCH = 4000, 64, 35, 32
NEGATIVES, QUERIES, SEED = 100, 200, 0
# Numbers m of vectors of plain maps; hybrids have as many products m n.
WIDTHS = (64, 128, 256, 512)
SAMPLER_FEATURES = 1024
FIELDS = ("kolmogorov_smirnov", "wasserstein", "negative")
# Table 4, by width.
PAPER = {
    ("favorplus", "kolmogorov_smirnov"): (0.573, 0.569, 0.558, 0.551),
    ("favorplus", "wasserstein"): (0.317, 0.314, 0.305, 0.299),
    ("favor", "kolmogorov_smirnov"): (0.424, 0.427, 0.425, 0.424),
    ("favor", "wasserstein"): (0.158, 0.158, 0.157, 0.158),
    ("favor", "negative"): (0.257, 0.258, 0.258, 0.257),
    ("hybrid_gaussian", "kolmogorov_smirnov"): (0.411, 0.410, 0.410, 0.410),
    ("hybrid_gaussian", "wasserstein"): (0.152, 0.152, 0.152, 0.152),
    ("hybrid_gaussian", "negative"): (0.155, 0.159, 0.157, 0.151),
    ("hybrid_angular", "kolmogorov_smirnov"): (0.404, 0.419, 0.418, 0.414),
    ("hybrid_angular", "wasserstein"): (0.140, 0.145, 0.139, 0.143),
    ("hybrid_angular", "negative"): (0.152, 0.158, 0.153, 0.157),
}


def main(args):
    train, test = load(args)
    print(f"{train.size} words of training, {test.size} of test, {VOCABULARY} classes")
    found = {}
    for sampler in ("full softmax", "exact", "uniform", *args.samplers):
        keras.utils.set_random_seed(SEED)
        encoder, loss = make_model(sampler)
        start = time.time()
        fit(encoder, loss, train, args.epochs)
        found[sampler] = perplexity(encoder, loss, test)
        seconds = time.time() - start
        if sampler == "full softmax":
            print_statistics(encoder, loss, test, args)
            print(f"\n{'negatives from':<16}{'test perplexity':>16}{'seconds':>9}")
        print(f"{sampler:<16}{found[sampler]:>16.1f}{seconds:>9.0f}", flush=True)
    for sampler in args.samplers:
        better = found["exact"] < found[sampler] < found["uniform"]
        answer = "yes" if better else "no"
        print(f"check: {sampler} between exact and uniform sampling: {answer}")


def load(args):
    """Word numbers by frequency in training, 0 for all others: `(n, LENGTH + 1)`."""
    folder = pathlib.Path(args.data_dir) / "wikitext2"
    texts = [(folder / f"{part}.txt").read_text().split() for part in ("valid", "test")]
    counts = collections.Counter(texts[0])
    common = counts.most_common(VOCABULARY - 1)
    number = {word: i + 1 for i, (word, _) in enumerate(common)}
    result = []
    for text in texts:
        ids = np.array([number.get(word, 0) for word in text], "int32")
        starts = range(0, len(ids) - LENGTH, LENGTH)
        result.append(np.stack([ids[i : i + LENGTH + 1] for i in starts]))
    return result


class SampledSoftmax(keras.layers.Layer):
    """Cross-entropy of the next word against all classes, or against a sample.

    A batch shares its negatives, drawn from the mean of its states' distributions; a
    negative's logit is corrected by the logarithm of how often it is expected.
    """

    def __init__(self, sampler, **kwargs):
        super().__init__(**kwargs)
        self.sampler = sampler
        self.random = keras.random.SeedGenerator(SEED)
        self.features = None
        if sampler in MAPS:
            feature_map = make_map(sampler, SAMPLER_FEATURES, SEED)
            if feature_map.is_adaptive:
                # Lengths are √τ: the best A for unrelated states and classes.
                feature_map.build((None, None, 1, DIM))
                feature_map.update([2 * TAU])
            self.features = KernelFeatures(feature_map, "softmax")

    def build(self, shape):
        self.classes = self.add_weight(
            name="classes", shape=(VOCABULARY, DIM), initializer="random_normal"
        )
        if self.features is not None:
            self.features.build((None, DIM))

    def class_vectors(self):
        return bounded(self.classes)

    def call(self, states, targets):
        classes = self.class_vectors()
        if self.sampler == "full softmax":
            logits = ops.matmul(states, ops.transpose(classes))
            return keras.losses.sparse_categorical_crossentropy(
                targets, logits, from_logits=True
            )
        states = ops.reshape(states, (-1, DIM))
        targets = ops.reshape(targets, (-1,))
        log_q = self.log_probabilities(states, classes)
        drawn = keras.random.categorical(log_q[None], NEGATIVES, seed=self.random)
        negatives = ops.cast(drawn[0], "int32")
        own = ops.take(classes, targets, axis=0)
        positive = ops.sum(states * own, axis=-1)[:, None]
        logits = ops.matmul(states, ops.transpose(ops.take(classes, negatives, 0)))
        logits = logits - ops.take(log_q, negatives) - np.log(NEGATIVES)
        logits = ops.where(negatives[None] == targets[:, None], -1e9, logits)
        logits = ops.concatenate([positive, logits], axis=-1)
        return ops.logsumexp(logits, axis=-1) - positive[:, 0]

    def log_probabilities(self, states, classes):
        """The sampler's distribution over classes for a batch, `(VOCABULARY,)`."""
        # A sampler is given, not learnt.
        states, classes = ops.stop_gradient(states), ops.stop_gradient(classes)
        if self.sampler == "uniform":
            weights = ops.ones((VOCABULARY,), dtype=states.dtype)
        elif self.sampler == "exact":
            logits = ops.matmul(states, ops.transpose(classes))
            weights = ops.mean(ops.softmax(logits, axis=-1), axis=0)
        else:
            query = ops.mean(self.features(states), axis=0)
            weights = ops.matmul(self.features(classes, side="key"), query)
            # Signed estimates are no probabilities.
            weights = ops.maximum(weights, 0)
        weights = weights / ops.maximum(ops.sum(weights), 1e-20)
        return ops.log(0.5 * weights + 0.5 / VOCABULARY)


def bounded(x):
    return x / ops.norm(x, axis=-1, keepdims=True) * np.sqrt(TAU)


def make_model(sampler):
    """The encoder of words into states, and the loss that owns the classes."""
    words = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, DIM)(words)
    x = keras.layers.LSTM(2 * DIM, return_sequences=True)(x)
    x = keras.layers.LSTM(DIM, return_sequences=True)(x)
    return keras.Model(words, keras.layers.Lambda(bounded)(x)), SampledSoftmax(sampler)


def fit(encoder, loss, rows, epochs):
    words = keras.Input((LENGTH,), dtype="int32")
    targets = keras.Input((LENGTH,), dtype="int32")
    model = keras.Model([words, targets], loss(encoder(words), targets))
    model.compile(keras.optimizers.Adam(3e-3), loss=lambda _, value: ops.mean(value))
    count = len(rows) // BATCH * BATCH
    x = [rows[:count, :-1], rows[:count, 1:]]
    model.fit(x, np.zeros(count), batch_size=BATCH, epochs=epochs, verbose=2)


def perplexity(encoder, loss, rows):
    """On all classes, whatever was sampled in training."""
    states = encoder.predict(rows[:, :-1], verbose=0).reshape(-1, DIM)
    classes = ops.convert_to_numpy(loss.class_vectors())
    total, targets = 0.0, rows[:, 1:].ravel()
    for i in range(0, len(states), 4096):
        logits = states[i : i + 4096] @ classes.T
        logits -= logits.max(-1, keepdims=True)
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        total -= log_p[np.arange(len(log_p)), targets[i : i + 4096]].sum()
    return float(np.exp(total / len(states)))


def make_map(name, width, seed):
    share, arguments = MAPS[name]
    return feature_maps.get(name, num_features=width // share, seed=seed, **arguments)


def print_statistics(encoder, loss, rows, args):
    states = encoder.predict(rows[:, :-1], verbose=0).reshape(-1, DIM)
    chosen = np.random.default_rng(SEED).choice(len(states), QUERIES, replace=False)
    classes = ops.convert_to_numpy(loss.class_vectors()).astype("float64")
    sequence = Sequence(
        states[None, chosen].astype("float64"), classes[None], classes[None], False
    )
    obtuse = np.mean(states[chosen] @ classes.T < 0)
    print(f"\n{obtuse:.1%} of states and classes are at an obtuse angle")
    print(f"{'map':<16}{'at width':>9}{'KS':>24}{'Wasserstein':>24}{'negative':>24}")
    table = {}
    for i, width in enumerate(WIDTHS):
        for name in MAPS:
            found = []
            for draw in range(args.draws):
                feature_map = make_map(name, width, draw)
                feature_map.build((None, None, 1, DIM))
                if feature_map.is_adaptive:
                    feature_map.adapt([(sequence.query, sequence.key)])
                found.append(errors.head_errors(feature_map, [sequence], 0))
            table[name, width] = found
            line = f"{name:<16}{width:>9}"
            for field in FIELDS:
                values = [getattr(e, field) for e in found]
                cell = f"{np.mean(values):.3f} ±{np.std(values):.3f}"
                if (name, field) in PAPER:
                    cell += f" ({PAPER[name, field][i]:.3f})"
                line += f"{cell:>24}"
            print(line, flush=True)
    if args.plot:
        plot(table, args.plot)


def plot(table, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.5), layout="constrained")
    for axes, field in zip(figure.subplots(1, 3), FIELDS, strict=True):
        for name in dict.fromkeys(name for name, _ in table):
            means = [
                np.mean([getattr(e, field) for e in table[name, w]]) for w in WIDTHS
            ]
            axes.plot(WIDTHS, means, "o-", label=name)
        axes.set(title=field, xlabel="random vectors", xscale="log")
    axes.legend()
    figure.savefig(path, dpi=150)
    print(f"plot: {path}")


if __name__ == "__main__":
    main(args)
