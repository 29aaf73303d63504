"""`torch.compile` makes one program of attention, not one of each few operations."""

import keras
import numpy as np
import pytest

from keras_rfattn.layers import MultiHeadAttention
from tests import helpers as h

torch = pytest.importorskip("torch")
if keras.backend.backend() != "torch":
    pytest.skip("of PyTorch", allow_module_level=True)


@pytest.mark.full
@pytest.mark.parametrize(("causal", "most"), [(False, 1), (True, 1)])
def test_few_programs_of_a_layer(causal, most):
    layer = MultiHeadAttention(2, 4, feature_map="favorplus", num_features=6, seed=0)
    x = np.random.default_rng(0).normal(size=(1, 7, 6)).astype("float32")
    x, programs = torch.tensor(x), []

    def counted(program, inputs):
        programs.append(program)
        return program

    def attend(x):
        return layer(x, x, use_causal_mask=causal)

    with torch.no_grad():
        expected = attend(x)
        torch._dynamo.reset()
        found = torch.compile(attend, backend=counted)(x)
    h.assert_close(h.to_numpy(found), h.to_numpy(expected))
    # Causal attention looks once whether its fallback is needed.
    assert 0 < len(programs) <= most
