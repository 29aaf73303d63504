"""Embeddings that take the place of softmax's are told from those that do not."""

import numpy as np
import pytest

from tests.recipes.test_recipes import ROOT, forgotten

pytestmark = pytest.mark.once


@pytest.fixture
def interchange(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "recipes")
    with forgotten():
        from common import interchange

        yield interchange


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def test_equal_embeddings_are_interchangeable(interchange):
    x = unit(np.random.default_rng(0).normal(size=(40, 8)))
    assert all(abs(v - 1) < 1e-9 for v in interchange.measures(x, x.copy()).values())


def test_a_rotation_keeps_similarities_and_loses_the_index(interchange):
    generator = np.random.default_rng(0)
    x = unit(generator.normal(size=(60, 16)))
    rotation, _ = np.linalg.qr(generator.normal(size=(16, 16)))
    found = interchange.measures(x @ rotation, x)
    assert found["correlation of similarities"] > 0.999999
    # By chance, 10 of 59.
    assert found["recall at 10"] < 0.4
    assert found["mean cosine"] < 0.4


def test_one_text_that_moves_is_seen(interchange):
    x = np.eye(24)
    given = x.copy()
    given[3] = unit(x[3] + x[4])
    found = interchange.measures(given, x)
    assert found["lowest cosine"] == pytest.approx(0.5**0.5)
    assert found["mean cosine"] == pytest.approx((23 + 0.5**0.5) / 24)


def test_a_query_is_not_among_its_own_neighbours(interchange):
    angles = np.arange(24) * 0.1
    x = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    # The last query moves by ten places: its ten nearest, 13 to 22, become 9 to 18.
    given = x.copy()
    given[23] = x[14] * 0.6 + x[13] * 0.4
    given[23] = unit(given[23])
    wanted = {*range(13, 23)}
    near = sorted(range(23), key=lambda i: -(given[23] @ x[i]))[:10]
    expected = (23 + len(wanted & {*near}) / 10) / 24
    assert 0 < len(wanted & {*near}) < 10
    found = interchange.measures(given, x)["recall at 10"]
    assert found == pytest.approx(expected)
