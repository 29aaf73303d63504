import importlib.util
import os
import pathlib

import keras
import numpy as np
import pytest

from keras_rfattn import layers
from tests.models import exports

BACKEND = keras.backend.backend()
# A program of any length for each way that blocks are summed.
QUICK = {
    "jax": [("jax.export", "causal"), ("tf_saved_model", "window")],
    "tensorflow": [("litert", "bidirectional"), ("tf_saved_model", "causal")],
    "torch": [("torch", "padding mask"), ("torch", "causal")],
}
DOCS = pathlib.Path(__file__).parents[2] / "docs"


# All others are those of the page, which `docs/export_table.py` runs.
EVERY_EXPORT = bool(os.environ.get("ALL_EXPORTS"))


def cells():
    for form in exports.FORMATS[BACKEND]:
        for case in exports.CASES:
            for shape in exports.SHAPES:
                is_quick = (form, case) in QUICK[BACKEND] and shape == "any length"
                if is_quick or EVERY_EXPORT:
                    yield form, case, shape


@pytest.mark.once
@pytest.mark.full
@pytest.mark.parametrize(("form", "case", "shape"), cells())
def test_what_softmax_can_be_exported_to(form, case, shape):
    arguments = form, exports.CASES[case], exports.SHAPES[shape]
    found = exports.answer(*arguments, "favorplus")
    if found.startswith("Refused"):
        pytest.skip(found)
    # Nothing that softmax can is refused.
    assert found == "yes" or exports.answer(*arguments, None) != "yes", found


@pytest.mark.full
@pytest.mark.parametrize("window", [None, 4])
def test_the_step_of_a_decoder(window):
    (form,) = exports.STEPS[BACKEND]
    assert exports.step_answer(form, None, "favorplus", window) == "yes"


@pytest.mark.full
def test_another_form_of_features():
    form = next(iter(exports.FORMATS[BACKEND]))
    arguments = form, exports.CASES["causal"], exports.SHAPES["any length"]
    assert exports.answer(*arguments, "polysketch") == "yes"


def test_packed_rows_without_a_limit_are_refused():
    x, ids = keras.Input((16, 16)), keras.Input((16,), dtype="int32")
    layer = layers.MultiHeadAttention(2, 8, feature_map="elu")
    model = keras.Model([x, ids], layer(x, x, segment_ids=ids))
    with pytest.raises(Exception, match="max_segments"):
        traced(model, np.zeros((2, 16, 16), "float32"), np.zeros((2, 16), "int32"))


def traced(model, *arrays):
    """A program of a model, as exporters record it."""
    if BACKEND == "jax":
        import jax

        return jax.jit(lambda *x: model(list(x))).lower(*arrays)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(lambda *x: model(list(x))).get_concrete_function(*arrays)
    import torch

    tensors = [torch.tensor(x) for x in arrays]
    return torch.export.export(model, (tensors,), strict=False)


def test_the_page_has_every_case():
    spec = importlib.util.spec_from_file_location("table", DOCS / "export_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = module.rows((DOCS / "pages/export_table.md").read_text(), BACKEND)
    assert set(rows) == {
        (f, c) for f in exports.FORMATS[BACKEND] for c in exports.CASES
    }
    for row, cells in rows.items():
        assert len(cells) == len(exports.SHAPES)
        assert set(cells) <= {"yes", "no, nor softmax"}, row
