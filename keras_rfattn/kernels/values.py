"""The kernels that feature maps estimate, on NumPy arrays.

All functions take `x` of shape `(..., T, H)` and `y` of shape `(..., S, H)`, and return
an array of shape `(..., T, S)`. A feature map names its kernel in its attribute
`kernel`. Law 3 in `feature_maps/base.py` says what the map then estimates.
"""

import numpy as np


def softmax(x, y):
    """Returns the softmax kernel `exp(x · y)`."""
    return np.exp(x @ np.swapaxes(y, -1, -2))


def polynomial(x, y, degree):
    """Returns the kernel `(x · y)^degree`."""
    return (x @ np.swapaxes(y, -1, -2)) ** degree
