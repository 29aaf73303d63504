"""KerasHub (and KerasNLP, which is the same package under its old name).

Imported by `keras_rfattn.models.import_hook` once `keras_hub` is.
"""

import gc
import importlib

import keras
import keras_hub

import keras_rfattn.models.adapters.known as known
import keras_rfattn.models.generation as generation
import keras_rfattn.models.saving as saving
import keras_rfattn.models.seq2seq as seq2seq
import keras_rfattn.models.survey as survey
import keras_rfattn.models.swap as swap
from keras_rfattn.layers.linear_attention import LinearAttention
from keras_rfattn.ops.masks import AttentionMask
from keras_rfattn.ops.masks import interpret_mask

Backbone, Task = keras_hub.models.Backbone, keras_hub.models.Task


# What decoder blocks call their self-attention, and the cache that is handed to it.
SELF_ATTENTION = ("_self_attention_layer", "attention", "self_attn")
CACHES = ("self_attention_cache", "attention_cache")


def self_attention(block):
    """The self-attention layer of a decoder block."""
    return next(getattr(block, x) for x in SELF_ATTENTION if hasattr(block, x))


class DecoderMasks:
    """Mixin of decoder blocks: causality as a fact instead of a dense mask."""

    @staticmethod
    def is_causal(block, layer):
        """Whether `layer` of `block` is causal self-attention."""
        return layer is self_attention(block)

    @staticmethod
    def is_cross(block, layer):
        """Whether `layer` of `block` attends to the encoder's tokens."""
        return not DecoderMasks.is_causal(block, layer)

    def _compute_self_attention_mask(
        self,
        decoder_sequence,
        decoder_padding_mask,
        decoder_attention_mask,
        **others,
    ):
        if not isinstance(self_attention(self), LinearAttention):
            return super()._compute_self_attention_mask(
                decoder_sequence=decoder_sequence,
                decoder_padding_mask=decoder_padding_mask,
                decoder_attention_mask=decoder_attention_mask,
                **others,
            )
        length, causal = decoder_sequence.shape[1], others.get("use_causal_mask", True)
        mask = interpret_mask(decoder_attention_mask, length, length)
        padding = decoder_padding_mask
        if padding is None:
            padding = getattr(decoder_sequence, "_keras_mask", None)
        name = next(x for x in CACHES if x in others)
        if others[name] is not None:
            offset = others[f"{name}_update_index"]
            return mask.replace(causal=causal, offset=0 if offset is None else offset)
        if padding is not None:
            padding = keras.ops.cast(padding, "bool")
            known = mask.key_mask
            mask = mask.replace(key_mask=padding if known is None else known & padding)
        return mask.replace(causal=mask.causal or causal, self_attention=True)


class SparseDecoderMasks(DecoderMasks):
    """Mixin of blocks that hand the mask to their experts too, which count rows."""

    def _compute_self_attention_mask(self, decoder_sequence, **others):
        mask = super()._compute_self_attention_mask(decoder_sequence, **others)
        if not isinstance(mask, AttentionMask):
            return mask
        object.__setattr__(self_attention(self), "mask", mask)
        # Of a dense mask they ask whether a row sees any key.
        rows = keras.ops.ones_like(decoder_sequence[..., :1], dtype="bool")
        if mask.key_mask is not None:
            seen = keras.ops.cumsum(keras.ops.cast(mask.key_mask, "int32"), axis=1) > 0
            rows = rows & seen[..., None]
        return rows


# By the table's names.
MASKS = {"DecoderMasks": DecoderMasks, "SparseDecoderMasks": SparseDecoderMasks}


class CachedAttention(LinearAttention):
    """Mixin of KerasHub's attention classes."""

    def _compute_vllm_attention(self, *args, **kwargs):
        raise ValueError(
            f"{type(self).__name__} is linear attention; KerasHub's vLLM route would "
            "run softmax attention in its place. Serve the model without vLLM, or "
            "call `restore_attention` first."
        )


class RotaryAttention(CachedAttention):
    """Mixin of decoders' attention with rotary embeddings and grouped heads."""

    def _kv_shape(self):
        names = ("num_key_value_heads", "_num_key_value_heads", "num_heads")
        heads = next(getattr(self, x) for x in names if hasattr(self, x))
        # The head dim has many names, and its square root one.
        return heads, round(self._inv_norm_factor**-2)

    def _compute_attention(self, *args, **kwargs):
        output, _ = super()._compute_attention(*args, **kwargs)
        return output


# By the table's names.
MIXINS = {"CachedAttention": CachedAttention, "RotaryAttention": RotaryAttention}


def classes(table):
    """`(class, row)` of the rows of a table that KerasHub has to be asked for."""
    for name, row in table.items():
        if row.package == known.HUB and row.module is not None:
            yield getattr(importlib.import_module(row.module), name), row


def companion_class(cls, backbone_cls):
    """A tokenizer's or preprocessor's class for the carrier of its backbone."""
    key = (cls, backbone_cls)
    if key not in _companion_classes:
        body = {
            "__module__": __name__,
            "__doc__": cls.__doc__,
            "original_class": cls,
            "backbone_cls": backbone_cls,
        }
        made = type(cls.__name__, (cls,), body)
        keras.saving.register_keras_serializable("keras_rfattn")(made)
        _companion_classes[key] = made
    return _companion_classes[key]


_companion_classes = {}


def _save_to_preset(self, preset_dir, *args, **kwargs):
    """Saves under names by which `from_preset` finds classes."""
    models = [self, getattr(self, "backbone", None)]
    names = {type(x) for x in models if isinstance(x, saving.Carrier)}
    original = type(self).original_class.save_to_preset
    with saving.saved_by_name(names):
        return original(self, preset_dir, *args, **kwargs)


def model_carrier(cls):
    """The carrier of a backbone or task class, registered under its own name."""
    if cls in saving.CARRIERS:
        return saving.CARRIERS[cls]
    members = {"save_to_preset": _save_to_preset}
    members |= generation.members(cls) | seq2seq.members(cls)
    if issubclass(cls, Task) and cls.backbone_cls is not None:
        members["backbone_cls"] = model_carrier(cls.backbone_cls)
    return saving.carrier_class(cls, name=cls.__name__, members=members)


def register_all():
    """Registers the carriers of every backbone, task, tokenizer and preprocessor.

    `from_preset` looks classes up by their registered name before anything else is
    known, so that all must be there beforehand.
    """
    known = [
        cls
        for cls in set(keras.saving.get_custom_objects().values())
        if isinstance(cls, type) and not hasattr(cls, "original_class")
    ]
    for cls in known:
        if issubclass(cls, (Backbone, Task)) and cls not in (Backbone, Task):
            model_carrier(cls)
    for cls in known:
        backbone_cls = getattr(cls, "backbone_cls", None)
        if backbone_cls is None or issubclass(cls, (Backbone, Task)):
            continue
        if issubclass(cls, keras.layers.Layer):
            companion_class(cls, model_carrier(backbone_cls))


def adjust_companions(model, found, restore):
    """Tasks that share a changed backbone, and their preprocessors, follow it."""
    containers = [c for c, _ in found.containers.values()]
    backbones = {id(c) for c in containers if isinstance(c, Backbone)}
    if not backbones:
        return
    # All objects of the process: KerasHub keeps no reference from a backbone to the
    # tasks around it, and they may be older than this package's import.
    tasks = [
        task
        for task in gc.get_objects()
        # Not isinstance: some objects answer a look at `__class__` with a warning.
        if issubclass(type(task), Task) and id(task.backbone) in backbones
    ]
    for task in tasks:
        if restore:
            if isinstance(task, saving.Carrier):
                task.__class__ = type(task).original_class
        else:
            saving.carry(task)
        if task.preprocessor is not None:
            for layer in task.preprocessor._flatten_layers():
                _adjust_companion(layer, type(task.backbone), restore)
        swap.refresh(task)
    shared = [f"{type(t).__name__} '{t.name}'" for t in tasks if t is not model]
    object.__setattr__(model, "_rfattn_shared_with", () if restore else tuple(shared))


def _adjust_companion(layer, backbone_cls, restore):
    cls = type(layer)
    if restore and cls in _companion_classes.values():
        layer.__class__ = cls.original_class
    elif not restore and getattr(cls, "backbone_cls", None) is getattr(
        backbone_cls, "original_class", None
    ):
        layer.__class__ = companion_class(cls, backbone_cls)


def install():
    """Makes KerasHub's classes known to surgery; called once."""
    for cls, row in classes(known.ATTENTION):
        linear = swap.make_linear_class(cls, mixin=MIXINS[row.mixin])
        keras.saving.register_keras_serializable("keras_rfattn")(linear)
        swap.LINEAR_CLASSES[cls] = linear
    for cls, row in classes(known.BLOCKS):
        survey.BLOCK_MIXINS[cls] = MASKS[row.masks]
    saving.COMPANION_HOOKS.append(adjust_companions)
    register_all()
