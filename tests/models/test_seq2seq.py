"""Generation of encoder-decoders, against full passes over all tokens."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_rfattn
from tests import helpers as h
from tests.marks import ONE_BACKEND, slow_on_jax
from tests.models import families

keras_hub = pytest.importorskip("keras_hub")

LENGTH = 9
MECHANISMS = {
    "favorpp": {"feature_map": "favorpp", "num_features": 16},
    "signed": {"feature_map": "poisson", "num_features": 16},
    "own": {"feature_map": "favorpp", "num_features": 16, "exclude": "*cross*"},
    "cross": {"feature_map": "favorpp", "num_features": 16, "include": "*cross*"},
    "first": {"feature_map": "elu", "exclude": "*decoder_layer_1*"},
    "window": {"feature_map": "favorplus", "window": 3, "exclude": "*cross*"},
}


def linear(mechanism):
    model, inputs = families.build("bart")
    generator = np.random.default_rng(3)
    for weight in model.trainable_weights:
        if weight.path.endswith(families.QUERIES_AND_KEYS):
            size = 0.4 if mechanism == "signed" else 1.5
            weight.assign(size * generator.normal(size=weight.shape))
    found = keras_rfattn.replace_attention(model, **MECHANISMS[mechanism], seed=0)
    ids = generator.integers(2, 60, (2, LENGTH)).astype("int32")
    mask = np.arange(LENGTH) < np.array([3, 5])[:, None]
    if mechanism not in ("cross", "first"):
        # Softmax layers see padding in KerasHub's cache.
        mask[1, 1] = False
    return found, {
        "encoder_token_ids": inputs["encoder_token_ids"],
        "encoder_padding_mask": inputs["encoder_padding_mask"],
        "decoder_token_ids": np.where(mask, ids, 0),
        "decoder_padding_mask": mask.astype("int32"),
    }


def greedy(model, inputs):
    ids, mask = (inputs[f"decoder_{x}"].copy() for x in ("token_ids", "padding_mask"))
    last = np.where(mask, np.arange(LENGTH), 0).max(1)
    full_pass = h.forward(model)
    for i in range(last.min() + 1, LENGTH):
        now = {**inputs, "decoder_token_ids": ids, "decoder_padding_mask": mask}
        found, written = h.to_numpy(full_pass(now))[:, i - 1].argmax(-1), i > last
        ids[written, i], mask[written, i] = found[written], 1
    return ids


def assert_greedy(model, inputs):
    model.compile(sampler="greedy")
    found = model.generate(
        {k: x.copy() for k, x in inputs.items()}, stop_token_ids=None
    )
    expected = greedy(model, inputs)
    np.testing.assert_array_equal(found["decoder_token_ids"], expected)
    assert len(np.unique(expected)) > 5


@pytest.mark.once
@pytest.mark.full
@pytest.mark.parametrize(
    "mechanism",
    ["favorpp"] + [pytest.param(x, marks=ONE_BACKEND) for x in ["first", *MECHANISMS]],
)
def test_greedy_generation(mechanism):
    assert_greedy(*linear(mechanism))


@pytest.mark.once
@slow_on_jax
def test_beam_search():
    model, inputs = linear("favorpp")
    inputs = {k: x[:1] for k, x in inputs.items()}
    model.compile(sampler=keras_hub.samplers.BeamSampler(num_beams=2))
    found = model.generate(
        {k: x.copy() for k, x in inputs.items()}, stop_token_ids=None
    )
    beams = np.repeat(inputs["decoder_token_ids"], 2, axis=0)
    scores, full_pass = np.array([0.0, -1e9]), h.forward(model)
    for i in range(3, LENGTH):
        mask = np.broadcast_to(np.arange(LENGTH) < i, beams.shape)
        now = {k: np.repeat(x, 2, axis=0) for k, x in inputs.items()}
        now |= {
            "decoder_token_ids": beams,
            "decoder_padding_mask": mask.astype("int32"),
        }
        logits = h.to_numpy(full_pass(now))[:, i - 1].astype("float64")
        total = scores[:, None] + logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        rows, words = np.unravel_index(np.argsort(-total, axis=None)[:2], total.shape)
        beams, scores = beams[rows].copy(), total[rows, words]
        beams[:, i] = words
    np.testing.assert_array_equal(found["decoder_token_ids"], beams[[scores.argmax()]])


@pytest.mark.once
def test_the_encoder_is_summed_up_once():
    model, inputs = linear("favorpp")
    sizes, steps = [], []
    for count in (4, 11):
        ids = np.ones((2, count), "int32")

        @h.one_program
        def build_cache(ids, tokens):
            return model._build_cache(ids, ids, tokens)

        tokens = ops.convert_to_tensor(inputs["decoder_token_ids"])
        _, hidden, cache, cross = build_cache(ops.convert_to_tensor(ids), tokens)
        sizes.append([x.shape for x in keras.tree.flatten((cache, cross))])
        # What is known of the encoder is all in its state.
        nothing = keras.ops.full_like(hidden, float("nan"))

        @h.one_program
        def step(nothing, cache, cross, ids=ids):
            return model.call_decoder_with_cache(
                nothing, ids, ids[:, :1], cache, LENGTH, cross, None
            )[0]

        logits = step(nothing, cache, cross)
        steps.append(keras.ops.convert_to_numpy(logits))
    assert sizes[0] == sizes[1] and len(sizes[0]) > 10
    assert np.isfinite(steps).all() and np.abs(steps[0] - steps[1]).max() > 1e-4
