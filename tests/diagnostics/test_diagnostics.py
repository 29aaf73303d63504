import keras
import numpy as np
import pytest

import keras_rfattn
from keras_rfattn import diagnostics, feature_maps, papers
from keras_rfattn.diagnostics import errors
from keras_rfattn.layers import record
from keras_rfattn.layers.attend import attend
from keras_rfattn.layers.recording import Recorder, Sequence
from keras_rfattn.ops import AttentionMask
from tests import helpers as h
from tests.feature_maps.cases import case
from tests.marks import each_map, first_on_jax, slow_on_jax

pytestmark = pytest.mark.once


def model(feature_map=None, causal=False, **arguments):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((24, 12))
    x = inputs
    for name in ("first", "second"):
        layer = keras.layers.MultiHeadAttention(2, 6, name=name)
        x = x + layer(x, x, use_causal_mask=causal)
    result = keras.Model(inputs, x)
    if feature_map is not None:
        keras_rfattn.replace_attention(result, feature_map, seed=0, **arguments)
    return result


def batches(scale=1.0):
    generator = np.random.default_rng(0)
    return [scale * generator.normal(size=(2, 24, 12)).astype("float32")]


def sequence(causal=False, rows=10):
    generator = np.random.default_rng(1)
    q, k = 0.4 * generator.normal(size=(2, 2, rows, 4))
    return Sequence(q, k, generator.normal(size=(2, rows, 3)), causal)


@pytest.mark.parametrize("causal", first_on_jax([False, True]))
def test_recorded_sequences_are_what_softmax_attention_meets(causal):
    linear, data = model("favorplus", causal, num_features=2), batches()
    softmax = model(causal=causal)
    expected = softmax.predict(data[0], verbose=0)
    found = record(linear, data)
    assert [path.split("/")[-1] for path, *_ in found] == ["first", "second"]
    last = found[-1][2]
    assert len(last) == 2 and last[0].causal == causal
    # The second layer met what it meets in the softmax model.
    attention = softmax.get_layer("second")
    middle = keras.Model(softmax.input, attention.input[0]).predict(data[0], verbose=0)
    query = keras.ops.convert_to_numpy(attention._query_dense(middle)) * 6**-0.25
    h.assert_close(last[0].query, query[0].transpose(1, 0, 2), 1e-4)
    assert np.any(linear.predict(data[0], verbose=0) != expected)
    assert linear.get_layer("first").recorder is None


@slow_on_jax
def test_a_prefix_is_recorded():
    feature_map, x = h.build("favorpp"), h.problem(length=9)
    prefix, visible = np.zeros((2, 9), bool), np.ones((2, 9), bool)
    prefix[0, :4] = prefix[1, 2:6] = True
    visible[0, 2] = visible[1, 0] = False
    mask = AttentionMask(
        key_mask=visible, prefix_mask=prefix, causal=True, self_attention=True
    )
    layer = keras_rfattn.layers.MultiHeadAttention(x.value.shape[2], 4)
    layer.build((2, 9, 8), (2, 9, 8))
    recorder = Recorder(layer, True, 1024, {})
    arrays = [keras.ops.convert_to_tensor(y) for y in x]
    output = h.to_numpy(attend(*arrays, feature_map, mask, recorder=recorder))
    for row, found in enumerate(recorder.sequences):
        logits = found.query @ found.key.swapaxes(-1, -2)
        weights = np.where(errors.visibility(found), np.exp(logits), 0)
        expected = weights / weights.sum(-1, keepdims=True) @ found.value
        heads, real = expected.shape[0], visible[row]
        expected = expected.reshape(heads, real.sum(), -1, expected.shape[-1])
        expected = expected.transpose(1, 0, 2, 3).reshape(output[row, real].shape)
        h.assert_close(output[row, real], expected, 1e-5)


@pytest.mark.parametrize("name", ["elu", "relu"])
def test_other_kernels_are_compared_with_softmax_at_its_own_scale(name):
    linear, data = model(name), batches()
    found = record(linear, data)
    again = record(model("favorplus", num_features=2), data)
    for (_, _, ours), (_, _, theirs) in zip(found, again, strict=True):
        logits = [s.logit_scale * s.query @ s.key.swapaxes(-1, -2) for s in (*ours,)]
        expected = [s.query @ s.key.swapaxes(-1, -2) for s in theirs]
        h.assert_close(np.stack(logits), np.stack(expected), 1e-4)
    report = diagnostics.approximation_report(linear, data)
    assert 0.01 < report.mean.output < 1
    # No estimate of softmax's kernel, which has no error then.
    assert np.all(np.isnan(report.mean[:4])) and "unknown" in str(report)


def test_padding_is_left_out_and_long_sequences_are_thinned():
    inputs, mask = keras.Input((24, 12)), keras.Input((24,), dtype="bool")
    layer = keras.layers.MultiHeadAttention(2, 6)
    output = layer(inputs, inputs, attention_mask=mask[:, None])
    linear = keras_rfattn.replace_attention(
        keras.Model([inputs, mask], output), "favor"
    )
    real = np.arange(24) < [[24], [7]]
    ((_, _, found),) = record(linear, [[batches()[0], real]], max_tokens=12)
    assert [s.key.shape[1] for s in found] == [12, 7]


@pytest.mark.parametrize("causal", [False, True])
def test_errors_by_their_definition(causal):
    s = sequence(causal)
    feature_map = feature_maps.FavorPlus(32, seed=0)
    feature_map.build((None, None, 2, 4))
    values, shift, _ = errors.estimate(feature_map, s)
    found = errors.head_errors(feature_map, [s])[1]
    kernel = np.exp(s.query[1] @ s.key[1].T)
    estimates = values[1] * np.exp(shift[1])
    seen = np.tri(10, dtype=bool) if causal else np.ones((10, 10), bool)
    exact, approximate = (np.where(seen, x, 0) for x in (kernel, estimates))
    exact, approximate = (x / x.sum(-1, keepdims=True) for x in (exact, approximate))
    mean = seen / seen.sum(-1, keepdims=True)

    def relative(a, b):
        return np.linalg.norm(a - b) / np.linalg.norm(b)

    v = s.value[1]
    np.testing.assert_allclose(
        found.kernel, np.median(np.abs(estimates / kernel - 1)[seen])
    )
    np.testing.assert_allclose(found.attention, relative(approximate, exact))
    np.testing.assert_allclose(found.output, relative(approximate @ v, exact @ v))
    np.testing.assert_allclose(found.mean_of_values, relative(mean @ v, exact @ v))
    assert found.negative == 0
    z = np.sum((s.query[1][:, None] + s.key[1]) ** 2, -1)
    covered = seen & (z <= np.log(32))
    np.testing.assert_allclose(found.covered, covered.sum() / seen.sum())
    squares = (estimates / kernel - 1)[covered] ** 2
    np.testing.assert_allclose(found.measured, np.sqrt(squares.mean()))


def test_keys_that_a_row_does_not_see_have_no_part():
    # The exponents of a key of 0 exceed those of a long one by 1800.
    query, key = np.full((1, 2, 4), 0.01), np.full((1, 2, 4), 30.0)
    key[:, 1] = 0
    value = np.array([[[1.0], [3.0]]])
    feature_map = feature_maps.FavorPlus(16, seed=0)
    feature_map.build((None, None, 1, 4))
    (found,) = errors.head_errors(feature_map, [Sequence(query, key, value, True)])
    first = 1 / (1 + np.exp(-1.2))  # what softmax gives the first key in the second row
    # The features give the second key all of it.
    expected = 2 * first / np.hypot(1, first + 3 * (1 - first))
    np.testing.assert_allclose(found.output, expected)
    distance = np.sqrt(2) * first / np.sqrt(1 + first**2 + (1 - first) ** 2)
    np.testing.assert_allclose(found.attention, distance)


CASES = {name: (name, {"num_features": 64}) for name in h.names(kernel="softmax")}
CASES |= {
    # Orthogonal vectors are in blocks of 4: 2 and a half of them.
    "part of a block": ("favorplus", {"num_features": 10}),
    "gaussian": ("favorplus", {"num_features": 64, "projection": "gaussian"}),
    "dense": ("favorpp_dense", {"num_features": 64, "projection": "gaussian"}),
}
CASES["complex_exponential"][1]["projection"] = "gaussian"


@pytest.mark.parametrize("label", each_map(CASES))
def test_prediction_and_measurement_agree(label):
    name, arguments = CASES[label]
    if not states_moment(name):
        pytest.skip(f"{name} states no second moment")
    # Heads draw independent vectors: so many estimates of one sequence, of lengths
    # at which their squares have no long tail.
    heads = case(name).heads
    s = Sequence(
        *(0.7 * np.repeat(x[:1], heads, 0) for x in sequence(rows=40)[:3]), False
    )
    feature_map = feature_maps.get(name, seed=0, **arguments)
    feature_map.build((None, None, heads, 4))
    if feature_map.is_adaptive and case(name).suits_noise:
        feature_map.adapt([(s.query, s.key)])
    found = errors.head_errors(feature_map, [s])
    mean = errors.HeadErrors.mean(found)
    assert 0.3 < mean.covered <= 1 and 0.02 < mean.predicted < 0.7
    squares = np.array([(e.measured / e.predicted) ** 2 for e in found])
    error = squares.std(ddof=1) / np.sqrt(len(squares))
    assert 5 * error < 0.8
    assert abs(squares.mean() - 1) < 5 * error
    # In short, within a fifth.
    assert abs(mean.measured / mean.predicted - 1) < 0.2


def test_orthogonal_vectors_are_predicted_as_such():
    s = sequence(rows=40)
    predicted = []
    for projection in ("gaussian", "orthogonal"):
        feature_map = papers.Favor(64, projection=projection, seed=0)
        feature_map.build((None, None, 2, 4))
        predicted.append(errors.head_errors(feature_map, [s])[0].predicted)
    assert 0.05 < predicted[1] < 0.8 * predicted[0]


def states_moment(name):
    feature_map = feature_maps.get(name, seed=5, **h.small(name))
    feature_map.build((None, None, 2, 4))
    return feature_map.log_moment(0) is not None


def test_most_estimators_state_their_second_moment():
    assert sum(states_moment(name) for name in h.NAMES) >= 10


def test_a_subclass_inherits_its_prediction_or_overrides_it():
    class Own(feature_maps.FavorPlus):
        pass

    class Silent(feature_maps.FavorPlus):
        def log_moment(self, head=0):
            return None

    x, y = sequence().query, sequence().key
    found = []
    for cls in (feature_maps.FavorPlus, Own, Silent):
        feature_map = cls(8, seed=0)
        feature_map.build((None, None, 2, 4))
        predict = errors.predicted_variance(feature_map, 0)
        found.append(predict if predict is None else predict(x, y))
    h.assert_same(found[1], found[0])
    assert found[2] is None


def test_means_are_over_covered_pairs():
    def row(covered, measured):
        return errors.HeadErrors(0.5, covered, measured, 0.2, 1, 1, 1, 0)

    mean = errors.HeadErrors.mean([row(0.1, 0.3), row(0.3, 0.1), row(0.0, np.nan)])
    np.testing.assert_allclose(mean.covered, 0.4 / 3)
    expected = np.sqrt((0.1 * 0.3**2 + 0.3 * 0.1**2) / 0.4)
    np.testing.assert_allclose(mean.measured, expected)
    assert np.isnan(errors.HeadErrors.mean([row(0.0, np.nan)]).measured)


def test_report():
    linear = model("favorpp", num_features=64)
    report = keras_rfattn.diagnostics.approximation_report(linear, batches())
    assert len(report.heads) == 4 and len(report.layers()) == 2
    text = str(report)
    for word in ("first", "second", "favorpp", "mean of V", "negative"):
        assert word in text
    assert "is too small" in text.splitlines()[-1] and "unknown" not in text
    covered = f"over the {report.mean.covered:.1%} covered pairs"
    assert covered in text and 0.05 < report.mean.covered < 1
    assert 0 < report.mean.output < report.mean.mean_of_values
    wide = model("favorpp", num_features=4096)
    wide = diagnostics.approximation_report(wide, batches())
    assert wide.mean.output < report.mean.output / 3


def test_a_width_too_small_is_called_so():
    report = diagnostics.approximation_report(
        model("favorplus", num_features=2), batches(30.0)
    )
    assert report.mean.covered == 0 and np.isnan(report.mean.predicted)
    assert "num_features too small" in str(report).splitlines()[2]
    unknown = diagnostics.approximation_report(model("hybrid_angular"), batches())
    assert "unknown" in str(unknown)


def test_bad_input():
    with pytest.raises(ValueError, match="Call `replace_attention` first"):
        diagnostics.approximation_report(model(), batches())
    with pytest.raises(TypeError, match="`model` must be a Keras model"):
        diagnostics.approximation_report(3, batches())
    polynomial = keras_rfattn.replace_attention(model(), "polysketch", num_features=4)
    with pytest.raises(ValueError, match="'polysketch', which belongs to polynomial"):
        diagnostics.approximation_report(polynomial, batches())


def test_layers_are_recorded_in_the_order_of_their_calls():
    keras_hub = pytest.importorskip("keras_hub")
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=9, num_layers=3, num_heads=1, hidden_dim=8, intermediate_dim=8,
        max_sequence_length=4,
    )  # fmt: skip
    keras_rfattn.replace_attention(backbone, "favorplus", num_features=4, seed=0)
    ids = np.ones((1, 4), "int32")
    batch = {"token_ids": ids, "padding_mask": ids}
    numbers = [path.split("layer_")[1][0] for path, *_ in record(backbone, [batch])]
    assert numbers == ["0", "1", "2"]
