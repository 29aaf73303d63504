"""The kernels that feature maps estimate, on NumPy arrays.

`x` has shape `(..., T, H)` and `y` `(..., S, H)`; results are `(..., T, S)`. What a
feature map of that `kernel` estimates, in the exact sense of its law 3.
"""

import numpy as np


def softmax(x, y):
    """The softmax kernel `exp(x · y)`."""
    return np.exp(x @ np.swapaxes(y, -1, -2))


def gaussian(x, y):
    """The Gaussian kernel `exp(-‖x - y‖² / 2)`."""
    squares = np.sum(x * x, -1)[..., :, None] + np.sum(y * y, -1)[..., None, :]
    return np.exp(x @ np.swapaxes(y, -1, -2) - squares / 2)


def relu(x, y):
    """The first-order arc-cosine kernel, of rectified random projections.

    It is the mean of `relu(w · x) relu(w · y)` over `w ~ N(0, I)`, and
    equals `‖x‖ ‖y‖ (sin θ + (π - θ) cos θ) / 2π` for the angle θ between x and y
    (Cho and Saul, "Kernel Methods for Deep Learning", 2009, equation 3, halved
    because they carry a factor 2).
    """
    lengths = np.linalg.norm(x, axis=-1)[..., :, None]
    lengths = lengths * np.linalg.norm(y, axis=-1)[..., None, :]
    cosine = np.clip(x @ np.swapaxes(y, -1, -2) / lengths, -1, 1)
    angle = np.arccos(cosine)
    return lengths * (np.sin(angle) + (np.pi - angle) * cosine) / (2 * np.pi)


def elu(x, y):
    """The kernel `Σ_l (elu(x_l) + 1)(elu(y_l) + 1)`, exact by definition."""

    def feature(z):
        return np.where(z > 0, z + 1, np.exp(np.minimum(z, 0)))

    return feature(x) @ np.swapaxes(feature(y), -1, -2)


def polynomial(x, y, degree):
    """The kernel `(x · y)^degree`."""
    return (x @ np.swapaxes(y, -1, -2)) ** degree
