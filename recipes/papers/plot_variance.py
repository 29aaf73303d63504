"""Plot variances in closed form and from draws: three figures and a theorem.

- Chefs' Random Tables (Likhosherstov et al., 2022), figure 1: the logarithm of OPRF's
  variance over PosRF's, by dimension and ‖x + y‖². Both estimate the same kernel.
- Hybrid Random Features (Choromanski et al., 2022), figure 1: mean squared errors of
  trigonometric features, of ± pairs of positive ones and of the angular hybrid by angle
  and length, m = 10, n = 1.
- Theorem 3.5 of the latter: the hybrid's relative error vanishes like √θ at θ = 0 and
  like √(π - θ) at π (the paper prints √(θ - π)), with the factor √(1/2πmn) W(r).

    python recipes/papers/plot_variance.py [--plot plot_variance.png]

The draws use short inputs: at the figures' own lengths the variance comes from values
so rare that draws would not show it. Cost: a minute on one core.
Expected: see docs/pages/lab/crt.md and hrf.md.
"""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1]))  # where `common` is

from common.flags import make_parser, parse

# Flags are parsed before the slow imports.
parser = make_parser(__doc__, plot="plot_variance.png", results="plot_variance.jsonl")
# Number of independent sets of vectors that are drawn.
parser.set_defaults(sets=50_000)
args = parse(parser, sets=500)

import numpy as np
from common import hybrids
from common.results import record, report
from keras import ops
from matplotlib.figure import Figure

from keras_rfattn import feature_maps, papers
from keras_rfattn.kernels import variance
from keras_rfattn.papers import hybrid_variance

DIMS, SQUARES = (4, 16, 64, 256), np.linspace(1, 100, 100)
M, N, RADII, ANGLES = 10, 1, np.linspace(0, 5, 51), np.linspace(0, np.pi, 91)
ESTIMATORS = ("trig", "++", "angular")
# Settings of draws: dimension, length, angles in degrees.
DIM, LENGTH, DEGREES = 16, 0.5, (0, 45, 90, 135, 180)
# For theorem 3.5: distances from either end of the angles, and tuples (r, m, n).
NEAR, LIMITS = 10.0 ** np.arange(-6, 0), ((1.0, 10, 1), (1.0, 32, 8), (1.5, 32, 8))


def main(args):
    ratios = {dim: [log_ratio(z, dim) for z in SQUARES] for dim in DIMS}
    print("log variance, OPRF's over PosRF's (CRT, figure 1)")
    for z in (1, 10, 25, 50, 100):
        at = list(SQUARES).index(z)
        cells = "".join(f"   d = {dim}: {ratios[dim][at]:7.2f}" for dim in DIMS)
        print(f"‖x + y‖² = {z:3d}{cells}")
    found = ratios[64][-1]
    report(f"below -60 at d = 64, ‖x + y‖² = 100: {found:.2f}", found < -60)

    surfaces = {name: surface(name) for name in ESTIMATORS}
    print(f"\nMSE at m = {M}, n = {N} (HRF, figure 1); zero at both ends:")
    for name, mse in surfaces.items():
        ends = mse[1:, [0, -1]] < 1e-6 * mse[1:].max(1, keepdims=True)
        cells = ", ".join(f"{x:.3g}" for x in mse[-1, [0, 45, -1]])
        print(f"{name:>8}, r = 5, θ = 0, π/2, π: {cells}; at most {mse[-1].max():.3g}")
        text = f"{name}: zero at θ = 0, at π, for all r: {ends.all(0).tolist()}"
        expected = [name != "++", name != "trig"]
        report(text, ends.all(0).tolist() == expected)

    print(f"\nDraws over closed form, r = {LENGTH}, {args.sets} estimates, ", end="")
    print("± standard error")
    measured = {name: measure(name, args.sets) for name in ESTIMATORS}
    far = []
    for name, rows in measured.items():
        cells = [f"{d}°: {x:.3f} ±{e:.3f}" for d, x, e in rows]
        print(f"{name:>8}  " + "   ".join(cells))
        far += [abs(x - 1) / e for _, x, e in rows]
    report(f"within 4 standard errors, at most {max(far):.1f}", max(far) < 4)

    print("\nRelative error of the hybrid over theorem 3.5's limit, at 0 and at π")
    limits = {key: near_the_ends(*key) for key in LIMITS}
    for (r, m, n), rows in limits.items():
        cells = "  ".join(f"{x:g}: {a:.4f}, {b:.4f}" for x, a, b in rows)
        print(f"r = {r}, m = {m}, n = {n}: {cells}")
    last = max(abs(x - 1) for rows in limits.values() for x in rows[0][1:])
    report(f"the limits are 1, within {last:.0e} at 1e-6", last < 1e-3)
    draws = {k: np.array(rows).tolist() for k, rows in measured.items()}
    row = {"log ratios at 100": {dim: x[-1] for dim, x in ratios.items()}}
    row |= {"draws over closed form": draws, "limits": list(limits.values())}
    record(args, row)
    plot(ratios, surfaces, limits, measured, args.plot)


def log_ratio(z, dim):
    """Returns log(OPRF's variance / PosRF's variance) where ‖x + y‖² = z."""
    x = np.sqrt(z / dim) / 2 * np.ones(dim)
    found = []
    for name in ("favorpp", "favorplus"):
        feature_map = feature_maps.get(name, num_features=1, seed=0)
        feature_map.build((None, None, 1, dim))
        if feature_map.is_adaptive:
            feature_map.update([z])
        found.append(variance.log_variance(feature_map.log_moment()(x, x), x, x))
    return float(found[0] - found[1])


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
        return variance.positive_pair(x, y) / m
    return variance.generalized_exponential(x, y, 0, -1) / m


def surface(name):
    """Returns the mean squared errors of an estimator, `(radii, angles)`."""
    rows = [mse(name, *on_sphere(max(r, 1e-3), ANGLES)) for r in RADII]
    return np.maximum(rows, 0)


def measure(name, sets):
    """Returns rows of degrees, MSE of draws over the closed form, standard error."""
    options = {"projection": "gaussian", "seed": 0}
    feature_map = {
        "trig": papers.Favor(M, **options),
        "++": feature_maps.FavorPlus(M, pair=True, **options),
        "angular": papers.HybridAngular(M, N, **options),
    }[name]
    feature_map.build((None, None, sets, DIM))
    rows = []
    for degrees in DEGREES:
        x, y = on_sphere(LENGTH, np.radians(degrees), DIM)
        exact = mse(name, x, y)
        if exact > 1e-9:
            left = dense(feature_map.query_features, x, sets)
            right = dense(feature_map.key_features, y, sets)
            squares = (np.sum(left * right, -1) - np.exp(x @ y)) ** 2 / exact
            rows.append((degrees, squares.mean(), squares.std() / np.sqrt(sets)))
    return rows


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


def plot(ratios, surfaces, limits, measured, path):
    figure = Figure(figsize=(16, 7), layout="constrained")
    (left, middle, right), surface_axes = figure.subplots(2, 3)
    for dim, row in ratios.items():
        left.plot(SQUARES, row, label=f"d = {dim}")
    left.set(xlabel="‖x + y‖²", ylabel="log variance, OPRF over PosRF")
    left.legend()
    for (r, m, n), rows in limits.items():
        near, *ends = np.transpose(rows)
        for row, style in zip(ends, ("o-", "x--"), strict=True):
            middle.semilogx(near, row, style, label=f"r = {r}, m = {m}, n = {n}")
    middle.set(xlabel="θ (solid) and π - θ", ylabel="relative error over its limit")
    middle.legend(fontsize="small")
    for name, rows in measured.items():
        degrees, ratio, error = np.transpose(rows)
        right.errorbar(degrees, ratio, 2 * error, fmt="o", capsize=3, label=name)
    right.set(xlabel="angle in degrees", ylabel=f"draws over closed form, r = {LENGTH}")
    right.legend()
    top = max(np.log10(x.max()) for x in surfaces.values())
    for axis, (name, found) in zip(surface_axes, surfaces.items(), strict=True):
        log = np.log10(np.maximum(found, 1e-6))
        image = axis.pcolormesh(ANGLES, RADII, log, vmin=-6, vmax=top)
        axis.set(title=name, xlabel="angle", ylabel="length r")
    figure.colorbar(image, ax=surface_axes, label="log10 MSE")
    figure.savefig(path, dpi=120)
    print(f"plot: {path}")


if __name__ == "__main__":
    main(args)
