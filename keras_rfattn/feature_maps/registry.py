"""The registry of feature maps by name.

`get` looks a map up. Layers and functions that replace attention call `resolve`. The
table itself is filled in `keras_rfattn/feature_maps/__init__.py`, and by `register`;
`keras_rfattn.papers` adds its maps when a name that is not in the table is asked for.
"""

import difflib
import importlib
import re

import keras

from keras_rfattn.arguments import check_seed, check_sizes
from keras_rfattn.feature_maps.base import FeatureMap
from keras_rfattn.projections import PAPERS, known

# Maps each registered name to its class.
FEATURE_MAPS = {}
# The map of `replace_attention` and of the layers if a user names none.
DEFAULT = "favorpp_learned"

# What papers and other libraries call the maps, in the form of `_plain`. Only errors
# use it: a name that is not registered never selects a map.
ALIASES = {
    alias: names.split()
    for aliases, names in {
        "fourier randomfourier rff rfa trig trigonometric": "favor",
        "performer performers prf positiverandom": "favorplus",
        "oprf optimalpositiverandom": "favorpp",
        "random": "favorplus favorpp",
        "favorsharp derf": "favorpp_dense",
        "crt chefsrandomtables": "favorpp gerf poisson_positive geometric_positive",
        "hrf hybrid hybridrandom": "hybrid_angular hybrid_gaussian hybrid_clustered",
        "poly": "polynomial",
        "polysketchformer": "polysketch polysketch_learned",
        "linear eluplus1 katharopoulos": "elu",
        "generalized performerrelu": "relu",
        "lolcats": "hedgehog",
    }.items()
    for alias in aliases.split()
}
# Words at the end of a name that do not change what it means.
GENERIC = re.compile(r"(attention|transformer|features|kernel|map)+$")
WAY_OUT = (
    "Use an instance of a subclass of `FeatureMap`, or a `keras_rfattn.models.Plan` to "
    "give each layer its own map."
)


def get(identifier, **arguments):
    """Returns the feature map for a name, a map or a config.

    Args:
        identifier: A registered name, a `FeatureMap` or its serialized config.
        **arguments: Constructor arguments of a map given by name. Arguments that are
            `None` keep the map's defaults.

    Returns:
        A `FeatureMap`. If `identifier` is a `FeatureMap`, it is returned unchanged.

    Raises:
        ValueError: If the name is unknown, or `arguments` are given together with a map
            or a config, which already has its own.

    Examples:
        >>> from keras_rfattn import feature_maps
        >>> feature_map = feature_maps.get("favorplus", num_features=32, seed=0)
        >>> type(feature_map).__name__, feature_map.num_features
        ('FavorPlus', 32)
    """
    arguments = {k: v for k, v in arguments.items() if v is not None}
    if isinstance(identifier, str):
        cls = class_of(identifier)
        if cls is None:
            raise ValueError(
                f"`feature_map` must be one of {list()}. Received: "
                f"feature_map={identifier!r}. {hint(identifier)}"
            )
        if "num_features" in arguments:
            check_sizes(num_features=arguments["num_features"])
        return cls(**arguments)
    feature_map = identifier
    if isinstance(identifier, dict):
        feature_map = deserialize(identifier)
    if not isinstance(feature_map, FeatureMap):
        raise TypeError(
            f"`feature_map` must be a name ({', '.join(list())}), a `FeatureMap` or "
            f"its config. Received: feature_map={feature_map!r:.200} of type "
            f"{type(feature_map).__name__}. {WAY_OUT}"
        )
    if arguments:
        raise ValueError(
            f"{sorted(arguments)} must be set on the feature map itself. Received: "
            f"feature_map={feature_map!r} and {arguments}."
        )
    return feature_map


def class_of(name):
    """Returns the class registered under a name, or `None`."""
    if name not in FEATURE_MAPS:
        importlib.import_module(PAPERS)
    return FEATURE_MAPS.get(name)


def resolve(identifier, num_features=None, seed=None, name=None):
    """Returns the map that a user asked for; used wherever a map is accepted."""
    # Like `get`, but a map or a config keeps its own seed and name.
    if isinstance(identifier, str):
        check_seed(seed)
        return get(identifier, num_features=num_features, seed=seed, name=name)
    return get(identifier, num_features=num_features)


def register(name, cls=None):
    """Adds a feature map to the registry; also works as a decorator of the class.

    Args:
        name: The name by which users select the map.
        cls: A subclass of `FeatureMap`, or `None` to get a decorator. If Keras does not
            know it yet, it becomes serializable as `keras_rfattn>ClassName`.

    Raises:
        ValueError: If another class has this name.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"`name` must be a non-empty string. Received: name={name!r}.")
    if cls is None:
        return lambda cls: register(name, cls)
    if not isinstance(cls, type) or not issubclass(cls, FeatureMap):
        raise TypeError(
            f"`cls` must be a subclass of `FeatureMap`. Received: cls={cls!r}."
        )
    other = class_of(name)
    if other not in (None, cls):
        raise ValueError(
            "`name` must not be the name of another map. Received: "
            f"name={name!r}, which is taken by {other.__name__}."
        )
    registered = keras.saving.get_registered_name(cls)
    if keras.saving.get_registered_object(registered) is not cls:
        keras.saving.register_keras_serializable("keras_rfattn")(cls)
    FEATURE_MAPS[name] = cls
    return cls


def list():
    """Returns the registered names, sorted: all that `replace_attention` takes."""
    importlib.import_module(PAPERS)
    return sorted(FEATURE_MAPS)


def name_of(feature_map):
    """Returns the registered name of a map, or its class name if it has none."""
    names = {cls: name for name, cls in FEATURE_MAPS.items()}
    return names.get(type(feature_map), type(feature_map).__name__)


def serialize(feature_map):
    """Returns the config of a `FeatureMap`, a dict of plain Python values."""
    # It holds no build config, because the layer that owns the map builds it.
    if not isinstance(feature_map, FeatureMap):
        raise TypeError(
            "`feature_map` must be a `FeatureMap`. Received: "
            f"feature_map={feature_map!r:.200} of type {type(feature_map).__name__}. "
            "Use `keras_rfattn.feature_maps.get` to create one from a name."
        )
    config = keras.saving.serialize_keras_object(feature_map)
    config.pop("build_config", None)
    return config


def deserialize(config):
    """Returns a `FeatureMap`, not built, from a dict that `serialize` returned."""
    is_config = isinstance(config, dict) and isinstance(config.get("class_name"), str)
    if not is_config or not isinstance(config.get("config"), dict):
        raise TypeError(
            "`feature_map` must be a config from `keras_rfattn.feature_maps.serialize` "
            f"if it is a dict. Received: feature_map={config!r:.200}. {WAY_OUT}"
        )
    return keras.saving.deserialize_keras_object(known(config))


def hint(name):
    """Returns a sentence for errors about an unknown name."""
    plain = _plain(name)
    if plain in ("softmax", "none", "vanilla", "exact"):
        return (
            "Attention that is not replaced stays softmax: name its layers in "
            "`exclude`, or give them `None` in a `Plan`."
        )
    # A registered name comes before an equal alias.
    meanings = ALIASES | {_plain(x): [x] for x in list()}
    for spelling in (plain, GENERIC.sub("", plain)):
        # "eluu" is a misspelled "elu", but "gelu" is another function. With a lower
        # cutoff, "reformer" would count as a misspelled "performer".
        candidates = [x for x in meanings if x[:1] == spelling[:1]]
        for close in difflib.get_close_matches(spelling, candidates, 1, cutoff=0.85):
            return f"Did you mean {' or '.join(map(repr, meanings[close]))}?"
    return "The Mechanisms page of the documentation describes them."


def _plain(name):
    """Returns a name in lower case without punctuation; + and # become words."""
    name = name.lower().replace("++", "pp").replace("+", "plus").replace("#", "sharp")
    name = re.sub(r"plus[\W_]*plus", "pp", name)
    return re.sub(r"[\W_]", "", name).replace("favour", "favor")
