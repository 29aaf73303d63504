import numpy as np
import pytest

from keras_rfattn.kernels import values
from tests import helpers as h

pytestmark = pytest.mark.once

X, Y = np.random.default_rng(0).normal(size=(2, 2, 3, 4)) * 0.7


def test_softmax_is_the_gaussian_kernel_up_to_norms():
    xx, yy = np.sum(X**2, -1)[..., :, None], np.sum(Y**2, -1)[..., None, :]
    difference = X[:, :, None] - Y[:, None]
    gaussian = np.exp(-np.sum(difference**2, -1) / 2)
    expected = np.exp(xx / 2) * gaussian * np.exp(yy / 2)
    h.assert_close(values.softmax(X, Y), expected, 1e-12)
