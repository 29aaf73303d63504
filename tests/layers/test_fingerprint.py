"""A fingerprint covers the function of a layer, and neither names nor seeds."""

import numpy as np
import pytest

from keras_rfattn import feature_maps as maps
from keras_rfattn import papers
from keras_rfattn.layers import GroupedQueryAttention, MultiHeadAttention
from keras_rfattn.layers.fingerprint import agrees, checksum, fingerprint


def layer(feature_map, **options):
    made = MultiHeadAttention(2, 4, feature_map=feature_map, **options)
    made.build((None, 6, 8), (None, 6, 8))
    return made


def gerf(cls=papers.Gerf, seed=0):
    return layer(cls(3, seed=seed))


def test_a_map_that_moves_to_another_file_keeps_its_fingerprint(monkeypatch):
    before = checksum(gerf())
    monkeypatch.setattr(papers.Gerf, "__module__", "keras_rfattn.elsewhere")
    assert checksum(gerf()) == before
    assert checksum(gerf(seed=1)) == before
    assert checksum(gerf(maps.FavorPlus)) != before


@pytest.mark.parametrize(
    "other",
    [
        lambda: layer(papers.Favor(4)),
        lambda: layer(maps.FavorPlus(4, projection="hadamard")),
        lambda: layer(maps.FavorPlus(4), window=3),
        lambda: layer(maps.FavorPlus(4), temperature=0.5),
        lambda: layer(maps.FavorPlus(4), softmax_heads=[1]),
    ],
)
def test_another_function_does_not_agree(other):
    made = layer(maps.FavorPlus(4, seed=1))
    assert agrees(made, fingerprint(layer(maps.FavorPlus(4, seed=2))))
    assert not agrees(made, fingerprint(other()))


def test_formats():
    made = layer(maps.FavorPlus(4))
    version, number = fingerprint(made)
    assert agrees(made, np.array([version, number]))
    for wrong in ([version - 1, number], [version, number + 1], number, [number]):
        assert not agrees(made, np.array(wrong))
