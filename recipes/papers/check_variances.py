"""Compare variances in closed form with draws and limits: two figures and a theorem.

- Chefs' Random Tables (Likhosherstov et al., 2022), figure 1: the logarithm of OPRF's
  variance over PosRF's, by dimension and ‖x + y‖².
- Hybrid Random Features (Choromanski et al., 2022), figure 1: mean squared errors of
  trigonometric features, of ± pairs of positive ones and of the angular hybrid (m = 10,
  n = 1). They are zero at one end of the angles, or at both.
- Theorem 3.5 of the latter: the hybrid's relative error vanishes like √θ at θ = 0 and
  like √(π - θ) at π (the paper prints √(θ - π)), with the factor √(1/2πmn) W(r).

    python recipes/papers/check_variances.py

The draws use short inputs, because values that draws miss make the variance of long
ones. Cost: a minute on one core. Seen: docs/pages/reproductions (crt.md and hrf.md).
"""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1]))  # where `common` is

from common.program import make_parser, parse, tell

parser = make_parser(__doc__)
parser.set_defaults(sets=50_000)  # independent sets of vectors that are drawn
args = parse(parser, sets=500)

import numpy as np
from common import hybrids
from keras import ops

from keras_rfattn import feature_maps, papers
from keras_rfattn.kernels import variance
from keras_rfattn.papers import hybrid_variance, second_moments

DIMS, SQUARES = (4, 16, 64, 256), (1, 10, 25, 50, 100)
M, N, RADII, ANGLES = 10, 1, np.linspace(0.1, 5, 50), np.linspace(0, np.pi, 91)
ESTIMATORS = ("trig", "++", "angular")
# Settings of draws: dimension, length, angles in degrees.
DIM, LENGTH, DEGREES = 16, 0.5, (0, 45, 90, 135, 180)
# For theorem 3.5: distances from either end of the angles, and tuples (r, m, n).
NEAR, LIMITS = 10.0 ** np.arange(-6, 0), ((1.0, 10, 1), (1.0, 32, 8), (1.5, 32, 8))


def main(args):
    for dim in DIMS:
        ratios = {z: log_ratio(z, dim) for z in SQUARES}
        tell(args, {"dim": dim, "log ratio of OPRF's variance by ‖x + y‖²": ratios})
    for name in ESTIMATORS:
        surface = np.maximum([mse(name, *on_sphere(r, ANGLES)) for r in RADII], 0)
        ends = surface[:, [0, -1]] < 1e-6 * surface.max(1, keepdims=True)
        row = {"estimator": name, "zero at 0, at π": ends.all(0).tolist()}
        tell(args, row | {"draws over closed form": measure(name, args.sets)})
    for r, m, n in LIMITS:
        row = {"r": r, "m": m, "n": n}
        tell(args, row | {"error over theorem 3.5's limit": near_the_ends(r, m, n)})


def log_ratio(z, dim):
    """Returns log(OPRF's variance / PosRF's variance) where ‖x + y‖² = z."""
    x = np.sqrt(z / dim) / 2 * np.ones(dim)
    variances = []
    for name in ("favorpp", "favorplus"):
        feature_map = feature_maps.get(name, num_features=1, seed=0)
        feature_map.build((None, None, 1, dim))
        if feature_map.is_adaptive:
            feature_map.adapt([(x[None, None], x[None, None])])
        moment = feature_map.log_moment()(x, x)
        variances.append(variance.log_variance(moment, x, x))
    return float(variances[0] - variances[1])


def on_sphere(radius, angle, dim=2):
    """Returns two inputs of the given length with the given angle between them."""
    x, y = np.zeros((2, *np.shape(angle), dim))
    x[..., 0], y[..., 0], y[..., 1] = 1, np.cos(angle), np.sin(angle)
    return radius * x, radius * y


def mse(name, x, y, m=M, n=N):
    """Returns the mean squared error, by lemma 2.2, theorem 3.1 and lemma 3.2."""
    if name == "angular":
        moments = hybrid_variance.angular_moments(x, y, n)
        return hybrid_variance.bipolar_hybrid(x, y, m, moments)
    if name == "++":
        return second_moments.positive_pair(x, y) / m
    return second_moments.generalized_exponential(x, y, 0, -1) / m


def measure(name, sets):
    """Returns MSE of draws over the closed form, and standard error, by degrees."""
    options = {"projection": "gaussian", "seed": 0}
    feature_map = {
        "trig": papers.Favor(M, **options),
        "++": papers.FavorPlusPair(M, **options),
        "angular": papers.HybridAngular(M, N, **options),
    }[name]
    feature_map.build((None, None, sets, DIM))
    ratios = {}
    for degrees in DEGREES:
        x, y = on_sphere(LENGTH, np.radians(degrees), DIM)
        exact = mse(name, x, y)
        if exact > 1e-9:
            left = dense(feature_map.query_features, x, sets)
            right = dense(feature_map.key_features, y, sets)
            squares = (np.sum(left * right, -1) - np.exp(x @ y)) ** 2 / exact
            error = squares.std() / np.sqrt(sets)
            ratios[degrees] = float(squares.mean()), float(error)
    return ratios


def dense(method, x, sets):
    tokens = np.tile(x.astype("float32"), (1, 1, sets, 1))
    features = method(ops.convert_to_tensor(tokens))
    return ops.convert_to_numpy(hybrids.dense(features))[0, 0].astype("float64")


def near_the_ends(radius, m, n):
    """Returns rows of a distance, and ε/√distance over its limit at both ends."""
    limit = hybrid_variance.max_relative_error(radius, m) / np.sqrt(np.pi * n)
    ends = []
    for angle in (NEAR, np.pi - NEAR):
        x, y = on_sphere(radius, angle)
        relative = np.sqrt(mse("angular", x, y, m, n)) / np.exp(np.sum(x * y, -1))
        ends.append(relative / np.sqrt(NEAR) / limit)
    return np.stack([NEAR, *ends], -1).tolist()


if __name__ == "__main__":
    main(args)
