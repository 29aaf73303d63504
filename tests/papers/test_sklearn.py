import pickle

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.linear_model import RidgeClassifier
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import check_estimator

from keras_rfattn.feature_maps import FavorPP
from keras_rfattn.papers.sklearn import RandomFeatures
from tests.marks import first_on_jax, slow_on_jax

pytestmark = pytest.mark.once


@pytest.mark.parametrize("feature_map", first_on_jax(["favor", "favorpp"]))
def test_scikit_learn_agrees(feature_map):
    results = check_estimator(RandomFeatures(feature_map, random_state=0), on_fail=None)
    failed = [r["check_name"] for r in results if r["status"] == "failed"]
    assert not failed and len(results) > 40


@slow_on_jax
def test_kernel_is_that_of_scikit_learn():
    x = 0.3 * np.random.default_rng(0).normal(size=(30, 4))
    for name in ("favor", "favorplus", "favorpp"):
        made = RandomFeatures(name, gamma=0.7, num_features=20_000, random_state=1)
        features = made.fit_transform(x)
        expected = rbf_kernel(x, gamma=0.7)
        assert np.max(np.abs(features @ features.T - expected)) < 0.1
        assert np.min(expected) < 0.7


def test_classifies_digits_in_a_pipeline():
    digits = load_digits()
    x, y = digits.data / 16, digits.target
    made = make_pipeline(
        RandomFeatures("favor", gamma=0.3, num_features=300, random_state=0),
        RidgeClassifier(alpha=0.1),
    )
    made.fit(x[:1200], y[:1200])
    linear = RidgeClassifier().fit(x[:1200], y[:1200]).score(x[1200:], y[1200:])
    score = made.score(x[1200:], y[1200:])
    assert score > 0.93 and score > linear + 0.02
    again = pickle.loads(pickle.dumps(made))
    np.testing.assert_array_equal(again.predict(x[1200:]), made.predict(x[1200:]))


def test_a_map_given_as_an_object_stays_as_it_is():
    feature_map = FavorPP(8, seed=3)
    made = RandomFeatures(feature_map).fit(np.eye(3))
    assert not feature_map.built and made.layer_.feature_map.is_calibrated


def test_maps_with_two_sides_are_refused():
    with pytest.raises(ValueError, match="KernelFeatures"):
        RandomFeatures("hybrid_angular", num_features=4).fit(np.eye(3))


@pytest.mark.parametrize("gamma", ["scale", "auto"])
def test_gamma_by_the_words_of_scikit_learn(gamma):
    x = np.random.default_rng(0).normal(size=(20, 4)) * 3
    number = 1 / (4 * x.var()) if gamma == "scale" else 1 / 4
    named, given = (
        RandomFeatures(gamma=g, num_features=8, random_state=0).fit_transform(x)
        for g in (gamma, number)
    )
    np.testing.assert_array_equal(named, given)


@pytest.mark.parametrize("gamma", ["wide", 0, -1.0, None, True])
def test_other_gammas_are_refused(gamma):
    with pytest.raises(ValueError, match="`gamma` must be a positive number, 'scale'"):
        RandomFeatures(gamma=gamma).fit(np.ones((3, 2)))
