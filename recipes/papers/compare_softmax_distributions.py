"""Compare estimated softmax distributions over the words of a language model.

Hybrid Random Features (Choromanski et al., 2022), section 4.2 and I, on a 2-layer LSTM
with tied embeddings: table 4 with figures 3 and 7 (vector lengths unchanged), and table
5 with figures 8 and 9 (the regularizer of equation 105, λ1 = λ2 = 2, τ = 6).

    python recipes/papers/compare_softmax_distributions.py --data-dir DIR [--seeds 0]

DIR holds `wikitext2/{valid,test}.txt`; the paper uses PennTree Bank and all of
WikiText-2, with larger models. Distances compare distributions over classes, in the
order in which words appear, as in the authors' notebooks (HL-hanlin/HRF_ICLR2022):
Kolmogorov-Smirnov and, divided by the number of classes, Wasserstein. "negative" is the
share of estimates below 0, which count as 0. The control is the uniform distribution.
Products of states and classes are also made smaller, by 4 and 16; 64 vectors there are
as many as a hybrid of 512 has.
Cost: 12 minutes a seed on one core. Seen: docs/pages/reproductions/hrf.md.
"""

import pathlib
import sys
import time
from functools import partial

sys.path.append(str(pathlib.Path(__file__).parents[1]))  # where `common` is

from common.program import make_parser, parse, tell

parser = make_parser(__doc__, data_dir=pathlib.Path, seeds=[0, 1, 2])
parser.set_defaults(
    vocabulary=4000, epochs=8, rows=None, draws=10, widths=(64, 128, 256, 512)
)
args = parse(parser, vocabulary=20, epochs=1, rows=64, draws=1, widths=(64,))

import keras
import numpy as np
from common import words
from keras import ops
from scipy import special

from keras_rfattn import papers
from keras_rfattn.diagnostics import errors
from keras_rfattn.feature_maps import FavorPP
from keras_rfattn.layers.recording import Sequence

DIM, LENGTH, DROPOUT, LEARNING_RATE, QUERIES = 128, 35, 0.2, 2e-3, 100
STRENGTH, TAU, SHORTER = 2.0, 6.0, (4, 16)
# A hybrid has as many products m n as other maps have vectors; n = 8, as in the paper.
MAPS = {
    "favorplus": (1, papers.FavorPlusPair),
    "favor": (1, papers.Favor),
    "hybrid_gaussian": (8, partial(papers.HybridGaussian, num_coefficients=8)),
    "hybrid_angular": (8, partial(papers.HybridAngular, num_coefficients=8)),
    "favorpp": (1, FavorPP),
}
FIELDS = ("ks", "wasserstein", "negative")


def main(args):
    vocabulary = args.vocabulary
    parts = words.load(args.data_dir, vocabulary, LENGTH)
    train, watched, test = (part[: args.rows] for part in parts)
    print(f"{train.size} words of training, {test.size} of test, {vocabulary} classes")
    for seed in args.seeds:
        for table, tau in (("table 4", 1.0), ("table 5", TAU)):
            start = time.time()
            model = make_model(vocabulary, tau, seed)
            data = [(x[:, :-1], x[:, 1:]) for x in (train, watched)]
            words.fit(model, *data, args.epochs)
            classes = model.get_layer("classes").get_weights()[0].astype("float64")
            states = encode(model, test)
            perplexity = words.perplexity(tau * states, classes, test[:, 1:])
            minutes = round((time.time() - start) / 60, 2)
            row = {"table": table, "seed": seed}
            tell(args, {**row, "perplexity": perplexity, "minutes": minutes})
            chosen = np.random.default_rng(seed).permutation(test[:, 1:].size)[:QUERIES]
            states = tau**0.5 * states.reshape(-1, DIM)[chosen]
            compare(args, {**row, "arm": ""}, states, tau**0.5 * classes, args.widths)
            for factor in SHORTER:
                short = states / factor**0.5, tau**0.5 * classes / factor**0.5
                arm = {"arm": f"products over {factor}"}
                compare(args, row | arm, *short, args.widths[::3])


def make_model(vocabulary, tau, seed):
    """Builds a model of the next word's logits; its last LSTM layer gives states."""
    keras.utils.set_random_seed(seed)

    def penalty(x):
        return STRENGTH * ops.mean(ops.square(ops.norm(x, axis=-1) - 1))

    def penalties(x):
        # Keras divides penalties on a layer's outputs by the batch size.
        return penalty(x) * ops.cast(ops.shape(x)[0], x.dtype)

    regularized = tau != 1
    embedding = keras.layers.ReversibleEmbedding(
        vocabulary, DIM, name="classes",
        embeddings_initializer=keras.initializers.RandomUniform(-0.1, 0.1),
        embeddings_regularizer=penalty if regularized else None,
    )  # fmt: skip
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Dropout(DROPOUT)(embedding(inputs))
    x = keras.layers.LSTM(DIM, return_sequences=True)(x)
    x = keras.layers.Dropout(DROPOUT)(x)
    x = keras.layers.LSTM(
        DIM, return_sequences=True, name="states",
        activity_regularizer=penalties if regularized else None,
    )(x)  # fmt: skip
    x = keras.layers.Dropout(DROPOUT)(x)
    model = keras.Model(inputs, embedding(tau * x, reverse=True))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(LEARNING_RATE, clipnorm=1.0), loss)
    return model


def encode(model, rows):
    """Returns the states of all words."""
    encoder = keras.Model(model.inputs, model.get_layer("states").output)
    return encoder.predict(rows[:, :-1], verbose=0).astype("float64")


def compare(args, row, query, key, widths):
    """Records the distances of all maps for given states and classes."""
    exact = special.softmax(query @ key.T, axis=-1)
    uniform = distances(exact, np.ones_like(exact))
    tell(args, {**row, "map": "uniform", **summary([uniform])})
    for name in MAPS:
        for width in widths:
            draws = [
                distances(exact, estimate(name, width, query, key, draw))
                for draw in range(args.draws)
            ]
            tell(args, {**row, "map": name, "width": width, **summary(draws)})


def summary(draws):
    """Returns means over draws by the name of the distance."""
    means = np.mean(draws, 0).round(4).tolist()
    return dict(zip(FIELDS, means, strict=True))


def estimate(name, width, query, key, draw):
    share, make = MAPS[name]
    feature_map = make(width // share, seed=draw)
    feature_map.build((None, None, 1, DIM))
    query, key = query[None], key[None]
    if feature_map.is_adaptive:
        feature_map.adapt([(query, key)])
    return errors.estimate(feature_map, Sequence(query, key, key, False)).values[0]


def distances(exact, estimates):
    """Returns the distances as means over states, in the order of FIELDS."""
    positive = np.maximum(estimates, 0)
    positive /= np.maximum(positive.sum(-1, keepdims=True), 1e-300)
    gaps = np.abs(np.cumsum(positive - exact, -1))
    return gaps.max(-1).mean(), gaps.mean(), np.mean(estimates < 0)


if __name__ == "__main__":
    main(args)
