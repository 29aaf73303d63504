"""Models with exact first tokens: reported, saved, shared and generated from."""

import keras
import numpy as np
import pytest

import keras_rfattn
from keras_rfattn import diagnostics, generation
from tests.marks import slow_on_jax
from tests.models.test_generation import array, assert_near, full_pass, linear, tokens

WINDOW = {"window": 3, "sinks": 2}


def model(**options):
    found = linear("llama3")
    keras_rfattn.restore_attention(found)
    options = {"num_features": 16, "seed": 0} | WINDOW | options
    return keras_rfattn.replace_attention(found, "favorpp_learned", **options)


def test_a_model_is_reported_saved_and_shared(tmp_path):
    one, ids = model(), tokens()
    expected = full_pass(one, ids)
    note = keras_rfattn.describe_attention(one).rows[0].note
    assert "exact within 3 tokens, and to the first 2" in note
    one.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(full_pass(loaded, ids), expected)
    keras_rfattn.save_maps(one, tmp_path / "maps", license="mit")
    with pytest.raises(ValueError, match="another mechanism or window"):
        keras_rfattn.load_maps(model(sinks=0), tmp_path / "maps")
    softmax = keras_rfattn.restore_attention(model())
    keras_rfattn.load_maps(softmax, tmp_path / "maps")
    np.testing.assert_array_equal(full_pass(softmax, ids), expected)


@slow_on_jax
def test_states_give_the_logits_of_full_passes(tmp_path):
    one, ids = model(), tokens()
    expected = full_pass(one, ids)
    logits, state = generation.prefill(one, ids[:, :7])
    assert_near(array(logits)[:, -1], expected[:, 6])
    generation.save(tmp_path / "state.npz", state)
    state = generation.load(tmp_path / "state.npz", one)
    for i in range(7, ids.shape[1]):
        logits, state = generation.step(one, ids[:, i : i + 1], state)
        assert_near(array(logits)[:, -1], expected[:, i])


@slow_on_jax
def test_the_window_alone_keeps_the_sinks():
    def last_logit(model, ids):
        return full_pass(model, ids)[0, -1, 7]

    found = diagnostics.attribute(model(), tokens(), last_logit, verbose=0)
    without = diagnostics.attribute(model(sinks=0), tokens(), last_logit, verbose=0)
    assert found.window_only != pytest.approx(without.window_only, rel=1e-2)
    assert found.features_only == pytest.approx(without.features_only, rel=1e-5)
