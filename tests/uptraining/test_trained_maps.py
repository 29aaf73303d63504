"""What was trained is never fitted again in silence."""

import keras
import numpy as np
import pytest

import keras_rfattn
from keras_rfattn import feature_maps, papers
from keras_rfattn.feature_maps import fits
from tests import helpers as h
from tests.uptraining import models as m


class OneA(feature_maps.Exponential):
    """A trained map with another fit, and without conditioning."""

    fitted = staticmethod(fits.favorpp)
    trains, is_unbiased = True, False


MAPS = {
    "favorpp_learned": lambda: feature_maps.FavorPPLearned(8, seed=0),
    "one_a": lambda: OneA(8, seed=0),
    "hybrid": lambda: papers.Hybrid(
        [feature_maps.FavorPPLearned(8, seed=0), papers.Favor(8, seed=0)],
        [papers.AngularCoefficient(4, seed=0)],
        seed=0,
    ),
}


def built(name):
    feature_map = MAPS[name]()
    feature_map.build((None, None, 2, 4))
    return feature_map


def sample(seed=0, size=1.0):
    generator = np.random.default_rng(seed)
    return [tuple(size * generator.normal(size=(2, 2, 20, 4)))]


def train(feature_map, by=0.01):
    for weight in feature_map.trainable_variables:
        weight.assign(weight + by)


def values(layer):
    return [np.array(keras.ops.convert_to_numpy(w)) for w in layer.weights]


def assert_unchanged(layer, before):
    for found, expected in zip(values(layer), before, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("is_calibrated", [True, False])
@pytest.mark.parametrize("name", MAPS)
def test_a_trained_map_is_not_adapted(name, is_calibrated):
    feature_map = built(name)
    assert not feature_map.was_trained
    if is_calibrated:
        feature_map.adapt(sample())
        # Measured anew, as nothing was trained.
        feature_map.adapt(sample(1, size=0.5))
        assert not feature_map.was_trained
    train(feature_map)
    assert feature_map.was_trained
    before = values(feature_map)
    with pytest.raises(ValueError, match="that were trained.*replace it again"):
        feature_map.adapt(sample())
    assert_unchanged(feature_map, before)


@pytest.mark.parametrize("name", feature_maps.list())
def test_every_map_of_the_registry_knows(name):
    feature_map = h.case(name) and feature_maps.get(name, seed=3, **h.small(name))
    feature_map.build((None, None, h.KV_HEADS, h.HEAD_DIM))
    can_train = bool(feature_map.trainable_variables)
    assert not feature_map.was_trained
    if isinstance(feature_map, feature_maps.RandomFeatureMap) and can_train:
        feature_map.redraw()
        assert not feature_map.was_trained
    train(feature_map)
    assert feature_map.was_trained == can_train
    assert can_train or name not in ("hedgehog", "favorpp_learned", "polysketch_linear")


@pytest.mark.once
@pytest.mark.parametrize("is_calibrated", [True, False])
def test_weights_that_became_nan_were_trained(is_calibrated):
    feature_map = built("favorpp_learned")
    if is_calibrated:
        feature_map.adapt(sample())
    weight = feature_map.trainable_variables[0]
    weight.assign(weight * float("nan"))
    assert feature_map.was_trained
    with pytest.raises(ValueError, match="that were trained"):
        feature_map.redraw()


@pytest.mark.once
def test_vectors_that_do_not_train_are_redrawn_beside_weights_that_do():
    feature_map = feature_maps.get("polysketch", num_features=4, seed=0)
    feature_map.build((None, None, 2, 4))
    train(feature_map)
    before = values(feature_map)
    feature_map.redraw()
    matrices, draws, *norms = values(feature_map)
    assert feature_map.was_trained and draws == 1 and np.all(matrices != before[0])
    for found, expected in zip(norms, before[2:], strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.once
@pytest.mark.parametrize("name", ["polysketch_linear", "favorpp_learned"])
def test_a_trained_map_is_not_redrawn(name):
    def fresh():
        found = feature_maps.get(name, num_features=4, seed=0)
        found.build((None, None, 2, 4))
        if found.is_adaptive:
            found.adapt(sample())
        found.redraw()
        return found

    feature_map = fresh()
    assert not feature_map.was_trained
    train(feature_map)
    before = values(feature_map)
    with pytest.raises(ValueError, match="`redraw` would replace.*that were trained"):
        feature_map.redraw()
    assert_unchanged(feature_map, before)


@pytest.mark.once
def test_features_of_a_trained_map_are_not_adapted():
    layer = keras_rfattn.papers.KernelFeatures("favorpp_learned", seed=0)
    x = np.random.default_rng(0).normal(size=(30, 4))
    layer.adapt(x)
    train(layer.feature_map)
    with pytest.raises(ValueError, match="that were trained"):
        layer.adapt(x)


def trained(steps=24):
    model = m.linear_model("favorpp_learned", num_features=8)
    return model, m.uptrain(model, steps=steps)


def saved(model, kind, folder):
    """The model after saving and loading."""
    if kind == "keras":
        model.save(folder / "model.keras")
        return keras.models.load_model(folder / "model.keras")
    model.save_weights(folder / "model.weights.h5")
    loaded = m.linear_model("favorpp_learned", num_features=8, seed=1)
    loaded.load_weights(folder / "model.weights.h5")
    return loaded


@pytest.mark.full
@pytest.mark.once
def test_a_second_uptraining_goes_on_from_the_first(tmp_path):
    model, first = trained()
    assert first.after < 0.8 * first.before
    for kind in ("memory", "keras", "weights"):
        again = model if kind == "memory" else saved(model, kind, tmp_path)
        second = m.uptrain(again, steps=2)
        assert second.before == pytest.approx(first.after, rel=1e-3)
        assert second.after < 1.05 * first.after
        assert "trained" in second.stages[0].note
        assert "'attention_0'" in str(second) and "'attention_1'" in str(second)
        if kind == "memory":
            # For the others, as it was.
            model, first = again, second


@pytest.mark.full
@pytest.mark.once
def test_calibrating_what_was_trained_is_refused():
    model = m.linear_model("favorpp_learned", num_features=8)
    keras_rfattn.calibrate(model, [m.tokens(8)], verbose=0)
    keras_rfattn.calibrate(model, [m.tokens(8)], verbose=0)
    model.compile(keras.optimizers.Adam(1e-3), "mse", run_eagerly=True)
    x = m.tokens(8)
    model.fit(x, np.zeros((8, m.TOKENS, m.DIM)), verbose=0, batch_size=8)
    before = values(model)
    with pytest.raises(ValueError, match="attention_0'.*attention_1'.*restore_att"):
        keras_rfattn.calibrate(model, [x], verbose=0)
    report = m.uptrain(model, stages="calibrate")
    assert "trained" in report.stages[0].note
    assert_unchanged(model, before)


@pytest.mark.once
def test_only_the_maps_that_were_not_trained_are_calibrated():
    model = m.linear_model("favorpp_learned", num_features=8)
    first, second = (model.get_layer(f"attention_{i}").feature_map for i in (0, 1))
    train(first)
    before = values(first)
    report = m.uptrain(model, stages="calibrate")
    assert_unchanged(first, before)
    assert second.is_calibrated
    assert "'attention_0'" in report.stages[0].note
    assert "'attention_1'" not in report.stages[0].note


@pytest.mark.once
@pytest.mark.parametrize("name", ["favorpp", "favorpp_dense"])
def test_the_stage_keeps_a_calibration(name):
    model = m.linear_model(name, num_features=8)
    keras_rfattn.calibrate(model, [np.ones((2, m.TOKENS), "int32")], verbose=0)
    feature_map = model.get_layer("attention_0").feature_map
    before = values(feature_map)
    report = m.uptrain(model, stages="calibrate")
    assert_unchanged(feature_map, before)
    assert "calibrated maps were kept: 'attention_0'" in report.stages[0].note


@pytest.mark.full
@pytest.mark.once
def test_merely_calibrated_maps_are_measured_again():
    model = m.linear_model("favorpp", num_features=8)
    keras_rfattn.calibrate(model, [np.ones((2, m.TOKENS), "int32")], verbose=0)
    feature_map = model.get_layer("attention_0").feature_map
    before = h.to_numpy(feature_map.a).copy()
    keras_rfattn.calibrate(model, [m.tokens()], verbose=0)
    assert np.all(h.to_numpy(feature_map.a) != before)
