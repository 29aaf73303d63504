"""The weights that fits compute from vectors and samples, against their definitions."""

import numpy as np
import pytest
from keras import ops

from keras_rfattn.feature_maps import fits
from tests import helpers as h

HEADS, DIM, COUNT = 2, 6, 8


def draws():
    return np.random.default_rng(5).normal(size=(HEADS, DIM, COUNT))


def sample(length=200, seed=0):
    """Queries and keys off center, of very different covariances."""
    generator = np.random.default_rng(seed)
    mix = 0.4 * generator.normal(size=(2, DIM, DIM)) * np.linspace(0.3, 1.5, DIM)
    mix[1] = mix[1][:, ::-1]
    centers = generator.normal(size=(2, 1, DIM))
    tokens = generator.normal(size=(2, HEADS, length, DIM))
    return tuple(
        0.5 * (t @ m + c) for t, m, c in zip(tokens, mix, centers, strict=True)
    )


def square_by_pairs(query, key):
    """The mean of `(q_l + k_l)²` over all pairs of `(K, n, H)`."""
    return np.mean((query[:, :, None] + key[:, None]) ** 2, axis=(1, 2))


def test_favorplus_has_the_vectors_as_they_are():
    weights = fits.favorplus(draws(), [sample()])
    h.assert_same(weights["vectors"], draws())
    np.testing.assert_array_equal(weights["bias"], np.zeros((HEADS, COUNT)))
    for fit in (fits.favorpp, fits.dense):
        weights = fit(draws())
        h.assert_same(weights["vectors"], draws())
        np.testing.assert_array_equal(weights["bias"], np.zeros((HEADS, COUNT)))
        assert not np.any(weights["a"])


def test_the_constant_is_its_formula():
    a, w = -np.random.default_rng(1).random((HEADS, DIM)), draws()
    expected = [
        np.diag(w[k].T @ np.diag(a[k]) @ w[k]) + 0.25 * np.sum(np.log(1 - 4 * a[k]))
        for k in range(HEADS)
    ]
    found = fits.constant(*map(ops.convert_to_tensor, (w, a[..., None])))
    h.assert_close(found[:, 0], np.array(expected), 1e-6)
    # One A for all directions.
    one = ops.convert_to_tensor(a[:, :1, None])
    every = ops.repeat(one, DIM, axis=1)
    w = ops.convert_to_tensor(w)
    h.assert_close(fits.constant(w, one), fits.constant(w, every), 1e-6)


@pytest.mark.parametrize("fit", [fits.favorpp, fits.dense])
def test_samples_have_equal_weights(fit):
    # Means are over the tokens of one sample first, and then over samples.
    samples = [sample(20), sample(90, seed=1), sample(90, seed=2)]
    if fit is fits.favorpp:
        z = np.mean([square_by_pairs(*pair) for pair in samples], axis=0)
        a = h.to_numpy(fits.best_a(z.sum(-1, keepdims=True), DIM))
    else:
        weights = fit(draws(), samples)
        moved = [conditioned(weights, pair) for pair in samples]
        z = np.mean([square_by_pairs(*pair) for pair in moved], axis=0)
        a = h.to_numpy(fits.best_a(z, 1))
        centers = np.mean([[x.mean(1) for x in pair] for pair in samples], axis=0)
        h.assert_close(weights["centers"], centers.swapaxes(0, 1))
    assert np.max(a) < -0.01
    h.assert_close(fit(draws(), samples)["a"], a, 1e-5)


def conditioned(weights, pair):
    centers, matrices = weights["centers"][:, :, None], weights["matrices"]
    return [
        (x - centers[:, i]) @ matrices[:, i].swapaxes(-1, -2)
        for i, x in enumerate(pair)
    ]


def test_dense_makes_covariances_equal():
    pair = sample(2000)
    weights = fits.dense(draws(), [pair])
    sides = [
        np.einsum("knh,kni->khi", x, x) / x.shape[1] for x in conditioned(weights, pair)
    ]
    h.assert_close(*sides, rtol=0.02)
    plain = fits.second_moments([pair])
    assert np.max(np.abs(plain[0] - plain[1])) > 0.3 * np.max(plain)


def test_dense_makes_sums_uncorrelated():
    pair = sample(2000)
    moved = conditioned(fits.dense(draws(), [pair]), pair)
    for x in moved:
        np.testing.assert_allclose(x.mean(1), 0, atol=1e-5)
    total = sum(np.einsum("knh,kni->khi", x, x) / x.shape[1] for x in moved)
    diagonal = np.einsum("khh->kh", total)
    off = total - np.stack([np.diag(row) for row in diagonal])
    assert np.max(np.abs(off)) < 1e-4 * np.max(diagonal)
    # Which is what each direction's A is taken from.
    h.assert_close(fits.mean_square(*moved), diagonal, 1e-4)


def test_dense_keeps_products():
    matrices = fits.dense(draws(), [sample()])["matrices"]
    product = matrices[:, 0].swapaxes(-1, -2) @ matrices[:, 1]
    h.assert_close(product, np.broadcast_to(np.eye(DIM), product.shape), 1e-5)


def test_power_and_balance():
    generator = np.random.default_rng(2)
    a, b = (x @ x.swapaxes(-1, -2) for x in generator.normal(size=(2, 3, 5, 5)))
    h.assert_close(fits.power(a, 0.5) @ fits.power(a, 0.5), a, 1e-10)
    m = fits.balance(a, b, ridge=0)
    inverse = np.linalg.inv(m)
    h.assert_close(m @ a @ m, inverse @ b @ inverse, 1e-6)


# --- The mean square of the rows of a batch


def by_definition(query, key, query_mask=None, key_mask=None):
    """`mean_square_of_rows` from all pairs of real tokens, `(B, K, H)`."""
    masks = [
        np.ones(x.shape[:2], bool) if m is None else m
        for x, m in ((query, query_mask), (key, key_mask))
    ]
    groups = query.shape[2] // key.shape[2]
    rows = []
    for b in range(len(key)):
        q = query[b, masks[0][b]].astype("float64")
        k = key[b, masks[1][b]].astype("float64")
        q = q.reshape(len(q), key.shape[2], groups, -1).transpose(1, 0, 2, 3)
        q = q.reshape(key.shape[2], -1, query.shape[-1])
        rows.append(square_by_pairs(q, k.swapaxes(0, 1)))
    return np.array(rows)


def of_rows(query, key, *masks):
    tensors = [None if x is None else ops.convert_to_tensor(x) for x in masks]
    query, key = (ops.convert_to_tensor(x) for x in (query, key))
    return fits.mean_square_of_rows(query, key, *tensors)


@pytest.mark.parametrize("kind", ["full", "middle", "scattered"])
def test_mean_over_the_pairs_of_real_tokens(kind):
    x, mask = h.problem(), h.padding_masks()[kind]
    hidden = ~mask[:, :, None, None]
    query = np.where(hidden, np.float32("nan"), x.query)
    key = np.where(hidden, np.float32("nan"), x.key)
    found = of_rows(query, key, mask, mask)
    assert tuple(found.shape) == (h.BATCH, h.KV_HEADS, h.HEAD_DIM)
    h.assert_close(found, by_definition(x.query, x.key, mask, mask))


def test_queries_and_keys_may_be_padded_apart():
    x = h.problem(length=11, key_length=37)
    masks = np.arange(11) < [[4], [11]], h.padding_masks()["left"]
    found = of_rows(x.query, x.key, *masks)
    h.assert_close(found, by_definition(x.query, x.key, *masks))


def test_a_row_of_padding_alone_has_a_finite_mean_square():
    x = h.problem()
    mask = np.ones((h.BATCH, h.LENGTH), bool)
    mask[1] = False
    found = h.to_numpy(of_rows(x.query, x.key, mask, mask))
    np.testing.assert_array_equal(found[1], 0)
    h.assert_close(found[:1], by_definition(x.query[:1], x.key[:1]))


def test_rows_and_heads_have_their_own():
    x = h.problem()
    a, changed = h.to_numpy(of_rows(x.query, x.key)), x.query.copy()
    changed[0, :, :2] *= 3
    b = h.to_numpy(of_rows(changed, x.key))
    same = np.array([[False, True], [True, True]])
    h.assert_same(a[same], b[same])
    assert np.all(a[0, 0] != b[0, 0])


def test_narrow_tokens():
    x = h.problem(size=100.0)
    query, key = (ops.cast(a, "float16") for a in (x.query, x.key))
    exact = by_definition(h.to_numpy(query), h.to_numpy(key))
    # Sums of squares of these overflow float16.
    assert np.min(exact.sum(-1)) > 65504
    h.assert_close(fits.mean_square_of_rows(query, key), exact, 1e-4)


def test_no_gradient_flows_through_it():
    def total(query, key):
        # A gradient of exactly zero, and not no gradient at all, in every backend.
        return fits.mean_square_of_rows(query, key) + 0 * ops.sum(query) * ops.sum(key)

    x = h.problem()
    for gradient in h.gradients(total, x.query, x.key):
        np.testing.assert_array_equal(gradient, 0)
