"""Measure pointwise errors of softmax-kernel estimates, and of their hybrid, by angle.

Hybrid Random Features (Choromanski et al., 2022), figures 2 and 5: 64-dimensional
inputs have equal length r and an angle between 0 and π. Trigonometric features
("favor") are exact at angle 0, and the ± pair of positive features ("favorplus") at π.
The angular hybrid of both is exact at both ends.

    python recipes/papers/compare_pointwise_error.py [--estimates 10000]

All estimators have equal cost (common/hybrids.py); the hybrid's n has the smallest
bound of theorem 3.5. Rows have errors relative to the kernel, of draws and in closed
form (lemma 3.4, theorem 3.1). At large radii and small angles the error of positive
features comes from rare large values, which 10,000 estimates mostly miss.
Cost: a minute on one core. Seen: docs/pages/reproductions/hrf.md.
"""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1]))  # where `common` is

from common.program import make_parser, parse, tell

parser = make_parser(__doc__, seed=0, estimates=10_000)
args = parse(parser, estimates=100)

import numpy as np
from common.hybrids import dense, equal_cost
from keras import ops

from keras_rfattn import papers
from keras_rfattn.papers import hybrid_variance

DIM, NUM_FEATURES = 64, 128
RADII = (1.0, 1.25, 1.5)
DEGREES = np.arange(0, 181, 15)
ESTIMATORS = ("favor", "favorplus", "hybrid")
# Whether the features are positive, for the estimators of lemma 3.4.
POSITIVE = {"favor": False, "favorplus": True}
# Number of sets of random vectors drawn at once, which limits memory.
BATCH = 100


def main(args):
    m, n = equal_cost(NUM_FEATURES, DIM)
    measured = {}
    for name in ESTIMATORS:
        feature_map = build(name, m, n, args.seed)
        ratios = estimate(feature_map, args.estimates, args.seed)
        measured[name] = np.sqrt(np.mean((ratios - 1) ** 2, -1))
    theta = np.radians(np.arange(181))
    for i, radius in enumerate(RADII):
        bound = hybrid_variance.angular_relative_error_bound(radius, m, n)
        row = {"r": radius, "m": m, "n": n, "theorem 3.5's bound": float(bound)}
        for name in ESTIMATORS:
            exact = closed_form(name, radius, theta, m, n)
            row[name] = {
                "largest": float(exact.max()),
                "largest, measured": float(measured[name][i].max()),
                "by angle": exact[DEGREES].round(4).tolist(),
                "by angle, measured": measured[name][i].round(4).tolist(),
            }
        tell(args, row)


def build(name, m, n, seed):
    """Builds an estimator whose `BATCH` heads are independent sets of vectors."""
    # The closed forms assume independent vectors.
    options = {"projection": "gaussian", "seed": seed}
    feature_map = {
        "favor": papers.Favor(NUM_FEATURES, **options),
        "favorplus": papers.FavorPlusPair(NUM_FEATURES, **options),
        "hybrid": papers.HybridAngular(m, n, shared=True, **options),
    }[name]
    feature_map.build((None, None, BATCH, DIM))
    return feature_map


def points(seed):
    """Returns a unit vector x `(d,)`, and y at every angle to it, `(angles, d)`."""
    normal = np.random.default_rng(seed).normal(size=(DIM, 2))
    x, orthogonal = np.linalg.qr(normal)[0].T
    theta = np.radians(DEGREES)[:, None]
    return x, np.cos(theta) * x + np.sin(theta) * orthogonal


def estimate(feature_map, count, seed):
    """Returns estimates divided by the kernel, `(radii, angles, count)`."""
    x, y = points(seed)
    scale = np.array(RADII)[:, None]
    queries = broadcast(scale * x)
    keys = broadcast((scale[..., None] * y).reshape(-1, DIM))
    kernel = np.exp(scale**2 * (y @ x))[..., None]
    batches = []
    for batch in range(-(-count // BATCH)):
        if batch:
            feature_map.redraw()
        left = dense(feature_map.query_features(queries))
        right = dense(feature_map.key_features(keys))
        right = ops.reshape(right, (len(RADII), len(DEGREES), *right.shape[2:]))
        products = ops.einsum("rkm,rakm->rak", left[0], right)
        batches.append(ops.convert_to_numpy(products))
    return np.concatenate(batches, -1)[..., :count] / kernel


def broadcast(x):
    """Broadcasts points `(n, d)` to tokens of every head, `(1, n, BATCH, d)`."""
    x = np.broadcast_to(x[None, :, None], (1, len(x), BATCH, DIM))
    return ops.convert_to_tensor(x.astype("float32"))


def closed_form(name, radius, theta, m, n):
    """Returns `√MSE / SM` at angles theta, by lemma 3.4, theorem 3.1 and lemma 3.2."""
    if name in POSITIVE:
        positive = POSITIVE[name]
        return hybrid_variance.relative_error(theta, radius, NUM_FEATURES, positive)
    x = radius * np.eye(2)[:1]
    y = radius * np.stack([np.cos(theta), np.sin(theta)], -1)
    moments = hybrid_variance.angular_moments(x, y, n)
    mse = hybrid_variance.bipolar_hybrid(x, y, m, moments, shared=True)
    return np.sqrt(np.maximum(mse, 0)) / np.exp(np.sum(x * y, -1))


if __name__ == "__main__":
    main(args)
