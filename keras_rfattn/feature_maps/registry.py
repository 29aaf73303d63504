"""The registry of feature maps by name.

`get` looks a map up. Layers and functions that replace attention call `resolve`. The
table itself is filled in `keras_rfattn/feature_maps/__init__.py`, and by `register`.
"""

import importlib

import keras

from keras_rfattn.feature_maps.arguments import check_num_features, check_seed
from keras_rfattn.feature_maps.base import FeatureMap
from keras_rfattn.feature_maps.spelling import hint, way_out
from keras_rfattn.projections import PAPERS, known

# Maps each registered name to its class.
FEATURE_MAPS = {}
# The map of `replace_attention` and of the layers if a user names none.
DEFAULT = "favorpp_learned"

# The names that a module adds to the table. It is imported when one is first asked for.
LATER = dict.fromkeys(
    (
        "complex_exponential", "favor", "geometric", "geometric_positive", "gerf",
        "hybrid_angular", "hybrid_clustered", "hybrid_gaussian",
        "hybrid_gaussian_mixture", "poisson", "poisson_positive", "polysketch",
        "polysketch_linear",
    ),
    PAPERS,
)  # fmt: skip


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
        TypeError: If `identifier` is of another type.

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
            found = hint(identifier, list())
            raise ValueError(
                f"`feature_map` must be one of {list()}. "
                f"Received: feature_map={identifier!r}. "
                f"{found or 'The Mechanisms page of the documentation describes them.'}"
            )
        if "num_features" in arguments:
            check_num_features(arguments["num_features"])
        return cls(**arguments)
    found = deserialize(identifier) if isinstance(identifier, dict) else identifier
    if not isinstance(found, FeatureMap):
        raise TypeError(
            f"`feature_map` must be a name ({', '.join(list())}), a `FeatureMap` or "
            f"its config. Received: feature_map={found!r:.200} of type "
            f"{type(found).__name__}.{way_out(found)}"
        )
    if arguments:
        raise ValueError(
            f"{sorted(arguments)} must be set on the feature map itself. Received: "
            f"feature_map={found!r} and {arguments}."
        )
    return found


def class_of(name):
    """Returns the class registered under a name, or `None`."""
    if name in LATER and name not in FEATURE_MAPS:
        importlib.import_module(LATER[name])
    return FEATURE_MAPS.get(name)


def check_identifier(identifier, num_features=None, seed=None):
    """Raises the same errors as `resolve`, without using Keras' global seed."""
    if isinstance(identifier, str):
        check_seed(seed)
        seed = 0
    resolve(identifier, num_features, seed)


def resolve(identifier, num_features=None, seed=None, name=None):
    """Returns the map that a user asked for; used wherever a map is accepted.

    Args:
        identifier: A registered name, a `FeatureMap` or its serialized config.
        num_features: Number of random vectors, for a map given by name.
        seed: Seed of a map given by name. A map or config keeps its own seed.
        name: Layer name of a map given by name. A map or config keeps its own name.

    Returns:
        A `FeatureMap`. If `identifier` is a `FeatureMap`, it is returned unchanged.

    Raises:
        ValueError: If the name is unknown, `seed` is not a non-negative integer, or
            `num_features` is given together with a map or a config.
        TypeError: If `identifier` is of another type.
    """
    if isinstance(identifier, str):
        check_seed(seed)
        return get(identifier, num_features=num_features, seed=seed, name=name)
    return get(identifier, num_features=num_features)


def register(name, cls=None):
    """Adds a feature map to the registry, as a call or as a class decorator.

    Args:
        name: The name by which users select the map.
        cls: A subclass of `FeatureMap`, or `None` to get a decorator. If it is not yet
            registered with `keras.saving.register_keras_serializable`, this function
            registers it as `keras_rfattn>ClassName`.

    Returns:
        The class, or the decorator if `cls` is `None`.

    Raises:
        ValueError: If another class has this name.
        TypeError: If `name` is not a non-empty string, or `cls` is not a subclass of
            `FeatureMap`.

    Examples:
        >>> from keras_rfattn import feature_maps
        >>> @feature_maps.register("sigmoid")
        ... class Sigmoid(feature_maps.Elementwise):
        ...     def log_activation(self, z):
        ...         return keras.ops.log_sigmoid(z)
        >>> type(feature_maps.get("sigmoid")).__name__
        'Sigmoid'
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
    """Returns the registered names, sorted.

    Returns:
        List of strings, each of which `replace_attention` takes as `feature_map`.
    """
    return sorted({*FEATURE_MAPS, *LATER})


def name_of(feature_map):
    """Returns the registered name of a map's class, or the class name if it has none.

    Args:
        feature_map: A `FeatureMap`, built or not.

    Returns:
        A string.
    """
    names = {cls: name for name, cls in FEATURE_MAPS.items()}
    return names.get(type(feature_map), type(feature_map).__name__)


def serialize(feature_map):
    """Converts a `FeatureMap` to a config dict.

    The config holds no build config, because the layer that owns the map builds it.

    Args:
        feature_map: A `FeatureMap`. Its weights are not part of the config.

    Returns:
        A dict of plain Python values, as `keras.saving.serialize_keras_object` returns
        it.

    Raises:
        TypeError: If `feature_map` is not a `FeatureMap`.
    """
    if not isinstance(feature_map, FeatureMap):
        raise TypeError(
            "`feature_map` must be a `FeatureMap`. Received: "
            f"feature_map={feature_map!r:.200} of type {type(feature_map).__name__}."
            f"{way_out(feature_map)} Use `keras_rfattn.feature_maps.get` to create one "
            "from a name."
        )
    config = keras.saving.serialize_keras_object(feature_map)
    config.pop("build_config", None)
    return config


def deserialize(config):
    """Creates a `FeatureMap` from its config dict.

    Args:
        config: A dict that `serialize` returned.

    Returns:
        A `FeatureMap` that is not built.

    Raises:
        TypeError: If `config` is not such a dict.
    """
    is_config = isinstance(config, dict) and isinstance(config.get("class_name"), str)
    if not is_config or not isinstance(config.get("config"), dict):
        raise TypeError(
            "`feature_map` must be a config from `keras_rfattn.feature_maps.serialize` "
            f"if it is a dict. Received: feature_map={config!r:.200}. Use a "
            "`keras_rfattn.models.Plan` to give each layer its own map."
        )
    return keras.saving.deserialize_keras_object(known(config))
