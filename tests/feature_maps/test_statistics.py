"""What FAVOR++ learns from data, when, and from whom."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_rfattn import feature_maps
from keras_rfattn.layers import attend
from keras_rfattn.ops import AttentionMask
from tests import helpers as h


def fresh(policy="auto", **arguments):
    feature_map = feature_maps.get(
        "favorpp", num_features=6, seed=1, statistics=policy, **arguments
    )
    feature_map.build((None, None, h.KV_HEADS, h.HEAD_DIM))
    return feature_map


def tensors(x, dtype="float32"):
    return [ops.convert_to_tensor(a.astype(dtype)) for a in x]


def mean_square(query, key, query_mask=None, key_mask=None):
    """The mean of `‖q_i + k_j‖²` by its definition, `(B, K)`."""
    shape = query.shape[:2], key.shape[:2]
    masks = [
        np.ones(s, bool) if m is None else m
        for s, m in zip(shape, (query_mask, key_mask), strict=True)
    ]
    result = np.zeros((len(key), key.shape[2]))
    groups = query.shape[2] // key.shape[2]
    for b in range(len(key)):
        for k in range(key.shape[2]):
            q = query[b, masks[0][b], k * groups : (k + 1) * groups]
            q = q.reshape(-1, q.shape[-1]).astype("float64")
            y = key[b, masks[1][b], k].astype("float64")
            sums = q[:, None] + y[None]
            result[b, k] = np.mean(np.sum(sums**2, -1))
    return result


def optimum(z):
    feature_map = fresh()
    return feature_map.optimal_a(ops.convert_to_tensor(np.asarray(z, "float32")))


@pytest.mark.parametrize("kind", ["full", "middle", "scattered"])
def test_batch_statistic_is_the_mean_over_pairs(kind):
    x, mask = h.problem(), h.padding_masks()[kind]
    hidden = ~mask[:, :, None, None]
    query = np.where(hidden, np.float32("nan"), x.query)
    key = np.where(hidden, np.float32("nan"), x.key)
    masks = ops.convert_to_tensor(mask), ops.convert_to_tensor(mask)
    actual = fresh("batch").statistics(*tensors((query, key)), *masks)
    assert tuple(actual.shape) == (h.BATCH, h.KV_HEADS)
    h.assert_close(actual, optimum(mean_square(x.query, x.key, mask, mask)))


def test_queries_and_keys_may_be_padded_apart():
    x = h.problem(length=11, key_length=37)
    masks = np.arange(11) < [[4], [11]], h.padding_masks()["left"]
    actual = fresh("batch").statistics(
        *tensors((x.query, x.key)), *(ops.convert_to_tensor(m) for m in masks)
    )
    h.assert_close(actual, optimum(mean_square(x.query, x.key, *masks)))


def test_batch_statistics_refuse_the_future():
    feature_map, x = fresh("batch"), h.problem()
    assert not feature_map.is_causal_safe
    with pytest.raises(ValueError, match="would leak"):
        feature_map.statistics(*tensors((x.query, x.key)), causal=True)
    with pytest.raises(ValueError, match="would leak"):
        attend(*tensors(x), feature_map, AttentionMask(causal=True))
    assert fresh("auto").is_causal_safe and fresh("stored").is_causal_safe


def test_auto_and_stored():
    x = h.problem()
    data = tensors((x.query, x.key))
    batch = optimum(mean_square(x.query, x.key))
    # Before anything is stored: the sequence if all of it may be seen, else 0.
    h.assert_close(fresh("auto").statistics(*data), batch)
    for found in (
        fresh("auto").statistics(*data, causal=True),
        fresh("stored").statistics(*data),
        fresh("stored").statistics(*data, causal=True),
    ):
        assert tuple(found.shape)[-1] == h.KV_HEADS
        np.testing.assert_array_equal(h.to_numpy(found), 0)
    # Afterwards: what is stored, whatever the sequence.
    for policy in ("auto", "stored"):
        feature_map = fresh(policy)
        assert not feature_map.is_calibrated
        feature_map.update(ops.convert_to_tensor(np.float32([2.0, 5.0])))
        assert feature_map.is_calibrated
        for causal in (False, True):
            found = h.to_numpy(feature_map.statistics(*data, causal=causal))
            expected = h.to_numpy(optimum([2.0, 5.0]))
            h.assert_close(found, np.broadcast_to(expected, found.shape))
    assert not fresh("batch").is_calibrated


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("policy", ["auto", "stored"])
def test_moving_average(policy, causal):
    # The mean of the first batches, until momentum is less than that would be.
    feature_map, keep = fresh(policy, momentum=0.6), (0, 1 / 2, 0.6, 0.6)
    expected = 0
    for seed in range(4):
        x = h.problem(seed, size=1.0 + seed)
        mask = h.padding_masks()["right"]
        nan = np.where(mask[:, :, None, None], 0, np.float32("nan"))
        feature_map.statistics(
            *tensors((x.query + nan, x.key + nan)),
            ops.convert_to_tensor(mask),
            ops.convert_to_tensor(mask),
            causal=causal,
            training=True,
        )
        new = mean_square(x.query, x.key, mask, mask).mean(axis=0)
        expected = keep[seed] * expected + (1 - keep[seed]) * new
        h.assert_close(feature_map.mean_square, expected)
        assert int(h.to_numpy(feature_map.updates)) == seed + 1


def test_nothing_is_stored_at_inference_or_when_frozen():
    x = h.problem()
    data = tensors((x.query, x.key))
    frozen, batch = fresh(), fresh("batch")
    frozen.trainable = False
    inference = fresh()
    frozen.statistics(*data, training=True)
    inference.statistics(*data, training=False)
    for feature_map in (frozen, inference):
        assert not feature_map.is_calibrated
        np.testing.assert_array_equal(h.to_numpy(feature_map.mean_square), 0)
    batch.statistics(*data, training=True)
    assert not hasattr(batch, "mean_square")


def test_causal_features_do_not_depend_on_the_update_of_the_same_step():
    # The step's own sequence reaches its features one step later at the earliest.
    feature_map, x = fresh(), h.problem()
    data = tensors((x.query, x.key))
    first = feature_map.statistics(*data, causal=True, training=True)
    np.testing.assert_array_equal(h.to_numpy(first), 0)
    second = feature_map.statistics(*data, causal=True)
    assert np.all(h.to_numpy(second) < 0)


def test_a_sequence_of_padding_alone_moves_no_average():
    feature_map, x = fresh(), h.problem()
    mask = np.ones((h.BATCH, h.LENGTH), bool)
    mask[1] = False
    masks = ops.convert_to_tensor(mask), ops.convert_to_tensor(mask)
    feature_map.statistics(*tensors((x.query, x.key)), *masks, training=True)
    expected = mean_square(x.query[:1], x.key[:1])[0]
    h.assert_close(feature_map.mean_square, expected)


def test_a_row_of_padding_alone_gives_a_finite_statistic():
    x = h.problem()
    mask = ops.zeros((h.BATCH, h.LENGTH), dtype="bool")
    a = fresh("batch").statistics(*tensors((x.query, x.key)), mask, mask)
    assert np.all(np.isfinite(h.to_numpy(a)))


def test_rows_and_heads_have_their_own():
    x = h.problem()
    a = h.to_numpy(fresh("batch").statistics(*tensors((x.query, x.key))))
    changed = x.query.copy()
    changed[0, :, :2] *= 3
    b = h.to_numpy(fresh("batch").statistics(*tensors((changed, x.key))))
    same = np.array([[False, True], [True, True]])
    h.assert_same(a[same], b[same])
    assert a[0, 0] != b[0, 0]


def test_no_gradient_flows_through_a_statistic():
    feature_map, x = fresh("batch"), h.problem()

    def total(query, key):
        # A gradient of exactly zero, and not no gradient at all, in every backend.
        return feature_map.statistics(query, key) + 0 * ops.sum(query) * ops.sum(key)

    for gradient in h.gradients(total, x.query, x.key):
        np.testing.assert_array_equal(gradient, 0)


def test_statistics_of_narrow_inputs():
    x = h.problem(size=100.0)
    query, key = (ops.cast(a, "float16") for a in (x.query, x.key))
    a = fresh("batch").statistics(query, key)
    assert keras.backend.standardize_dtype(a.dtype) == "float32"
    exact = mean_square(h.to_numpy(query), h.to_numpy(key))
    # Squares of these overflow float16.
    assert np.min(exact) > 65504
    h.assert_close(a, optimum(exact), 1e-4)


def test_stored_statistics_are_saved(tmp_path):
    def model():
        x = keras.Input((4, h.KV_HEADS, h.HEAD_DIM))

        class Host(keras.layers.Layer):
            def __init__(self):
                super().__init__(name="host")
                self.feature_map = feature_maps.get(
                    "favorpp", num_features=6, seed=1, name="feature_map"
                )

            def build(self, shape):
                self.feature_map.build(shape)

            def call(self, x):
                stats = self.feature_map.statistics(x, x, causal=True)
                return self.feature_map.key_features(x, stats).log_scale

        host = Host()
        return keras.Model(x, host(x)), host.feature_map

    one, feature_map = model()
    feature_map.update(ops.convert_to_tensor(np.float32([2.0, 5.0])))
    path = str(tmp_path / "a.weights.h5")
    one.save_weights(path)
    other, loaded = model()
    other.load_weights(path)
    assert loaded.is_calibrated
    x = h.problem(length=4).key
    h.assert_same(other(x), one(x))


def test_calibration_per_direction_averages_squared_sums():
    generator = np.random.default_rng(0)
    data = [tuple(generator.normal(0.2, 0.5, (2, 2, 30, 8))) for _ in range(3)]
    feature_map = feature_maps.get("favorpp", per_direction=True, num_features=16)
    feature_map.build((None, None, 2, 8))
    feature_map.adapt(data)
    expected = [
        np.mean((q[:, :, None] + k[:, None]) ** 2, axis=(1, 2)) for q, k in data
    ]
    h.assert_close(feature_map.mean_square, np.mean(expected, axis=0), 1e-6)
