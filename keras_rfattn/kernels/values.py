"""The kernels that feature maps estimate, on NumPy arrays.

All functions take `x` of shape `(..., T, H)` and `y` of shape `(..., S, H)`, and return
an array of shape `(..., T, S)`. A feature map names its kernel in its attribute
`kernel`. Law 3 in `feature_maps/base.py` says what the map then estimates.
"""

import numpy as np


def softmax(x, y):
    """Returns the softmax kernel `exp(x · y)`."""
    return np.exp(x @ np.swapaxes(y, -1, -2))


def gaussian(x, y):
    """Returns the Gaussian kernel `exp(-‖x - y‖² / 2)`."""
    squares = np.sum(x * x, -1)[..., :, None] + np.sum(y * y, -1)[..., None, :]
    return np.exp(x @ np.swapaxes(y, -1, -2) - squares / 2)


def relu(x, y):
    """Returns the mean over w of a product: that of `relu(w · x)` and `relu(w · y)`."""
    # Cho and Saul, "Kernel Methods for Deep Learning" (2009), equation 3, halved,
    # because the paper's kernels are twice the mean.
    lengths = np.linalg.norm(x, axis=-1)[..., :, None]
    lengths = lengths * np.linalg.norm(y, axis=-1)[..., None, :]
    cosine = np.clip(x @ np.swapaxes(y, -1, -2) / lengths, -1, 1)
    angle = np.arccos(cosine)
    return lengths * (np.sin(angle) + (np.pi - angle) * cosine) / (2 * np.pi)


def elu(x, y):
    """Returns `Σ_l (elu(x_l) + 1)(elu(y_l) + 1)`, a kernel defined by its features."""

    def feature(z):
        return np.where(z > 0, z + 1, np.exp(np.minimum(z, 0)))

    return feature(x) @ np.swapaxes(feature(y), -1, -2)


def polynomial(x, y, degree):
    """Returns the kernel `(x · y)^degree`."""
    return (x @ np.swapaxes(y, -1, -2)) ** degree
