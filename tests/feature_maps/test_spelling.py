import pytest

from keras_rfattn import feature_maps
from keras_rfattn.feature_maps import spelling

pytestmark = pytest.mark.once

CALLED = {
    "performer": "favorplus",
    "FAVOR+": "favorplus",
    "favor+": "favorplus",
    "favor_plus": "favorplus",
    "FavorPlus": "favorplus",
    " favorplus": "favorplus",
    "FAVOR++": "favorpp",
    "favour++": "favorpp",
    "OPRF": "favorpp",
    "favor++ learned": "favorpp_learned",
    "FAVOR#": "favorpp_dense",
    "FAVOR": "favor",
    "rff": "favor",
    "random Fourier features": "favor",
    "hedge-hog": "hedgehog",
    "Hedgehog attention": "hedgehog",
    "linear": "elu",
    "linear transformer": "elu",
    "elu+1": "elu",
    "ReLU": "relu",
    "poly-sketch": "polysketch",
}
SEVERAL = {
    "polysketchformer": "'polysketch' or 'polysketch_learned'",
    "hrf": "'hybrid_angular', 'hybrid_gaussian' or 'hybrid_clustered'",
    "crt": "'favorpp', 'gerf', 'poisson_positive' or 'geometric_positive'",
}
TYPING_ERRORS = {
    "hegehog": "Did you mean 'hedgehog'?",
    "geometrc": "Did you mean 'geometric'?",
    "polynominal": "Did you mean 'polynomial'?",
    "eluu": "Did you mean 'elu'?",
    "perfomer": "Did you mean 'performer', which is called 'favorplus' here?",
}
UNKNOWN = (
    "", "xyz", "gelu", "silu", "reformer", "linformer", "transformer", "cosformer",
    "mamba", "attention", "former",
)  # fmt: skip


def message_for(name):
    with pytest.raises(ValueError) as error:
        feature_maps.get(name)
    message = str(error.value)
    assert str(feature_maps.list()) in message
    assert f"Received: feature_map={name!r}." in message
    return message


@pytest.mark.parametrize("name", CALLED)
def test_another_spelling_is_told_and_not_taken(name):
    assert f"{name!r} is called {CALLED[name]!r} here." in message_for(name)


@pytest.mark.parametrize("name", SEVERAL)
def test_the_name_of_several(name):
    assert message_for(name).endswith(f"is called {SEVERAL[name]} here.")


@pytest.mark.parametrize("name", TYPING_ERRORS)
def test_a_typing_error(name):
    assert message_for(name).endswith(TYPING_ERRORS[name])


@pytest.mark.parametrize("name", UNKNOWN)
def test_nothing_is_suggested_for_what_is_not_here(name):
    message = message_for(name)
    assert "Did you mean" not in message and "is called" not in message
    assert "documentation" in message


def test_softmax_is_no_mechanism():
    assert "`exclude`" in message_for("softmax")


def test_aliases_are_normalized_and_name_registered_maps():
    for alias, names in spelling.ALIASES.items():
        assert spelling._normalized(alias) == alias
        assert set(names) <= set(feature_maps.list())


def test_a_registered_map_comes_before_an_alias():
    registered = [*feature_maps.list(), "Perf-ormer"]
    assert spelling.hint("performer", registered).endswith("called 'Perf-ormer' here.")


@pytest.mark.parametrize(
    "wrong, way_out",
    [
        (feature_maps.FavorPlus, r"Create an instance: FavorPlus\(\)\."),
        (["favorplus"], "`keras_rfattn.models.Plan`"),
        (("favorplus",), "`keras_rfattn.models.Plan`"),
        (abs, "a subclass of `FeatureMap`"),
        (lambda x: x, "a subclass of `FeatureMap`"),
        (3, "of type int"),
        (None, "of type NoneType"),
        ({}, "Plan"),
        ({"encoder/*": "favorplus"}, "Plan"),
        ({"class_name": "FavorPlus"}, "Plan"),
    ],
)
def test_other_types(wrong, way_out):
    with pytest.raises(TypeError, match=f"`feature_map` must be .*{way_out}"):
        feature_maps.get(wrong)
