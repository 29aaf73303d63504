"""Train a language model with negatives sampled from random features of its softmax.

Hybrid Random Features (Choromanski et al., 2022), section 4.2, I.1 and figure 10, after
Rawat et al. (2019). For every word, 40 wrong classes are drawn from an estimate of the
softmax distribution, and the loss is over them and the right class.

    python recipes/papers/sample_softmax.py --data-dir DIR [--seeds 0 1 2 3 4]

DIR holds `wikitext2/{valid,test}.txt`. The model, a 2-layer LSTM as in the paper but
smaller, is tested under full softmax. Sampling is with replacement and uses states and
classes of length 1; the loss uses both as they are. The right class is never drawn. The
logits of drawn classes are reduced by the logarithm of how often they are expected.

Controls are `uniform` sampling, the `exact` distribution, `normalized`, which is the
exact distribution of vectors of length 1 that the maps estimate, and `full`, the
softmax without sampling.
Cost: 15 to 30 minutes a seed. Seen: docs/pages/reproductions/hrf.md.
"""

import pathlib
import sys
import time
from functools import partial

sys.path.append(str(pathlib.Path(__file__).parents[1]))  # where `common` is

from common.program import make_parser, parse, tell

ESTIMATED = ("favor", "favorplus", "favorpp", "hybrid_angular")
CONTROLS = ("full", "exact", "normalized", "uniform")

parser = make_parser(
    __doc__, data_dir=pathlib.Path, seeds=range(5), samplers=[*CONTROLS, *ESTIMATED],
)  # fmt: skip
parser.set_defaults(vocabulary=2000, epochs=15, rows=None)
args = parse(parser, vocabulary=20, epochs=1, rows=64)

import keras
import numpy as np
from common import words
from keras import ops

from keras_rfattn import papers
from keras_rfattn.feature_maps import FavorPP

DIM, LENGTH, PATIENCE = 64, 35, 3
NEGATIVES, LEARNING_RATE, DROPOUT = 40, 6e-3, 0.2
MAPS = {
    "favor": partial(papers.Favor, 256),
    "favorplus": partial(papers.FavorPlusPair, 256),
    "favorpp": partial(FavorPP, 256),
    "hybrid_angular": partial(papers.HybridAngular, 32, num_coefficients=8),
}


def main(args):
    vocabulary = args.vocabulary
    parts = words.load(args.data_dir, vocabulary, LENGTH)
    train, watched, test = (part[: args.rows] for part in parts)
    print(f"{train.size} words of training, {test.size} of test, {vocabulary} classes")
    for seed in args.seeds:
        for sampler in args.samplers:
            start = time.time()
            keras.utils.set_random_seed(seed)
            encoder, loss = make_model(sampler, vocabulary, seed)
            epoch = fit(encoder, loss, train, watched, args.epochs)
            states = encoder.predict(test[:, :-1], verbose=0)
            classes = ops.convert_to_numpy(loss.classes)
            perplexity = words.perplexity(states, classes, test[:, 1:])
            row = {"sampler": sampler, "seed": seed, "perplexity": perplexity}
            row |= {"epochs": epoch, "minutes": (time.time() - start) / 60}
            tell(args, row)


class SampledSoftmax(keras.layers.Layer):
    """Cross-entropy of the next word; in training only against sampled classes."""

    def __init__(self, sampler, vocabulary, seed, **kwargs):
        super().__init__(**kwargs)
        self.sampler, self.vocabulary = sampler, vocabulary
        self.random = keras.random.SeedGenerator(seed)
        self.features = None
        if sampler in MAPS:
            feature_map = MAPS[sampler](seed=seed)
            if feature_map.is_adaptive:
                # Sets the best A for unrelated vectors of length 1.
                feature_map.build((None, None, 1, DIM))
                unit = np.eye(DIM)[None, :1]
                both = np.concatenate([unit, -unit], axis=1)
                feature_map.adapt([(both, both)])
            self.features = papers.KernelFeatures(feature_map, "softmax")

    def build(self, shape):
        self.classes = self.add_weight(
            name="classes", shape=(self.vocabulary, DIM), initializer="random_normal"
        )
        if self.features is not None:
            self.features.build((None, DIM))

    def call(self, states, targets, training=False):
        classes = ops.convert_to_tensor(self.classes)
        if self.sampler == "full" or not training:
            logits = ops.matmul(states, ops.transpose(classes))
            return keras.losses.sparse_categorical_crossentropy(
                targets, logits, from_logits=True
            )
        states = ops.reshape(states, (-1, DIM))
        targets = ops.reshape(targets, (-1, 1))
        # No gradient goes through the sampler.
        q = self.probabilities(ops.stop_gradient(states), ops.stop_gradient(classes))
        q = ops.where(ops.arange(self.vocabulary)[None] == targets, 0.0, q)
        q = q / ops.sum(q, axis=-1, keepdims=True)
        shape = ops.shape(targets)[0], NEGATIVES
        drawn = draw(q, keras.random.uniform(shape, seed=self.random))
        compared = ops.concatenate([targets, drawn], axis=-1)
        logits = ops.einsum("nd,nkd->nk", states, ops.take(classes, compared, axis=0))
        expected = NEGATIVES * ops.take_along_axis(q, drawn, axis=-1)
        # The sum of e^wrong is an unbiased estimate of the sum over all wrong classes.
        wrong = logits[:, 1:] - ops.log(expected)
        # Due to rounding, the last class may be drawn although it is the right one.
        wrong = ops.where(drawn == targets, -1e9, wrong)
        logits = ops.concatenate([logits[:, :1], wrong], axis=-1)
        return ops.logsumexp(logits, axis=-1) - logits[:, 0]

    def probabilities(self, states, classes):
        """Returns the sampler's distribution over classes for each state."""
        if self.sampler == "exact":
            return ops.softmax(ops.matmul(states, ops.transpose(classes)), axis=-1)
        if self.sampler == "uniform":
            weights = ops.ones((ops.shape(states)[0], self.vocabulary))
            return weights / self.vocabulary
        states, classes = ops.normalize(states, -1), ops.normalize(classes, -1)
        if self.sampler == "normalized":
            return ops.softmax(ops.matmul(states, ops.transpose(classes)), axis=-1)
        keys = self.features(classes, side="key")
        weights = ops.matmul(self.features(states), ops.transpose(keys))
        # Estimates may be negative, but probabilities may not.
        weights = ops.maximum(weights, 1e-6)
        return weights / ops.sum(weights, axis=-1, keepdims=True)


def draw(q, uniform):
    """Draws classes `(n, draws)` by binary search in the cumulative distribution."""
    size = q.shape[-1]
    cumulative = ops.cumsum(q, axis=-1)
    uniform = uniform * cumulative[:, -1:]
    found = ops.zeros(ops.shape(uniform), "int32")
    for step in 2 ** np.arange(int(size).bit_length() - 1, -1, -1):
        further = ops.minimum(found + int(step), size - 1)
        below = ops.take_along_axis(cumulative, further - 1, axis=-1) <= uniform
        found = ops.where(below, further, found)
    return found


def make_model(sampler, vocabulary, seed):
    """Builds the encoder of words into states, and the loss that owns the classes."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(vocabulary, DIM)(inputs)
    for _ in range(2):
        x = keras.layers.Dropout(DROPOUT)(x)
        x = keras.layers.LSTM(DIM, return_sequences=True)(x)
    x = keras.layers.Dropout(DROPOUT)(x)
    return keras.Model(inputs, x), SampledSoftmax(sampler, vocabulary, seed)


def fit(encoder, loss, train, watched, epochs):
    inputs, targets = (keras.Input((LENGTH,), dtype="int32") for _ in range(2))
    model = keras.Model([inputs, targets], loss(encoder(inputs), targets))
    optimizer = keras.optimizers.Adam(LEARNING_RATE, clipnorm=1.0)
    model.compile(optimizer, loss=lambda _, value: ops.mean(value))
    data = [([x[:, :-1], x[:, 1:]], np.zeros(len(x))) for x in (train, watched)]
    return words.fit(model, *data, epochs, PATIENCE)


if __name__ == "__main__":
    main(args)
