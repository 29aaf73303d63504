"""`torch.compile` makes one program of a layer, without a break of its graph."""

import keras
import numpy as np
import pytest

from keras_rfattn.layers import MultiHeadAttention
from tests import helpers as h

torch = pytest.importorskip("torch")
if keras.backend.backend() != "torch":
    pytest.skip("of PyTorch", allow_module_level=True)

WINDOW = {"window": 2, "sinks": 1, "sliding": True}


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "causal", "options"),
    [
        ("favorplus", False, {}),
        ("favorpp_learned", True, {}),
        ("hedgehog", True, WINDOW),
    ],
)
def test_one_program_of_a_layer(name, causal, options):
    given = {"num_features": 6, "seed": 0, **options}
    layer = MultiHeadAttention(2, 4, feature_map=name, **given)
    x = np.random.default_rng(0).normal(size=(1, 7, 6)).astype("float32")
    x = torch.tensor(x)

    def attend(x):
        return layer(x, x, use_causal_mask=causal)

    with torch.no_grad():
        expected = attend(x)
        torch._dynamo.reset()
        found = torch.compile(attend, backend="eager", fullgraph=True)(x)
    h.assert_close(h.to_numpy(found), h.to_numpy(expected))
