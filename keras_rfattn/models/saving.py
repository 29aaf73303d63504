"""Saves replaced models: containers get a class whose config describes the attention.

A container is a layer or model that holds attention layers. If it builds them from
hyperparameters, its config alone would load as softmax. Replacement therefore changes
the class of such a container to a subclass, its carrier. The config of a carrier has
an entry "attention", from which `from_config` restores the linear attention.
"""

import importlib.util

import keras
from keras.src.models.functional import Functional
from keras.src.saving import serialization_lib

import keras_rfattn.models.adapters.known as known
import keras_rfattn.models.swap as swap
from keras_rfattn import feature_maps
from keras_rfattn.layers.recording import linear_layers
from keras_rfattn.models.holders import following, holders, refresh
from keras_rfattn.models.positions import check_size
from keras_rfattn.models.survey import block_mixin, survey
from keras_rfattn.ops.options import Options

FORMAT = 1  # of the entry "attention"
PACKAGE = "keras_rfattn"
# Registered name under which carriers are saved. The "attention" entry holds the name
# of the original class, from which loading finds the carrier.
GENERIC = "Carrier"

# Key in a container's `vars`, which Keras does not track, of the entry for layers that
# are not built yet.
PENDING = "_rfattn_pending"

# Original class of a container -> its carrier.
CARRIERS = {}
# Callables that library adapters add. Each gets the holders of changed layers, and
# updates what belongs to them, such as preprocessors.
COMPANION_HOOKS = []


def attention_config(container):
    """Returns the "attention" entry that a container saves in its config."""
    base = swap.original_class(container)
    return {
        # Keras' error for an unknown class quotes the config, and so shows this hint.
        "how_to_load": "import keras_rfattn",
        "format": FORMAT,
        "class": {
            "module": base.__module__,
            "class_name": base.__name__,
            "registered_name": keras.saving.get_registered_name(base),
        },
        "layers": [
            {
                "index": site.index,
                "path": site.path,
                "feature_map": map_config(site.layer),
                **site.layer.options.config(),
                "self_attention": site.layer.self_attention,
            }
            for site in survey(container)
            if site.is_linear
        ],
    }


def map_config(layer):
    """Returns the config of a layer's map, without the freeze of a frozen layer."""
    config = feature_maps.serialize(layer.feature_map)
    if not layer.trainable:
        # Many containers do not save the `trainable` flags of their inner layers.
        # After loading, only the map would still be frozen.
        config["config"]["trainable"] = True
    return config


def check_entry(entry, name):
    """Raises `ValueError` unless an entry is one that `attention_config` returns."""
    is_known = isinstance(entry, dict) and entry.get("format") == FORMAT
    if not is_known or not isinstance(entry.get("layers"), list):
        raise ValueError(
            f"The config of {name} must have an entry 'attention' of format {FORMAT}, "
            f"which this version of keras_rfattn reads. Received: {entry!r:.200}. Use "
            "the version that saved it, or save the model again."
        )


class Carrier:
    """Mixin for containers with linear attention inside."""

    original_class = None

    def __call__(self, *args, **kwargs):
        check_size(self, args, kwargs)
        return super().__call__(*args, **kwargs)

    def get_config(self):
        # The entry comes first: without keras_rfattn, Keras' error quotes the config,
        # which then begins with the advice to import it.
        return {"attention": attention_config(self), **super().get_config()}

    @classmethod
    def from_config(cls, config, custom_objects=None):
        config = dict(config)
        entry = config.pop("attention", None)
        if cls.original_class is None:
            check_entry(entry, cls.__name__)
        base = cls.original_class or _registered_original(entry)
        instance = base.from_config(config)
        if entry is None and linear_layers(instance):
            # A task that became a carrier while it was saved has no entry of its own.
            follow([], [instance])
            return instance
        check_entry(entry, cls.__name__)
        if instance.built:
            apply_config(instance, entry)
        else:
            instance.__class__ = carrier_class(type(instance))
            vars(instance)[PENDING] = entry
            swap.when_built(instance, instance._apply_pending)
        return instance

    def build_from_config(self, config):
        super().build_from_config(config)
        # Keras builds a model without its own `build` by running it, so the hook of
        # `when_built` may not have run.
        self._apply_pending()

    def _apply_pending(self):
        entry = vars(self).pop(PENDING, None)
        if entry is not None:
            apply_config(self, entry)

    __reduce__ = swap.reduce


def _registered_original(entry):
    """Returns the original class of a saved carrier, through Keras' own lookup."""
    described = {**entry["class"], "config": {}}
    library = str(described.get("module")).partition(".")[0]
    if library in known.INSTALL and importlib.util.find_spec(library) is None:
        raise ImportError(
            f"The model is a {described.get('class_name')} of {library}, which is not "
            f"installed. Install it with `pip install {known.INSTALL[library]}`."
        )
    return serialization_lib._retrieve_class_or_fn(
        described["class_name"],
        described["registered_name"],
        described["module"],
        obj_type="class",
        full_config=described,
        custom_objects={},
    )


keras.saving.register_keras_serializable(PACKAGE, GENERIC)(
    type(GENERIC, (Carrier, keras.layers.Layer), {"__module__": __name__})
)


def carrier_class(base, members=None, mark=""):
    """Returns the carrier of a container class, created once and registered."""
    if base in CARRIERS:
        return CARRIERS[base]
    mixin = block_mixin(base)
    bases = (Carrier, base) if mixin is None else (Carrier, mixin, base)
    body = {
        "__module__": __name__,
        "__doc__": base.__doc__,
        "original_class": base,
        **(members or {}),
    }
    cls = CARRIERS[base] = type(f"{base.__name__}{mark}", bases, body)
    save_as_generic(cls)
    return cls


def save_as_generic(cls):
    """Makes Keras save a class under the generic name, which needs no other library."""
    generic = keras.saving.get_registered_object(f"{PACKAGE}>{GENERIC}")
    keras.saving.register_keras_serializable(PACKAGE, GENERIC)(cls)
    # The name must still lead to the generic class. Only the other direction, from
    # `cls` to the name, is to stay.
    keras.saving.register_keras_serializable(PACKAGE, GENERIC)(generic)


def register_by_name(cls):
    """Makes Keras save a carrier under its class's name, and find it by this name."""
    name = cls.original_class.__name__
    keras.saving.register_keras_serializable(PACKAGE, name)(cls)


# Their configs contain the layers inside them.
PLAIN = (keras.Model, keras.Sequential, Functional)


def carry(container):
    """Gives a container its carrier class, unless its config contains its layers."""
    if not isinstance(container, Carrier) and type(container) not in PLAIN:
        container.__class__ = carrier_class(type(container))


def apply_config(container, entry):
    """Replaces attention in a container that was just rebuilt from its config."""
    sites, changes = survey(container), []
    for layer in entry["layers"]:
        if layer["index"] >= len(sites):
            raise ValueError(
                f"{type(container).__name__} was saved with linear attention at "
                f"'{layer['path']}', but this layer no longer exists. Its class has "
                "changed; load the file with the version that saved it."
            )
        site = sites[layer["index"]]
        if site.is_linear:
            continue
        site.layer.is_from_config = True
        site.layer.self_attention = layer.get("self_attention")
        feature_map = feature_maps.get(layer["feature_map"])
        changes.append((site, feature_map, Options.take(dict(layer))))

    def apply(some):
        # Nothing outside of the container holds the layers yet.
        _build_maps(some)
        _make_linear(some)
        follow(sites, holders(layers_of(sites), among=container._flatten_layers()))

    for change in changes:
        layer = change[0].layer
        if not layer.built:
            swap.when_built(layer, lambda change=change: apply([change]))
    apply([change for change in changes if change[0].layer.built])


def commit(sites, changes):
    """Applies changes that have passed all checks."""
    _build_maps(changes)
    training = [site.layer for site, x, _ in changes if trains(site, x)]
    with following(layers_of(sites), training, sites[0].model) as around:
        _make_linear(changes)
        follow(sites, around)


def _build_maps(changes):
    for site, feature_map, _ in changes:
        if not feature_map.built:
            swap.build_map(site.layer, feature_map)


def _make_linear(changes):
    for site, feature_map, options in changes:
        swap.make_linear(site.layer, feature_map, options)
        if site.self_attention is not None:
            site.layer.self_attention = site.self_attention


def revert(sites, linear, partial=()):
    """Makes sites softmax again, and gives others new options: pairs in `partial`."""
    training = [x.layer for x in linear if trains(x, x.layer.feature_map)]
    with following(layers_of(sites), training, sites[0].model) as around:
        for site in linear:
            swap.make_softmax(site.layer)
        for site, options in partial:
            site.layer.options = options
        for container in around:
            if isinstance(container, Carrier) and not linear_layers(container):
                container.__class__ = type(container).original_class
        follow(sites, around)


def layers_of(sites):
    """Returns the attention layers of sites."""
    return [site.layer for site in sites]


def trains(site, feature_map):
    """Returns whether a map has weights that are trained in the layer of a site."""
    return site.layer.trainable and bool(feature_map.trainable_weights)


def follow(sites, around):
    """Updates everything that holds the attention layers of a changed model."""
    for container in around:
        if linear_layers(container):
            carry(container)
    for hook in COMPANION_HOOKS:
        hook(around)
    for layer in [*around, *layers_of(sites)]:
        refresh(layer)
