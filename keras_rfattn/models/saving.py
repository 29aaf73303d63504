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
import keras_rfattn.models.survey as s
import keras_rfattn.models.swap as swap
from keras_rfattn import feature_maps
from keras_rfattn.models.positions import Sized
from keras_rfattn.ops.options import Options

FORMAT = 1
PACKAGE = "keras_rfattn"
# Registered name of containers that are found through their original's name.
GENERIC = "Carrier"

# Softmax class of a container -> its carrier.
CARRIERS = {}
# Callables `(model, survey, restore)` of library adapters: tasks follow their backbone.
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


def check_entry(entry, name):
    """Raises `ValueError` unless `entry` is what `attention_config` makes."""
    if entry is None:
        raise ValueError(
            f"The config of {name} has no entry 'attention', so that its attention "
            "cannot be rebuilt. Save the model again with keras_rfattn."
        )
    if not isinstance(entry, dict) or entry.get("format") != FORMAT:
        received = entry.get("format") if isinstance(entry, dict) else entry
        raise ValueError(
            f"The entry 'attention' in the config of {name} must be a dict of format "
            f"{FORMAT}, which this version of keras_rfattn reads. Received: "
            f"{received!r}. Use the version that saved it, or save the model again."
        )
    layers, described = entry.get("layers"), entry.get("class")
    keys = {"index", "path", "feature_map"}
    if (
        not isinstance(described, dict)
        or not isinstance(layers, list)
        or not all(isinstance(layer, dict) and keys <= set(layer) for layer in layers)
    ):
        raise ValueError(
            f"The entry 'attention' in the config of {name} must have a dict 'class' "
            f"and a list 'layers' of dicts with {sorted(keys)}. Received: {entry!r}. "
            "Save the model again."
        )


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


def attention_config(container):
    """The config entry of a container: the mechanism of every linear layer below."""
    base = swap.original_class(container)
    return {
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
                "path": site.lasting,
                "feature_map": feature_maps.serialize(site.layer.feature_map),
                **site.layer.options.config(),
                "trained": list(site.layer.trained),
            }
            for site in s.survey(container).sites
            if site.is_linear
        ],
    }


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
    """Carries out a checked list of `(site, feature_map, options)`."""
    for site, feature_map, _ in changes:
        swap.build_map(site.layer, feature_map)
    _check_optimizer(model, [feature_map for _, feature_map, _ in changes])
    for site, feature_map, options in changes:
        swap.make_linear(site.layer, feature_map, options)
    for container, indices in found.containers.values():
        if any(found.sites[index].is_linear for index in indices):
            carry(container)
    follow(model, found, restore=False)


def follow(model, found, restore):
    """What shares a changed model's layers, or compiled them, follows."""
    for hook in COMPANION_HOOKS:
        hook(model, found, restore)
    containers = [container for container, _ in found.containers.values()]
    for layer in [model, *containers, *(site.layer for site in found.sites)]:
        swap.refresh(layer)


def _check_optimizer(model, feature_maps_):
    """New trainable weights would have no slot in an optimizer already built."""
    trainable = [w.path for m in feature_maps_ for w in m.trainable_weights]
    optimizer = getattr(model, "optimizer", None)
    if trainable and optimizer is not None and optimizer.built:
        raise ValueError(
            f"The model's optimizer is built and has no slots for the {len(trainable)} "
            f"new trainable weights, such as {trainable[0]!r}. Replace attention "
            "before training, or compile the model with a new optimizer first."
        )


def _when_built(layer, action):
    """Runs `action` once, right after the layer has been built."""
    build = layer.build

    @functools.wraps(build)
    def build_and_act(*args, **kwargs):
        layer.build = build
        build(*args, **kwargs)
        action()

    layer.build = build_and_act
