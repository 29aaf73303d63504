"""Swap the softmax of a trained vision transformer for linear attention.

Chefs' Random Tables, figure 4 (Likhosherstov et al., 2022), at a size for one core. A
small ViT is pretrained with softmax as a masked autoencoder (He et al., 2022) and
learns to classify. Rows have the accuracy that remains when a map replaces softmax in
the trained classifier, without training and after more steps on labels, and how often
its answers are those of softmax.

    KERAS_BACKEND=torch python recipes/uptrain_vit.py --data-dir DIR --seeds 0 1 2

DIR holds cifar10/cifar10_small.npz: `x_train`, `x_test` (images of 32 x 32 x 3, uint8),
`y_train`, `y_test`. Cost: an hour a seed. Seen: docs/pages/reproductions/crt.md.
"""

import itertools
import pathlib

from common.program import make_parser, parse, tell

MAPS = ["favorplus", "favorpp"]
# From number of features to numbers of training steps after the swap.
SWAPS = {16: [0], 64: [0], 256: [0, 25, 100, 400]}

parser = make_parser(__doc__, data_dir=pathlib.Path, seeds=[0])
parser.set_defaults(steps=4000, tune_steps=800, draws=5, swaps=SWAPS, images=None)
args = parse(parser, steps=2, tune_steps=2, draws=1, swaps={16: [0, 1]}, images=64)

import keras
import keras_hub
import numpy as np
from keras import layers, ops

import keras_rfattn

LAYERS, HEADS, DIM, MLP = 4, 2, 64, 128
SIDE, GRID = 32, 8  # pixels and patches per side
SHOWN, DECODER = 16, 64  # patches that the autoencoder sees; width of its decoder
BATCH, RATE, WEIGHT_DECAY = 64, 1e-3, 0.05


def main(args):
    with np.load(args.data_dir / "cifar10" / "cifar10_small.npz") as file:
        x, tested = (
            file[name][: args.images].astype("float32") / 255
            for name in ("x_train", "x_test")
        )
        y, labels = (
            file[name][: args.images].astype("int32") for name in ("y_train", "y_test")
        )
    for seed in args.seeds:
        backbone = vit(seed)
        row = {"seed": seed, "loss of pretraining": pretrain(args, backbone, x, seed)}
        model = classifier(backbone)
        fit(model, x, y, args.tune_steps, seed)
        weights, answers = model.get_weights(), predict(model, tested)
        accuracy = float(np.mean(answers == labels))
        tell(args, row | {"arm": "softmax", "test": accuracy})
        for width, steps in args.swaps.items():
            for arm, draw, more in itertools.product(MAPS, range(args.draws), steps):
                keras_rfattn.replace_attention(
                    model, arm, num_features=width, seed=draw
                )
                if more:
                    fit(model, x, y, more, seed)
                swapped = predict(model, tested)
                keras_rfattn.restore_attention(model)
                model.set_weights(weights)
                row = {"seed": seed, "arm": arm, "width": width, "draw": draw}
                row |= {"steps": more, "test": float(np.mean(swapped == labels))}
                tell(args, row | {"agreement": float(np.mean(swapped == answers))})


def vit(seed):
    keras.utils.set_random_seed(seed)
    return keras_hub.models.ViTBackbone(
        image_shape=(SIDE, SIDE, 3), patch_size=SIDE // GRID, num_layers=LAYERS,
        num_heads=HEADS, hidden_dim=DIM, mlp_dim=MLP, dropout_rate=0.0,
        attention_dropout=0.0,
    )  # fmt: skip


def tokens_of(backbone, pixels):
    """Returns the tokens of pixels (0 to 1), and the layers that follow."""
    embed, *rest = backbone.layers[1:]
    return embed(layers.Rescaling(2.0, -1.0)(pixels)), rest


def pretrain(args, backbone, x, seed):
    """Pretrains by masked autoencoding; the encoder sees a quarter of the patches."""
    count, size = GRID**2, SIDE // GRID
    pixels = keras.Input((SIDE, SIDE, 3))
    order = keras.Input((count,), dtype="int32")
    tokens, rest = tokens_of(backbone, pixels)
    visible = ops.take_along_axis(tokens[:, 1:], order[:, :SHOWN, None], axis=1)
    encoded = ops.concatenate([tokens[:, :1], visible], axis=1)
    for layer in rest:
        encoded = layer(encoded)
    # Hidden patches are 0 here; a mask token would have the same effect as the bias.
    y = layers.Dense(DECODER)(encoded[:, 1:])
    y = ops.pad(y, ((0, 0), (0, count - SHOWN), (0, 0)))
    y = ops.take_along_axis(y, ops.argsort(order, axis=1)[..., None], axis=1)
    y = y + keras_hub.layers.PositionEmbedding(count)(y)
    y = keras_hub.layers.TransformerEncoder(2 * DECODER, HEADS, activation="gelu")(y)
    y = layers.Dense(size * size * 3)(y)
    y = ops.take_along_axis(y, order[:, SHOWN:, None], axis=1)
    model = keras.Model([pixels, order], y)
    generator = np.random.default_rng(seed)

    def batches():
        for images, _ in augmented(x, np.zeros(len(x), "int32"), generator):
            orders = np.tile(np.arange(count, dtype="int32"), (BATCH, 1))
            orders = generator.permuted(orders, axis=1)
            patches = images.reshape(BATCH, GRID, size, GRID, size, 3).swapaxes(2, 3)
            patches = patches.reshape(BATCH, count, -1)
            patches = patches - patches.mean(-1, keepdims=True)
            patches /= patches.std(-1, keepdims=True) + 1e-3
            hidden = np.take_along_axis(patches, orders[:, SHOWN:, None], axis=1)
            yield (images, orders), hidden

    model.compile(adamw(args.steps, beta_2=0.95), "mse")
    history = model.fit(batches(), steps_per_epoch=args.steps, verbose=2, shuffle=False)
    return history.history["loss"][-1]


def classifier(backbone):
    """Builds a classifier on the mean over patches, with the backbone's weights."""
    pixels = keras.Input((SIDE, SIDE, 3))
    y, rest = tokens_of(backbone, pixels)
    for layer in rest:
        y = layer(y)
    return keras.Model(pixels, layers.Dense(10)(ops.mean(y[:, 1:], axis=1)))


def adamw(steps, **options):
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, steps, warmup_target=RATE, warmup_steps=steps // 10 + 1
    )
    return keras.optimizers.AdamW(rate, WEIGHT_DECAY, clipnorm=1.0, **options)


def fit(model, x, y, steps, seed):
    """Trains a classifier; the seed determines the order of images."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(adamw(steps), loss)
    data = augmented(x, y, np.random.default_rng(seed))
    model.fit(data, steps_per_epoch=steps, verbose=2, shuffle=False)


def augmented(x, y, generator):
    """Yields random images and labels; images are shifted, and half are mirrored."""
    far = SIDE // 8
    padded = np.pad(x, ((0, 0), (far, far), (far, far), (0, 0)), "edge")
    while True:
        chosen, images = generator.integers(len(y), size=BATCH), []
        for i in chosen:
            top, left = generator.integers(2 * far + 1, size=2)
            crop = padded[i, top : top + SIDE, left : left + SIDE]
            images.append(crop[:, ::-1] if generator.integers(2) else crop)
        yield np.stack(images), y[chosen]


def predict(model, x):
    """Returns the indices of the most probable classes."""
    return model.predict(x, verbose=0).argmax(-1)


if __name__ == "__main__":
    main(args)
