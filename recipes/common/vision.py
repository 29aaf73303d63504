"""Builds and trains a small vision transformer; not a recipe itself."""

import keras
import keras_hub
import numpy as np
from common import images
from common.schedules import cosine
from keras import layers, ops

LAYERS, HEADS, DIM, MLP = 4, 2, 64, 128
GRID = 8  # patches per side
HIDDEN, DECODER = 0.75, 64  # share of patches hidden; width of the decoder
BATCH, RATE, WEIGHT_DECAY = 64, 1e-3, 0.05


def vit(model, seed, shape, grid=GRID):
    """Builds a backbone for `grid` x `grid` patches."""
    keras.utils.set_random_seed(seed)
    sizes = {"num_heads": HEADS, "mlp_dim": MLP, "attention_dropout": 0.0}
    if model == "keras_hub":
        return keras_hub.models.ViTBackbone(
            image_shape=shape, patch_size=shape[0] // grid, num_layers=LAYERS,
            hidden_dim=DIM, dropout_rate=0.0, **sizes,
        )  # fmt: skip
    if keras.backend.backend() != "tensorflow":
        raise SystemExit("KerasCV's ViT runs on TensorFlow: KERAS_BACKEND=tensorflow")
    from keras_cv.src.models.legacy.vit import ViT

    return ViT(
        include_rescaling=False, include_top=False, input_shape=shape, project_dim=DIM,
        patch_size=shape[0] // grid, transformer_layer_num=LAYERS, mlp_dropout=0.0,
        activation=keras.activations.gelu, **sizes,
    )  # fmt: skip


def parts(backbone):
    """Returns layers from pixels (0 to 1) to tokens, and from tokens to outputs."""
    names = [type(layer).__name__ for layer in backbone.layers]
    cut = 1 + next(i for i, x in enumerate(names) if "PatchingAndEmbedding" in x)
    first = backbone.layers[1:cut]
    if isinstance(backbone, keras_hub.models.ViTBackbone):
        first = [layers.Rescaling(2.0, -1.0), *first]  # KerasCV's ViT rescales itself
    return first, backbone.layers[cut:]


def through(some_layers, x):
    """Applies layers one after the other."""
    for layer in some_layers:
        x = layer(x)
    return x


def adamw(steps, **options):
    rate = cosine(RATE, steps)
    return keras.optimizers.AdamW(rate, WEIGHT_DECAY, clipnorm=1.0, **options)


def pretrain(backbone, x, seed, steps):
    """Pretrains by masked autoencoding; the encoder sees a quarter of the patches."""
    first, rest = parts(backbone)
    count, size = GRID**2, x.shape[1] // GRID
    shown = round(count * (1 - HIDDEN))
    pixels = keras.Input(x.shape[1:])
    order = keras.Input((count,), dtype="int32")
    tokens = through(first, pixels)
    visible = ops.take_along_axis(tokens[:, 1:], order[:, :shown, None], axis=1)
    encoded = through(rest, ops.concatenate([tokens[:, :1], visible], axis=1))
    # Hidden patches are 0 here; a mask token would have the same effect as the bias.
    y = layers.Dense(DECODER)(encoded[:, 1:])
    y = ops.pad(y, ((0, 0), (0, count - shown), (0, 0)))
    y = ops.take_along_axis(y, ops.argsort(order, axis=1)[..., None], axis=1)
    y = y + keras_hub.layers.PositionEmbedding(count)(y)
    y = keras_hub.layers.TransformerEncoder(2 * DECODER, HEADS, activation="gelu")(y)
    y = layers.Dense(size * size * x.shape[-1])(y)
    y = ops.take_along_axis(y, order[:, shown:, None], axis=1)
    model = keras.Model([pixels, order], y)
    generator = np.random.default_rng(seed)
    data = images.hidden_batches(x, GRID, shown, BATCH, generator)
    model.compile(adamw(steps, beta_2=0.95), "mse")
    history = model.fit(data, steps_per_epoch=steps, verbose=2, shuffle=False)
    return history.history["loss"][-1]


def classifier(backbone, classes, shape):
    """Builds a classifier on the mean over patches, with the backbone's weights."""
    first, rest = parts(backbone)
    pixels = keras.Input(shape)
    y = through(rest, through(first, pixels))
    return keras.Model(pixels, layers.Dense(classes)(ops.mean(y[:, 1:], axis=1)))


def compiled(model, steps):
    """Compiles and returns the model for the given number of training steps."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(adamw(steps), loss)
    return model


def fit(model, x, y, steps, seed):
    """Trains a classifier; the seed determines the order of images."""
    data = images.batches(x, y, BATCH, np.random.default_rng(seed))
    compiled(model, steps).fit(data, steps_per_epoch=steps, verbose=2, shuffle=False)


def predict(model, x):
    """Returns the indices of the most probable classes."""
    return model.predict(x, verbose=0).argmax(-1)
