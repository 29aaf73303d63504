"""Saves replaced models: containers get a class whose config describes the attention.

A container is a layer or model that holds attention layers. If it builds them from
hyperparameters, its config alone would load as softmax. Replacement therefore changes
the class of such a container to a subclass, its carrier. The config of a carrier has
an entry "attention", from which `from_config` restores the linear attention.
"""

import contextlib
import functools
import importlib.util

import keras
from keras.src.models.functional import Functional

import keras_rfattn.models.adapters.known as known
import keras_rfattn.models.loading  # noqa: F401  (wraps Keras' loaders)
import keras_rfattn.models.swap as swap
from keras_rfattn import feature_maps
from keras_rfattn.layers.linear_attention import LinearAttention
from keras_rfattn.models.entry import attention_config, check_entry
from keras_rfattn.models.holders import check_optimizers, holders, refresh
from keras_rfattn.models.notes import notes_of
from keras_rfattn.models.positions import Sized
from keras_rfattn.models.survey import block_mixin, survey
from keras_rfattn.ops.options import Options

PACKAGE = "keras_rfattn"
# Registered name under which carriers are saved. The "attention" entry holds the name
# of the original class, from which loading finds the carrier.
GENERIC = "Carrier"

# Original class of a container -> its carrier.
CARRIERS = {}
# Callables `(model, holders)` that library adapters add. They update what belongs to
# the models that hold changed layers, such as preprocessors.
COMPANION_HOOKS = []


class Carrier(Sized):
    """Mixin for containers with linear attention inside."""

    original_class = None

    def get_config(self):
        # The entry comes first: without keras_rfattn, Keras' error quotes the config,
        # which then begins with the advice to import it.
        return {"attention": attention_config(self), **super().get_config()}

    @classmethod
    def from_config(cls, config, custom_objects=None):
        config = dict(config)
        entry = config.pop("attention", None)
        check_entry(entry, cls.__name__)
        base = cls.original_class or _registered_original(entry)
        instance = base.from_config(config)
        if instance.built:
            apply_config(instance, entry)
        else:
            instance.__class__ = carrier_class(type(instance))
            notes_of(instance).pending_attention = entry
            _when_built(instance, instance._apply_pending)
        return instance

    def build_from_config(self, config):
        super().build_from_config(config)
        # Keras builds a model without its own `build` by running it, so the hook of
        # `_when_built` may not have run.
        self._apply_pending()

    def _apply_pending(self):
        notes = notes_of(self)
        entry, notes.pending_attention = notes.pending_attention, None
        if entry is not None:
            apply_config(self, entry)

    def __reduce__(self):
        _, arguments = super().__reduce__()
        return unpickle, arguments


def unpickle(bytesio):
    """Unpickles a container whose class cannot be imported by name.

    Args:
        bytesio: The model as Keras' `KerasSaveable` pickles it.
    """
    return keras.layers.Layer._unpickle_model(bytesio)


def _registered_original(entry):
    """Returns the original class of a saved carrier, through Keras' own lookup."""
    described = {**entry["class"], "config": {}}
    library = str(described.get("module")).partition(".")[0]
    if library in known.INSTALL and importlib.util.find_spec(library) is None:
        raise ImportError(
            f"The model is a {described.get('class_name')} of {library}, which is not "
            f"installed. Install it with `pip install {known.INSTALL[library]}`."
        )
    from keras.src.saving import serialization_lib

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


def carrier_class(base, name=None, members=None):
    """Returns the carrier of a container class, which is created once and registered.

    Args:
        base: The container's class.
        name: Additional registered name, for classes that other code looks up by class
            (KerasHub's backbones and tasks), or `None`. All carriers are saved under
            the generic name.
        members: Dict of further class attributes, or `None`.

    Returns:
        A subclass of `base` with the same name.
    """
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
    cls = type(base.__name__, bases, body)
    if name is not None:
        keras.saving.register_keras_serializable(PACKAGE, name)(cls)
    _save_as_generic(cls)
    CARRIERS[base] = cls
    return cls


def _save_as_generic(cls):
    """Makes Keras save a class under the generic name, which needs no other library."""
    generic = keras.saving.get_registered_object(f"{PACKAGE}>{GENERIC}")
    keras.saving.register_keras_serializable(PACKAGE, GENERIC)(cls)
    # The name must still lead to the generic class. Only the other direction, from
    # `cls` to the name, is to stay.
    keras.saving.register_keras_serializable(PACKAGE, GENERIC)(generic)


@contextlib.contextmanager
def saved_by_name(classes):
    """Context manager that saves carriers under their own names.

    Code that looks classes up by these names, such as `from_preset`, then finds them.

    Args:
        classes: Carriers that `carrier_class` made with a name.
    """
    for cls in classes:
        keras.saving.register_keras_serializable(PACKAGE, cls.__name__)(cls)
    try:
        yield
    finally:
        for cls in classes:
            _save_as_generic(cls)


# Their configs contain the layers inside them.
PLAIN = (keras.Model, keras.Sequential, Functional)


def carry(container):
    """Gives a container its carrier class, unless its config contains its layers."""
    if not isinstance(container, Carrier) and type(container) not in PLAIN:
        container.__class__ = carrier_class(type(container))


def holds_linear(container):
    """Returns whether any attention inside a container is linear."""
    return any(isinstance(x, LinearAttention) for x in container._flatten_layers())


def apply_config(container, entry):
    """Replaces attention in a container that was just rebuilt from its config.

    Args:
        container: The container, with softmax attention.
        entry: Its "attention" entry, as `entry.attention_config` returned it.

    Raises:
        ValueError: If the container has no attention layer at a saved position.
    """
    surveyed = survey(container)
    changes = []
    for layer in entry["layers"]:
        if layer["index"] >= len(surveyed.sites):
            raise ValueError(
                f"{type(container).__name__} was saved with linear attention at "
                f"'{layer['path']}', but this layer no longer exists. Its class has "
                "changed; load the file with the version that saved it."
            )
        site = surveyed.sites[layer["index"]]
        if site.is_linear:
            continue
        feature_map = feature_maps.get(layer["feature_map"])
        options = Options.take(dict(layer))
        site.layer.is_from_config = True
        site.layer.trained = tuple(layer["trained"])
        site.layer.origin = layer.get("origin", "")
        change = (site, feature_map, options)
        if site.layer.built:
            changes.append(change)
        else:
            later = functools.partial(commit, container, surveyed, [change])
            _when_built(site.layer, later)
    commit(container, surveyed, changes)


def commit(model, surveyed, changes):
    """Applies changes that have passed all checks.

    Args:
        model: The model to change.
        surveyed: Its `survey.Survey`.
        changes: List of `(site, feature_map, options)`.

    Raises:
        ValueError: If a model that holds one of the layers has a built optimizer
            without slots for the new weights. Nothing is changed in that case.
    """
    layers = [site.layer for site, _, _ in changes]
    for layer, (_, feature_map, _) in zip(layers, changes, strict=True):
        if not feature_map.built:
            swap.build_map(layer, feature_map)
    check_optimizers(layers, [feature_map for _, feature_map, _ in changes])
    for layer, (_, feature_map, options) in zip(layers, changes, strict=True):
        swap.make_linear(layer, feature_map, options)
    follow(model, surveyed)


def uncarry(layers):
    """Restores the original class of containers that hold no linear attention.

    Args:
        layers: The attention layers that are softmax again.
    """
    for container in holders(layers):
        if isinstance(container, Carrier) and not holds_linear(container):
            container.__class__ = type(container).original_class


def follow(model, surveyed):
    """Updates everything that holds changed layers.

    Containers become carriers if their configs need it, the companion hooks run, and
    compiled functions are discarded.

    Args:
        model: The model that was changed.
        surveyed: Its `survey.Survey`.
    """
    layers = [site.layer for site in surveyed.sites]
    around = holders(layers)
    for container in around:
        if holds_linear(container):
            carry(container)
    for hook in COMPANION_HOOKS:
        hook(model, around)
    for layer in [*around, *layers]:
        refresh(layer)


def _when_built(layer, action):
    """Runs `action` once, right after `layer` has been built."""
    build = layer.build

    @functools.wraps(build)
    def build_and_act(*args, **kwargs):
        layer.build = build
        build(*args, **kwargs)
        action()

    layer.build = build_and_act
