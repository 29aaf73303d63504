import pytest

from keras_rfattn import feature_maps, papers
from keras_rfattn.feature_maps import registry

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
    "hrf": "'hybrid_angular' or 'hybrid_gaussian' or 'hybrid_clustered'",
    "crt": "'favorpp' or 'gerf' or 'poisson_positive' or 'geometric_positive'",
}
TYPING_ERRORS = {
    "hegehog": "Did you mean 'hedgehog'?",
    "geometrc": "Did you mean 'geometric'?",
    "polynominal": "Did you mean 'polynomial'?",
    "eluu": "Did you mean 'elu'?",
    "perfomer": "Did you mean 'favorplus'?",
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
    assert message_for(name).endswith(f"Did you mean {CALLED[name]!r}?")


@pytest.mark.parametrize("name", SEVERAL)
def test_the_name_of_several(name):
    assert message_for(name).endswith(f"Did you mean {SEVERAL[name]}?")


@pytest.mark.parametrize("name", TYPING_ERRORS)
def test_a_typing_error(name):
    assert message_for(name).endswith(TYPING_ERRORS[name])


@pytest.mark.parametrize("name", UNKNOWN)
def test_nothing_is_suggested_for_what_is_not_here(name):
    message = message_for(name)
    assert "Did you mean" not in message
    assert "documentation" in message


def test_softmax_is_no_mechanism():
    assert "`exclude`" in message_for("softmax")


def test_aliases_are_plain_and_name_registered_maps():
    for alias, names in registry.ALIASES.items():
        assert registry._plain(alias) == alias
        assert set(names) <= set(feature_maps.list())


def test_a_registered_map_comes_before_an_alias(monkeypatch):
    registered = {**feature_maps.FEATURE_MAPS, "Perf-ormer": papers.Relu}
    monkeypatch.setattr(registry, "FEATURE_MAPS", registered)
    assert message_for("performer").endswith("Did you mean 'Perf-ormer'?")


@pytest.mark.parametrize(
    "wrong, way_out",
    [
        (feature_maps.FavorPlus, "an instance of a subclass of `FeatureMap`"),
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
