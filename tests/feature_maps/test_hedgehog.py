import numpy as np
import pytest

from keras_rfattn import feature_maps
from tests import helpers as h

X = h.problem(seed=3).key


def test_two_softmaxes_of_the_identity_at_first():
    hedgehog = h.build("hedgehog", seed=3)
    assert hedgehog.output_dim == 2 * h.HEAD_DIM
    halves = [np.exp(X), np.exp(-X)]
    expected = [x / x.sum(-1, keepdims=True) for x in halves]
    found = np.exp(h.to_numpy(hedgehog.key_features(X).log_scale))
    h.assert_close(found, np.concatenate(expected, -1), 1e-6)
    h.assert_same(
        hedgehog.query_features(X).log_scale, hedgehog.key_features(X).log_scale
    )
    default = feature_maps.get("hedgehog", seed=0)
    default.build((None, None, 2, 6))
    assert default.output_dim == 12 and default.num_features is None
    # W x costs, whatever its size was called.
    assert default.num_projections == 6


@pytest.mark.parametrize("rows", [5, 40])
def test_another_width_starts_orthogonal(rows):
    hedgehog = feature_maps.get("hedgehog", num_features=rows, seed=0)
    hedgehog.build((None, None, 2, 24))
    kernel = h.to_numpy(hedgehog.query_kernel)
    assert kernel.shape == (2, 24, rows)
    gram = (
        kernel.swapaxes(1, 2) @ kernel if rows < 24 else kernel @ kernel.swapaxes(1, 2)
    )
    h.assert_close(gram, np.broadcast_to(np.eye(gram.shape[-1]), gram.shape), 1e-5)
    again = feature_maps.get("hedgehog", num_features=rows, seed=0)
    again.build((None, None, 2, 24))
    h.assert_same(again.key_kernel, kernel)
    other = hedgehog.reseeded(1)
    other.build((None, None, 2, 24))
    assert np.any(h.to_numpy(other.key_kernel) != kernel)
