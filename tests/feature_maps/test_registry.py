import inspect

import keras
import numpy as np
import pytest

from keras_rfattn import feature_maps, papers
from tests import helpers as h
from tests.feature_maps.cases import case


@pytest.fixture
def registry():
    """The table, put back afterwards."""
    before = dict(feature_maps.FEATURE_MAPS)
    yield feature_maps.FEATURE_MAPS
    feature_maps.FEATURE_MAPS.clear()
    feature_maps.FEATURE_MAPS.update(before)


def test_list_is_sorted():
    assert feature_maps.list() == sorted(feature_maps.FEATURE_MAPS)


@pytest.mark.parametrize("name", h.NAMES)
def test_get_by_name(name):
    feature_map = feature_maps.get(name)
    assert type(feature_map) is feature_maps.FEATURE_MAPS[name]
    assert feature_maps.name_of(feature_map) == name


@pytest.mark.parametrize("head_dim", [8, 32])
@pytest.mark.parametrize(
    "name", ["favor", "favorplus", "favorpp", "favorpp_dense", "favorpp_learned"]
)
def test_the_default_is_twice_the_head_dim(name, head_dim):
    feature_map = feature_maps.get(name, seed=0)
    assert feature_map.num_features is None
    feature_map.build((None, None, 1, head_dim))
    assert feature_map.num_features == 2 * head_dim
    features = feature_map.key_features(np.ones((1, 3, 1, head_dim), "float32"))
    width = (4 if name == "favor" else 2) * head_dim
    assert features.log_scale.shape[-1] == width or features.values.shape[-1] == width
    assert feature_map.output_dim == width
    # A config of the built map has the number, so that another default changes nothing.
    config = feature_maps.serialize(feature_map)
    assert feature_maps.deserialize(config).num_features == 2 * head_dim


def test_which_maps_have_another_default():
    # Hybrids and sketches multiply numbers of features.
    others = {}
    for name in h.NAMES:
        feature_map = feature_maps.get(name, seed=0)
        feature_map.build((None, None, 1, 8))
        if feature_map.num_features not in (None, 16):
            others[name] = feature_map.num_features
    sketches = ("polysketch", "polysketch_learned", "polysketch_linear")
    assert others.items() >= dict.fromkeys(sketches, 32).items()
    assert set(others) <= {*sketches, "hybrid_clustered"}


def test_get_passes_arguments_but_those_that_are_none():
    feature_map = feature_maps.get("favor", num_features=8, seed=None)
    assert feature_map.num_features == 8
    assert feature_maps.get("favor", num_features=None).num_features is None
    with pytest.raises(ValueError, match="unknown"):
        feature_maps.get("favor", unknown=1)


@pytest.mark.parametrize("name", h.NAMES)
def test_get_by_object_and_config(name):
    feature_map = feature_maps.get(name, seed=3)
    assert feature_maps.get(feature_map) is feature_map
    again = feature_maps.get(feature_maps.serialize(feature_map))
    assert again is not feature_map
    assert again.get_config() == feature_map.get_config()


def test_arguments_of_an_object_are_its_own():
    feature_map = feature_maps.get("favor", num_features=8)
    for identifier in (feature_map, feature_maps.serialize(feature_map)):
        with pytest.raises(ValueError, match=r"\['num_features'\] must be set on"):
            feature_maps.get(identifier, num_features=16)


@pytest.mark.parametrize("wrong", [3, None, 1.5, papers.Favor, ["favor"]])
def test_wrong_type(wrong):
    with pytest.raises(TypeError, match="`feature_map` must be a name"):
        feature_maps.get(wrong)


def test_config_of_something_else():
    config = keras.saving.serialize_keras_object(keras.layers.Dense(2))
    with pytest.raises(TypeError, match="`feature_map` must be a name"):
        feature_maps.get(config)


def test_register_as_a_call(registry):
    class Called(papers.Elu):
        pass

    assert feature_maps.register("called", Called) is Called
    assert "called" in feature_maps.list()
    assert type(feature_maps.get("called")) is Called
    again = feature_maps.get(feature_maps.serialize(feature_maps.get("called")))
    assert type(again) is Called
    # Once more, as when a module is run twice, does no harm.
    feature_maps.register("called", Called)


def test_register_as_a_decorator(registry):
    @feature_maps.register("decorated")
    class Decorated(feature_maps.FavorPlus):
        pass

    assert type(feature_maps.get("decorated", num_features=4)) is Decorated
    assert feature_maps.name_of(feature_maps.get("decorated")) == "decorated"


def test_register_keeps_a_registration_of_ones_own(registry):
    @keras.saving.register_keras_serializable("mine")
    class Registered(papers.Elu):
        pass

    feature_maps.register("registered", Registered)
    assert keras.saving.get_registered_name(Registered) == "mine>Registered"


def test_register_refuses(registry):
    class Other(papers.Elu):
        pass

    with pytest.raises(ValueError, match="name='favor', which is taken by Favor"):
        feature_maps.register("favor", Other)
    for wrong in (keras.layers.Dense, feature_maps.get("elu"), "elu"):
        with pytest.raises(TypeError, match="`cls` must be a subclass"):
            feature_maps.register("wrong", wrong)
    assert feature_maps.FEATURE_MAPS["favor"] is papers.Favor
    assert "wrong" not in feature_maps.list()


def test_name_of_a_stranger():
    class Stranger(papers.Elu):
        pass

    assert feature_maps.name_of(Stranger()) == "Stranger"


def takes_projection(cls):
    """Whether a map hands a projection on to parts of its own."""
    parameter = inspect.signature(cls).parameters.get("projection")
    return parameter is not None and parameter.default is not None


@pytest.mark.parametrize("name", h.EACH_MAP)
def test_config_round_trip_keeps_the_numbers(name):
    # Nothing at its default.
    cls = feature_maps.FEATURE_MAPS[name]
    arguments = {"seed": 11, **case(name).config}
    if h.has_num_features(name):
        arguments["num_features"] = 10
    if issubclass(cls, feature_maps.ProjectedFeatureMap) or takes_projection(cls):
        arguments["projection"] = "gaussian"
    feature_map = feature_maps.get(name, **arguments)
    again = feature_maps.deserialize(feature_maps.serialize(feature_map))
    config = feature_map.get_config()
    assert again.get_config() == config
    init = feature_map.get_config()
    for argument, value in arguments.items():
        if argument != "projection":
            assert init[argument] == value
    x = h.problem(length=3).key
    for one in (feature_map, again):
        one.build((None, None, *x.shape[2:]))
    expected, actual = (
        h.one_program(lambda x, one=one: one.key_features(x).dense().log_scale)(
            keras.ops.convert_to_tensor(x)
        )
        for one in (feature_map, again)
    )
    h.assert_same(actual, expected)


def test_a_layer_may_be_frozen_or_named_by_config():
    feature_map = feature_maps.get("favorpp", name="m", trainable=False)
    again = feature_maps.get(feature_maps.serialize(feature_map))
    assert again.name == "m" and again.trainable is False


@pytest.mark.parametrize("wrong", [0, -1, True, False, 2.0, "8", np.float32(3)])
def test_num_features_must_be_a_positive_integer(wrong):
    for name in h.NAMES:
        with pytest.raises(ValueError, match="`num_features` must be"):
            feature_maps.get(name, num_features=wrong)
    with pytest.raises(ValueError, match="`num_features` must be a positive integer"):
        papers.Relu(num_features=wrong)


def test_maps_without_vectors_take_none():
    with pytest.raises(ValueError, match="must be `None` for Elu.*num_features=8"):
        feature_maps.get("elu", num_features=8)
    with pytest.raises(ValueError, match="projection"):
        feature_maps.get("elu", projection="gaussian")
    with pytest.raises(ValueError, match="`projection` must be one of"):
        papers.Relu(projection=None)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="`projection` must be one of"):
        feature_maps.get("favor", projection="orthogonl")
