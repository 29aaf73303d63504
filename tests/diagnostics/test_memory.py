import numpy as np
import pytest

import keras_rfattn
from keras_rfattn import diagnostics
from keras_rfattn.models import transformer_pp
from tests.uptraining import models as m

pytestmark = pytest.mark.once
LAYERS, HEADS, DIM, FEATURES = 5, 2, 8, 16
# Numerators, normalizers, maxima and magnitudes, and the position, of four bytes each.
STATE = HEADS * FEATURES * (DIM + 3) + 1


def decoder():
    return transformer_pp(
        attention="favorplus", vocabulary_size=20, num_layers=LAYERS, num_heads=HEADS,
        head_dim=DIM, num_features=FEATURES, seed=0,
    )  # fmt: skip


@pytest.mark.parametrize("length", [64, 1000])
def test_count_is_the_largest_that_fits(length):
    model, cache = decoder(), 2 * HEADS * DIM * length
    for memory in np.linspace(STATE / cache + 1e-6, 1, 7):
        count = diagnostics.softmax_layers_within(model, float(memory), length)
        fits = [
            k * cache + (LAYERS - k) * STATE <= memory * LAYERS * cache
            for k in range(LAYERS + 1)
        ]
        assert count == max(np.flatnonzero(fits))


@pytest.mark.parametrize("memory", [0, 1.5, "half", True])
def test_bad_shares(memory):
    with pytest.raises(ValueError, match="`memory` must be a share above 0"):
        diagnostics.softmax_layers_within(decoder(), memory, 64)


def test_bad_budgets():
    with pytest.raises(ValueError, match="`length` must be a positive integer"):
        diagnostics.softmax_layers_within(decoder(), 0.5, 0)
    with pytest.raises(ValueError, match="where the states alone need 0.689"):
        diagnostics.softmax_layers_within(decoder(), 0.5, 16)
    model = decoder()
    keras_rfattn.restore_attention(model)
    with pytest.raises(ValueError, match="must have linear attention layers"):
        diagnostics.softmax_layers_within(model, 0.5, 64)
    model = m.linear_model("favorplus", num_features=8, window=4)
    assert diagnostics.softmax_layers_within(model, 1, 10**6) == 2
