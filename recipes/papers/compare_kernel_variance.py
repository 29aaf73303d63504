"""Compare the variance of random features of the Gaussian kernel by closed forms.

Chefs' Random Tables (Likhosherstov et al., 2022), figure 2 and section 5.1. The
parameters of every map are fitted to sets of 64-dimensional vectors as in the paper
(equations 8, 12, 14), and the log-variance is averaged over pairs and 5 samples. Maps
of real features draw two vectors where complex ones draw one.

    python recipes/papers/compare_kernel_variance.py [--pairs 16384]

scikit-learn's 8×8 digits replace MNIST's, also with pixels of mean 0 and variance 1, as
MNIST is often preprocessed. `--set-size` matters because the shift that makes GeomRF+
positive is the smallest entry of its set.
Cost: two minutes on one core. Seen: docs/pages/reproductions/crt.md.
"""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1]))  # where `common` is

from common.program import make_parser, parse, tell

parser = make_parser(__doc__, seed=0, set_size=1024, samples=5, pairs=16384)
args = parse(parser, pairs=32, samples=1)

import numpy as np
from sklearn.datasets import load_digits

from keras_rfattn import feature_maps
from keras_rfattn.kernels import variance

DIM = 64
SIGMAS = np.linspace(0.1, 1.0, 10).round(1).tolist()
# From the paper's name to the registered name and whether features are complex.
MAPS = {
    "TrigRF": ("favor", True),
    "GERF": ("gerf", True),
    "PoisRF": ("poisson", False),
    "GeomRF": ("geometric", False),
    "PosRF": ("favorplus", False),
    "OPRF": ("favorpp", False),
    "PoisRF+": ("poisson_positive", False),
    "GeomRF+": ("geometric_positive", False),
}
BETTER = ("OPRF", "PosRF"), ("GeomRF+", "PosRF"), ("GERF", "TrigRF")


def main(args):
    for regime, draw in REGIMES.items():
        for sigma in SIGMAS:
            generator, rows = np.random.default_rng(args.seed), []
            for _ in range(args.samples):
                x, y = draw(generator, sigma, args.set_size)
                rows.append(log_variances(x, y, generator, args.pairs))
            mean = {name: np.mean([x[name] for x in rows]) for name in MAPS}
            row = {"pairs": regime, "sigma": sigma}
            for better, worse in BETTER:
                row[f"{better} below {worse}"] = float(mean[worse] - mean[better])
            tell(args, {**row, **{name: float(x) for name, x in mean.items()}})


def normal(generator, sigma, size):
    return sigma * generator.normal(size=(2, size, DIM))


def heterogen(generator, sigma, size):
    x, y = normal(generator, sigma, size)
    return x, y + sigma


def digits(generator, sigma, size):
    images = load_digits().data / 16
    return sigma * images[generator.choice(len(images), size=(2, size))]


def standardized(generator, sigma, size):
    images = load_digits().data / 16
    return (digits(generator, 1.0, size) - images.mean()) * sigma / images.std()


REGIMES = {f.__name__: f for f in (normal, heterogen, digits, standardized)}


def log_variances(x, y, generator, num_pairs):
    """Returns the mean log-variance of Gaussian kernel estimates, by map."""
    i, j = generator.integers(len(x), size=(2, num_pairs))
    left, right = x[i], y[j]
    # For a pair of equal images the variance of some maps is 0, which has no logarithm.
    different = np.any(left != right, axis=-1)
    left, right = left[different], right[different]
    norms = np.sum(left**2, -1) + np.sum(right**2, -1)
    results = {}
    for name, (registered, is_complex) in MAPS.items():
        feature_map = feature_maps.get(registered, num_features=1, seed=0)
        feature_map.build((None, None, 1, DIM))
        if feature_map.is_adaptive:
            feature_map.adapt([(x[None], y[None])])
        moment = feature_map.log_moment()
        result = variance.log_variance(moment(left, right), left, right)
        results[name] = np.mean(result - norms) - (0 if is_complex else np.log(2))
    return results


if __name__ == "__main__":
    main(args)
