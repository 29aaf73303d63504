"""Adapter for KerasHub (and KerasNLP, the same package under its old name).

`keras_rfattn.models.import_hook` imports this module once `keras_hub` is imported.
"""

import contextlib
import functools

import keras
import keras_hub

import keras_rfattn.models.adapters.known as known
import keras_rfattn.models.adapters.mixins as mixins
import keras_rfattn.models.generation as generation
import keras_rfattn.models.prefix_lm as prefix_lm
import keras_rfattn.models.saving as saving
import keras_rfattn.models.seq2seq as seq2seq
import keras_rfattn.models.swap as swap
from keras_rfattn.feature_maps import FeatureMap
from keras_rfattn.layers.checks import title
from keras_rfattn.layers.recording import linear_layers
from keras_rfattn.models.holders import following, holders, refresh
from keras_rfattn.models.positions import check_size

Backbone, Task = keras_hub.models.Backbone, keras_hub.models.Task
# The end of the class names of linear backbones. KerasHub's exporters to other
# libraries look up names, and so refuse a model that they would write as softmax. Keras
# leaves the mark out of the paths in weights files, which are the softmax model's.
MARK = "*"
FAMILIES = (*generation.FAMILIES, prefix_lm.FAMILY, seq2seq.FAMILY)


def subclasses(cls):
    """Yields the subclasses of a class that KerasHub defines."""
    for found in cls.__subclasses__():
        if known.is_of_hub(found):
            yield found
        yield from subclasses(found)


@functools.cache
def companion_class(cls, backbone_cls):
    """Returns the class of a tokenizer or preprocessor for its backbone's carrier."""
    body = {
        "__module__": __name__,
        "__doc__": cls.__doc__,
        "original_class": cls,
        "backbone_cls": backbone_cls,
    }
    made = type(cls.__name__, (cls,), body)
    return keras.saving.register_keras_serializable("keras_rfattn")(made)


def _get_config(self):
    """Returns the config of a backbone, and turns newer tasks around it to carriers."""
    # Keras reads the class of a task after the config of its backbone. `fit` may be
    # saving the task, so that its compiled functions are kept.
    for task in holders([self]):
        if isinstance(task, Task) and not isinstance(task, saving.Carrier):
            saving.carry(task)
            adjust_companions([task])
    return saving.Carrier.get_config(self)


def _get_task_config(self):
    """Returns the config of a task, with attention that its backbone does not hold."""
    if len(linear_layers(self)) > len(linear_layers(self.backbone)):
        return saving.Carrier.get_config(self)
    return type(self).original_class.get_config(self)


def _save_to_preset(self, preset_dir, *args, **kwargs):
    """Saves a preset under the class name by which `from_preset` finds the class."""
    saving.register_by_name(type(self))
    try:
        type(self).original_class.save_to_preset(self, preset_dir, *args, **kwargs)
    finally:
        saving.save_as_generic(type(self))


def _export_to_transformers(self, path):
    """Raises `ValueError`, because it would write a softmax model."""
    raise ValueError(
        "`export_to_transformers` would write a softmax model. Received: "
        f"{title(self)}, whose attention is linear. Call `restore_attention` first, or "
        "save the linear model with `save_to_preset`."
    )


# --- Adapters (LoRA)

# KerasHub identifies a layer by its position among all layers that have weights. Here
# feature maps are left out of that count, so that adapters of a softmax checkpoint load
# into its linear model, and vice versa.


@contextlib.contextmanager
def _without_maps(backbone):
    """Context manager in which a backbone's list of layers omits the feature maps."""
    if "_flatten_layers" in vars(backbone):
        # Already hidden: KerasHub's `load_lora_weights` may call `enable_lora`.
        yield
        return
    flatten = backbone._flatten_layers

    def flatten_without_maps(*args, **kwargs):
        layers = flatten(*args, **kwargs)
        maps = [x for x in layers if isinstance(x, FeatureMap)]
        hidden = {id(x) for m in maps for x in m._flatten_layers()}
        return [x for x in layers if id(x) not in hidden]

    vars(backbone)["_flatten_layers"] = flatten_without_maps
    try:
        yield
    finally:
        del vars(backbone)["_flatten_layers"]


def enable_lora(backbone, rank, target_layer_names=None):
    """Runs `Backbone.enable_lora`, which also freezes the feature maps."""
    with following([backbone]) as around, _without_maps(backbone):
        type(backbone).original_class.enable_lora(backbone, rank, target_layer_names)
    for layer in [backbone, *around]:
        refresh(layer)


def save_lora_weights(backbone, filepath):
    """Runs `Backbone.save_lora_weights`; the file fits the softmax model too."""
    with _without_maps(backbone):
        type(backbone).original_class.save_lora_weights(backbone, filepath)


def load_lora_weights(backbone, filepath):
    """Runs `Backbone.load_lora_weights` on a file from a softmax or a linear model."""
    with _without_maps(backbone):
        type(backbone).original_class.load_lora_weights(backbone, filepath)


LORA = {x.__name__: x for x in (enable_lora, save_lora_weights, load_lora_weights)}

# --- Carriers


def _of_known_size(method):
    """Wraps a method, which then checks the size of its inputs before it begins."""

    @functools.wraps(method)
    def checked(self, *args, **kwargs):
        check_size(self, args, kwargs)
        return method(self, *args, **kwargs)

    return checked


def model_carrier(cls):
    """Returns the carrier of a backbone or task class, registered under its name."""
    if cls in saving.CARRIERS:
        return saving.CARRIERS[cls]
    members, mark = {}, ""
    for family in FAMILIES:
        if family.includes(cls):
            members |= family.members
    if hasattr(cls, "export_to_transformers"):
        members["export_to_transformers"] = _export_to_transformers
    for name in ("fit", "evaluate", "predict", "generate_step"):
        if hasattr(cls, name):
            method = members.get(name, getattr(cls, name))
            members[name] = _of_known_size(method)
    if issubclass(cls, Backbone):
        members |= {"get_config": _get_config, "save_to_preset": _save_to_preset}
        members |= LORA
        mark = MARK
    elif cls.backbone_cls is not None:
        members["get_config"] = _get_task_config
        members["backbone_cls"] = model_carrier(cls.backbone_cls)
    carrier = saving.carrier_class(cls, members, mark)
    saving.register_by_name(carrier)
    if issubclass(cls, Backbone):
        saving.save_as_generic(carrier)
    return carrier


def register_all():
    """Registers the carriers of every backbone, task, tokenizer and preprocessor."""
    for cls in set(keras.saving.get_custom_objects().values()):
        is_class = isinstance(cls, type) and issubclass(cls, keras.layers.Layer)
        if not is_class or cls in (Backbone, Task) or hasattr(cls, "original_class"):
            continue
        if issubclass(cls, (Backbone, Task)):
            model_carrier(cls)
        elif getattr(cls, "backbone_cls", None) is not None:
            companion_class(cls, model_carrier(cls.backbone_cls))


def adjust_companions(holders):
    """Gives tokenizers and preprocessors of tasks the classes that fit the backbone."""
    for task in holders:
        if not isinstance(task, Task) or task.preprocessor is None:
            continue
        backbone_cls = type(task.backbone)
        for layer in task.preprocessor._flatten_layers():
            cls = type(layer)
            if not issubclass(backbone_cls, saving.Carrier):
                layer.__class__ = swap.original_class(layer)
            elif getattr(cls, "backbone_cls", None) is backbone_cls.original_class:
                layer.__class__ = companion_class(cls, backbone_cls)


@functools.cache
def install():
    """Prepares KerasHub's classes for attention replacement, once."""
    for cls in set(subclasses(keras.layers.Layer)):
        name = known.ATTENTION.get(cls.__name__, known.NOTHING).mixin
        if name is not None:
            mixin = getattr(mixins, name)
            swap.LINEAR_CLASSES[cls] = swap.make_linear_class(cls, mixin=mixin)
    saving.COMPANION_HOOKS.append(adjust_companions)
