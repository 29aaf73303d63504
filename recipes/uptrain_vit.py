"""Uptrain a vision transformer, pretrained with softmax, to linear attention.

Chefs' Random Tables, figure 4 (Likhosherstov et al., 2022), at a size for one core. A
small ViT is pretrained as a masked autoencoder (He et al., 2022) with softmax. Then it
learns to classify, from scratch and uptrained, that is, from the weights of the
autoencoder. As in the paper, all weights train, on labels alone. All arms take equal
steps at one rate; the paper's take 200 epochs from scratch and 50 after pretraining.

    KERAS_BACKEND=torch python recipes/uptrain_vit.py --data-dir DIR --seeds 0 1 2

DIR holds cifar10/cifar10_small.npz: `x_train`, `x_test` (images of 32 x 32 x 3, uint8),
`y_train`, `y_test`. Alternatives are `--images FOLDER`, which has one folder of images
for each class (a fifth of them is for testing), or neither, for scikit-learn's digits.
`--model keras_cv` changes KerasCV's ViT in place, and `--model converted` uses the
result of `keras_rfattn.models.convert_vit` on it after pretraining. Both need TensorFlow, like
KerasCV's ViT.

The recipe also measures training steps per second by number of patches (the figure's
right half), with all arms taking turns. "estimates" shows how far untrained maps are
from the pretrained softmax, and from one that is blunter or sharper by four. "swapped"
shows the accuracy that remains when a map replaces softmax in the trained classifier,
without training and after a few steps.

Controls are trained in the same way: softmax, uniform attention (the mean of V), no
attention. "error" is the error of attention outputs before training, relative to
softmax; if it is not below "mean of V", the map is not yet useful for these weights.
Sizes and rates were fixed beforehand.
Cost: 15 to 60 minutes a seed for accuracy. Seen: docs/pages/lab/crt.md.
"""

import itertools
import pathlib
import statistics
import time

from common.flags import make_parser

STEPS, ARM_STEPS = 4000, 800
MAPS = ["favorplus", "favorpp"]
ARMS = ["softmax", *MAPS, "uniform", "no_attention"]
STARTS = ["scratch", "uptrained"]
HALVES = ["accuracy", "speed", "estimates", "swapped"]
# The paper's numbers of patches are 8², 16², 32², 40² and 44².
SPEED_GRIDS, SPEED_PATCH, SPEED_BATCH, SPEED_STEPS = (8, 16, 32, 44), 4, 4, 5
COMPARED = (16, 64, 256), 5, (0.25, 1, 4)  # widths; number of draws; factors of q · k
FURTHER = {16: [0], 64: [0], 256: [0, 25, 100, 400]}, 5  # steps by width; draws

# Flags are parsed before the slow imports.
parser = make_parser(
    __doc__, halves=HALVES, arms=ARMS, seeds=[0], num_features=16,
    results="uptrain_vit.jsonl",
)  # fmt: skip
parser.add_argument("--data-dir", type=pathlib.Path)
parser.add_argument("--images", type=pathlib.Path, help="folders of images")
parser.add_argument("--model", default="keras_hub",
                    choices=["keras_hub", "keras_cv", "converted"])  # fmt: skip
parser.add_argument("--smoke", action="store_true", help="run a short version")
args = parser.parse_args()

import numpy as np
from common import controls, images
from common.estimates import estimates
from common.results import record, tell
from common.vision import classifier, compiled, fit, predict, pretrain, vit

import keras_rfattn
from keras_rfattn import diagnostics, feature_maps


def main(args):
    if args.halves != ["speed"]:
        accuracy(args)
    if "speed" in args.halves:
        speed(args)


def accuracy(args):
    steps, arm_steps = (2, 2) if args.smoke else (STEPS, ARM_STEPS)
    arms, starts, compared = args.arms, STARTS, COMPARED
    data, rows = images.load(args.data_dir, args.images), []
    if args.smoke:
        arms, starts, compared = ["favorpp"], ["uptrained"], ([16], 1, [1])
        data = [x[:64] for x in data]
    for seed in args.seeds:
        begin = time.time()
        pretrained = vit(args.model, seed, data[0].shape[1:])
        row = {"seed": seed, "start": "pretraining", "model": args.model}
        row["loss"] = pretrain(pretrained, data[0], seed, steps)
        record(args, row | {"minutes": (time.time() - begin) / 60})
        if args.model == "converted":
            pretrained = keras_rfattn.models.convert_vit(pretrained)
        if "estimates" in args.halves:
            model = classifier(pretrained, 1, data[0].shape[1:])
            for found in estimates(model, data[0][:32], MAPS, *compared):
                record(args, {"seed": seed, **found})
        if "swapped" in args.halves:
            further = ({16: [0, 1]}, 1) if args.smoke else FURTHER
            for found in swapped(pretrained, data, seed, arm_steps, *further):
                record(args, {"seed": seed, "start": "swapped", **found})
        for start in starts:
            for arm in arms if "accuracy" in args.halves else []:
                row = {"seed": seed, "start": start, "arm": arm, "model": args.model}
                rows.append(row | classified(row, pretrained, data, arm_steps, args))
                tell(args, rows[-1])
    best = "uptrained", "favorpp"
    pairs = (("uptrained", "favorplus"), best), (("scratch", "favorpp"), best)
    controls.summarize(rows, ("error", "mean of V", "train", "test"), pairs)


def classified(row, pretrained, data, steps, args):
    """Trains a classifier, and returns its row of results."""
    begin, (x, y, tested, wanted) = time.time(), data
    seed, arm, kind = row["seed"], row["arm"], row["model"]
    backbone = vit("keras_hub" if kind == "converted" else kind, seed, x.shape[1:])
    if row["start"] == "uptrained":
        backbone.set_weights(pretrained.get_weights())
    model = classifier(backbone, int(y.max()) + 1, x.shape[1:])
    found = {"steps": steps}
    found |= controls.set_attention(model, arm, mechanism(arm, args), seed)
    if arm in MAPS:
        mean = diagnostics.approximation_report(model, [x[:32]], verbose=0).mean
        found |= {"error": mean.output, "mean of V": mean.mean_of_values}
    fit(model, x, y, steps, seed)
    found["train"], found["test"] = (
        float(np.mean(predict(model, a) == b))
        for a, b in ((x[: len(tested)], y[: len(tested)]), (tested, wanted))
    )
    return found | {"minutes": (time.time() - begin) / 60}


def swapped(pretrained, data, seed, steps, further, draws):
    """Evaluates softmax's classifier with maps in it, by width and training steps.

    Yields dicts with its accuracy, and with how often its answers agree with softmax's.
    """
    x, y, tested, wanted = data
    model = classifier(pretrained, int(y.max()) + 1, x.shape[1:])
    own = pretrained.get_weights()
    fit(model, x, y, steps, seed)
    weights, answers = model.get_weights(), predict(model, tested)
    yield {"arm": "softmax", "test": float(np.mean(answers == wanted))}
    for width, counts in further.items():
        for arm, draw, more in itertools.product(MAPS, range(draws), counts):
            feature_map = feature_maps.get(arm, num_features=width, seed=draw)
            keras_rfattn.replace_attention(model, feature_map, seed=draw)
            if more:
                fit(model, x, y, more, seed)
            found = predict(model, tested)
            keras_rfattn.restore_attention(model)
            model.set_weights(weights)
            row = {"arm": arm, "width": width, "draw": draw, "steps": more}
            row["test"] = float(np.mean(found == wanted))
            yield row | {"agreement": float(np.mean(found == answers))}
    pretrained.set_weights(own)


def mechanism(arm, args):
    return arm, {"num_features": args.num_features}, {}


def speed(args):
    """Measures training steps per second, as a median over steps that take turns."""
    grids, steps = ((2,), 1) if args.smoke else (SPEED_GRIDS, SPEED_STEPS)
    arms = ["softmax", *MAPS]
    print(f"{'patches':<8}" + "".join(f"{arm:>12}" for arm in arms) + "  steps/s")
    for grid in grids:
        side = grid * SPEED_PATCH
        x = np.zeros((SPEED_BATCH, side, side, 3), "float32")
        y, models, times = np.zeros(SPEED_BATCH, "int32"), {}, {arm: [] for arm in arms}
        for arm in arms:
            model = classifier(vit("keras_hub", 0, x.shape[1:], grid), 10, x.shape[1:])
            controls.set_attention(model, arm, mechanism(arm, args), 0)
            models[arm] = compiled(model, steps)
            model.train_on_batch(x, y)
        for _ in range(steps):
            for arm, model in models.items():
                # Warm-up step, as the previous model has changed the state of memory.
                model.train_on_batch(x, y)
                begin = time.perf_counter()
                model.train_on_batch(x, y)
                times[arm].append(time.perf_counter() - begin)
        found = {arm: 1 / statistics.median(x) for arm, x in times.items()}
        print(f"{grid**2:<8}" + "".join(f"{x:12.3f}" for x in found.values()))
        record(args, {"patches": grid**2, "steps per second": found})


if __name__ == "__main__":
    main(args)
