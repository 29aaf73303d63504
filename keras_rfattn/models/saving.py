"""Saving: classes whose config carries the attention of the layers inside.

A layer that builds its attention from hyper-parameters would save its config and load
as softmax. Surgery changes the class of such containers to a subclass whose config has
an entry "attention", from which `from_config` puts the mechanism back.
"""

import contextlib
import functools
import importlib.util

import keras

import keras_rfattn.models.adapters.known as known
import keras_rfattn.models.loading  # noqa: F401  (Keras' loaders learn of marks)
import keras_rfattn.models.survey as s
import keras_rfattn.models.swap as swap
from keras_rfattn import feature_maps
from keras_rfattn.layers.linear_attention import LinearAttention
from keras_rfattn.models.entry import attention_config
from keras_rfattn.models.entry import check_entry
from keras_rfattn.models.holders import check_optimizers
from keras_rfattn.models.holders import holders
from keras_rfattn.models.holders import refresh
from keras_rfattn.models.positions import Sized
from keras_rfattn.ops.options import Options

PACKAGE = "keras_rfattn"
# Registered name of containers that are found through their original's name.
GENERIC = "Carrier"

# Softmax class of a container -> its carrier.
CARRIERS = {}
# Callables `(model, holders)`, added by library adapters: what belongs to models that
# hold changed layers, such as preprocessors, follows them.
COMPANION_HOOKS = []


class Carrier(Sized):
    """Mixin of containers with linear attention inside."""

    original_class = None

    def get_config(self):
        # First, so that Keras' error without keras_rfattn begins with what to do.
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
            object.__setattr__(instance, "_pending_attention", entry)
            _when_built(instance, instance._apply_pending)
        return instance

    def build_from_config(self, config):
        super().build_from_config(config)
        # Keras builds a model without a `build` of its own by running it.
        self._apply_pending()

    def _apply_pending(self):
        entry = vars(self).pop("_pending_attention", None)
        if entry is not None:
            apply_config(self, entry)

    def __reduce__(self):
        _, arguments = super().__reduce__()
        return unpickle, arguments


def unpickle(bytesio):
    """A pickled container, whose class no import finds; see `KerasSaveable`."""
    return keras.layers.Layer._unpickle_model(bytesio)


def _registered_original(entry):
    """The class a generic carrier was made from, through Keras' own lookup."""
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
    """The carrier of a container class, made once and registered.

    Args:
        base: The container's class.
        name: Name that leads to it too, for classes that other code looks up by class
            (KerasHub's backbones and tasks). All are saved under the generic name.
        members: Further class attributes.

    Returns:
        A subclass of `base` with the same name.
    """
    if base in CARRIERS:
        return CARRIERS[base]
    mixin = s.block_mixin(base)
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
    """Makes a class be saved under the generic name, which needs no other library."""
    generic = keras.saving.get_registered_object(f"{PACKAGE}>{GENERIC}")
    keras.saving.register_keras_serializable(PACKAGE, GENERIC)(cls)
    # The name leads back to the generic class; only the class keeps the name.
    keras.saving.register_keras_serializable(PACKAGE, GENERIC)(generic)


@contextlib.contextmanager
def saved_by_name(classes):
    """Saves carriers under their own names meanwhile, for who looks them up by those.

    Args:
        classes: Carriers made with a name.
    """
    for cls in classes:
        keras.saving.register_keras_serializable(PACKAGE, cls.__name__)(cls)
    try:
        yield
    finally:
        for cls in classes:
            _save_as_generic(cls)


def needs_carrier(container):
    """Whether a container's config leaves out the layers inside it."""
    plain = (keras.Model, keras.Sequential, type(_functional()))
    return not isinstance(container, Carrier) and type(container) not in plain


@functools.cache
def _functional():
    inputs = keras.Input((1,))
    return keras.Model(inputs, inputs)


def carry(container):
    """Gives a container its carrier class, if its config needs one."""
    if needs_carrier(container):
        container.__class__ = carrier_class(type(container))


def holds_linear(container):
    """Whether some attention below a container is linear."""
    return any(isinstance(x, LinearAttention) for x in container._flatten_layers())


def apply_config(container, entry):
    """Replaces attention in a freshly built container as its config says."""
    found = s.survey(container)
    changes = []
    for layer in entry["layers"]:
        if layer["index"] >= len(found.sites):
            raise ValueError(
                f"{type(container).__name__} was saved with linear attention at "
                f"'{layer['path']}', and has no such layer now. Its class has "
                "changed since; load it with the version that saved it."
            )
        site = found.sites[layer["index"]]
        if site.is_linear:
            continue
        feature_map = feature_maps.get(layer["feature_map"])
        options = Options.take(dict(layer))
        site.layer.is_from_config = True
        site.layer.trained = tuple(layer.get("trained", ()))
        change = (site, feature_map, options)
        if site.layer.built:
            changes.append(change)
        else:
            later = functools.partial(commit, container, found, [change])
            _when_built(site.layer, later)
    commit(container, found, changes)


def commit(model, found, changes):
    """Carries out a checked list of `(site, feature_map, options)`.

    Raises:
        ValueError: If the optimizer of a model that holds one of the layers is built
            and has no slots for the new weights; nothing is changed then.
    """
    layers = [site.layer for site, _, _ in changes]
    for layer, (_, feature_map, _) in zip(layers, changes, strict=True):
        swap.build_map(layer, feature_map)
    check_optimizers(layers, [feature_map for _, feature_map, _ in changes])
    for layer, (_, feature_map, options) in zip(layers, changes, strict=True):
        swap.make_linear(layer, feature_map, options)
    follow(model, found)


def uncarry(layers):
    """Gives containers without linear attention their own class back.

    Args:
        layers: The attention layers that are softmax again.
    """
    for container in holders(layers):
        if isinstance(container, Carrier) and not holds_linear(container):
            container.__class__ = type(container).original_class


def follow(model, found):
    """What holds changed layers is saved with them, and forgets what it compiled.

    Args:
        model: The model that was changed.
        found: Its `survey.Survey`.
    """
    layers = [site.layer for site in found.sites]
    around = holders(layers)
    for container in around:
        if holds_linear(container):
            carry(container)
    for hook in COMPANION_HOOKS:
        hook(model, around)
    for layer in [*around, *layers]:
        refresh(layer)


def _when_built(layer, action):
    """Runs `action` once, right after the layer has been built."""
    build = layer.build

    @functools.wraps(build)
    def build_and_act(*args, **kwargs):
        layer.build = build
        build(*args, **kwargs)
        action()

    layer.build = build_and_act
