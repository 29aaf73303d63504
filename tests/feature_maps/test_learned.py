"""Maps whose weights are trained, before they are."""

import numpy as np
import pytest

from keras_rfattn import feature_maps
from keras_rfattn.feature_maps import FavorPPLearned
from keras_rfattn.models.report import multiplications
from tests import helpers as h

X = h.problem(seed=3).key


@pytest.mark.parametrize("name", ["favorplus", "favorpp", "favorpp_dense"])
@pytest.mark.parametrize("way", ["of", "calibrate"])
def test_favorpp_learned_starts_as_another_map_bit_for_bit(name, way):
    source = h.build(name)
    if way == "of":
        learned = FavorPPLearned.of(source)
    else:
        learned = FavorPPLearned(h.NUM_FEATURES, start=name, seed=7)
        learned.build((None, None, h.KV_HEADS, h.HEAD_DIM))
        if learned.is_adaptive:
            learned.adapt([h.sample()])
    for method in ("query_features", "key_features"):
        # What bidirectional and causal attention give them.
        stats = source.statistics(X, X, causal=True)
        expected = getattr(source, method)(X, stats)
        found = getattr(learned, method)(X, learned.statistics(X, X))
        assert found.values is None and expected.values is None
        h.assert_same(found.log_scale, expected.log_scale)
    assert learned.start == name and learned.seed == source.seed


def test_what_favorpp_learned_can_be_made_of():
    fresh = feature_maps.get("favorpp", seed=0)
    fresh.build((None, None, 2, 4))
    pairs = h.build("favorplus", pair=True)
    for source in (fresh, pairs, h.build("favor"), feature_maps.get("favorplus")):
        with pytest.raises(ValueError, match="built and calibrated. Received"):
            FavorPPLearned.of(source)
    with pytest.raises(ValueError, match="`start` must be one of"):
        FavorPPLearned(start="gerf")


def test_everything_about_favorpp_learned_trains():
    learned = h.build("favorpp_learned")
    names = {w.path.split("/")[-1] for w in learned.trainable_weights}
    assert names == {
        "query_vectors", "key_vectors", "a", "log_weights", "query_matrix",
        "key_matrix", "query_center", "key_center",
    }  # fmt: skip
    (a,) = (w for w in learned.trainable_weights if w.path.endswith("/a"))
    assert np.all(h.to_numpy(a) < 0)
    assert np.all(h.to_numpy(a.constraint(-a)) == 0)


def test_hedgehog_is_two_softmaxes_of_the_identity_at_first():
    hedgehog = h.build("hedgehog", seed=3)
    assert hedgehog.output_dim == 2 * h.HEAD_DIM
    if hedgehog.num_features == h.HEAD_DIM:
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
    assert multiplications(default, 6, 5) == 2 * (6 * 6 + 12 * 5)


@pytest.mark.parametrize("rows", [5, 40])
def test_hedgehog_of_another_width_starts_orthogonal(rows):
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
