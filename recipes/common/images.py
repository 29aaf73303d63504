"""Loads small labelled images, and cuts patches of them; not a recipe itself."""

import keras
import numpy as np

SIDE = 32  # of images from a folder


def load(data_dir=None, folder=None):
    """Loads `(x_train, y_train, x_test, y_test)` with pixels from 0 to 1.

    The images are CIFAR-10 from `data_dir`, or from a folder with one folder of images
    for each class, or scikit-learn's digits. In the latter two cases a fifth is for
    testing.
    """
    if data_dir is not None:
        with np.load(data_dir / "cifar10" / "cifar10_small.npz") as file:
            x, y, tested, wanted = (
                file[name] for name in ("x_train", "y_train", "x_test", "y_test")
            )
        return pixels(x), y.astype("int32"), pixels(tested), wanted.astype("int32")
    x, y = digits() if folder is None else images_of(folder)
    order = np.random.default_rng(0).permutation(len(y))
    test, train = np.split(order, [len(y) // 5])
    return x[train], y[train], x[test], y[test]


def pixels(x):
    return x.astype("float32") / 255


def digits():
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return x.reshape(-1, 8, 8, 1).astype("float32") / 16, y.astype("int32")


def images_of(folder):
    names = sorted(path for path in folder.iterdir() if path.is_dir())
    found = [
        (path, i) for i, name in enumerate(names) for path in sorted(name.iterdir())
    ]
    x = [
        keras.utils.img_to_array(
            keras.utils.load_img(
                path, target_size=(SIDE, SIDE), keep_aspect_ratio=True,
                interpolation="bicubic",
            )
        )
        for path, _ in found
    ]  # fmt: skip
    return pixels(np.stack(x)), np.array([label for _, label in found], "int32")


def batches(x, y, size, generator):
    """Yields random `(images, labels)` without end.

    Images are shifted by up to an eighth, and half of the color images are mirrored.
    """
    side = x.shape[1]
    far = side // 8
    padded = np.pad(x, ((0, 0), (far, far), (far, far), (0, 0)), "edge")
    while True:
        chosen = generator.integers(len(y), size=size)
        found = np.empty((size, *x.shape[1:]), "float32")
        for row, i in zip(found, chosen, strict=True):
            top, left = generator.integers(2 * far + 1, size=2)
            crop = padded[i, top : top + side, left : left + side]
            # Digits are not mirrored, as that changes what they are.
            is_mirrored = x.shape[-1] == 3 and generator.integers(2)
            row[:] = crop[:, ::-1] if is_mirrored else crop
        yield found, y[chosen]


def hidden_batches(x, grid, shown, size, generator):
    """Yields `((images, orders), patches)` for masked autoencoders.

    The patches are those after the first `shown` in a random order. Each is normalized
    to mean 0 and standard deviation 1.
    """
    labels, places = np.zeros(len(x), "int32"), np.arange(grid**2, dtype="int32")
    for found, _ in batches(x, labels, size, generator):
        order = generator.permuted(np.tile(places, (size, 1)), axis=1)
        wanted = patches(found, x.shape[1] // grid)
        wanted = wanted - wanted.mean(-1, keepdims=True)
        wanted /= wanted.std(-1, keepdims=True) + 1e-3
        hidden = np.take_along_axis(wanted, order[:, shown:, None], axis=1)
        yield (found, order), hidden


def patches(x, size):
    """Cuts `(B, side, side, C)` into `(B, patches, size * size * C)`, row by row."""
    count, side, channels = len(x), x.shape[1] // size, x.shape[-1]
    x = x.reshape(count, side, size, side, size, channels).swapaxes(2, 3)
    return x.reshape(count, side * side, size * size * channels)
