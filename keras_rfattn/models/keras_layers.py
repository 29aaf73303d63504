"""Attention classes of Keras, and what any layer found in a model is to surgery.

An adapter table maps a foreign class to the linear class that takes its place.
Libraries add rows when they are imported (`keras_hub.py`).
"""

import re

import keras

from keras_rfattn import feature_maps
from keras_rfattn import layers
from keras_rfattn.layers.attention import LinearAttention
from keras_rfattn.layers.attention import refusal

# Foreign class -> linear class.
LINEAR_CLASSES = {
    keras.layers.MultiHeadAttention: layers.MultiHeadAttention,
    keras.layers.GroupQueryAttention: layers.GroupedQueryAttention,
}

# Foreign block class -> mixin that builds its attention layer's mask.
BLOCK_MIXINS = {}

# What a class computes that linear attention cannot keep, by class name, so that
# no library has to be imported to refuse it.
REFUSED = {
    "AdditiveAttention": "additive scores, not a dot product",
    "Attention": "a single head without projections; use MultiHeadAttention",
    "BloomAttention": "ALiBi position bias",
    "CachedGemma3Attention": "sliding windows and query-key soft cap",
    "CachedGemmaAttention": "own cache layout, and soft cap in Gemma 2",
    "CachedMistralAttention": "sliding window",
    "CachedMixtralAttention": "sliding window",
    "CLIPAttention": "KerasCV's own CLIP; use the KerasHub CLIPBackbone",
    "DFineMultiscaleDeformableAttention": "deformable sampling",
    "DisentangledSelfAttention": "disentangled relative positions (DeBERTa)",
    "FalconAttention": "ALiBi position bias",
    "GptOssAttention": "attention sinks and sliding windows",
    "MultiHeadAttentionWithDownsampling": "downsampled two-way attention (SAM)",
    "MultiHeadAttentionWithRelativePE": "decomposed relative position bias (ViTDet)",
    "SegFormerMultiheadAttention": "spatially reduced keys (SegFormer)",
    "T5GemmaAttention": "soft cap and sliding windows",
    "T5MultiHeadAttention": "relative position bias",
    "TwoStreamRelativeAttention": "relative positions and two streams (XLNet)",
    "VideoSwinWindowAttention": "shifted windows",
    "WindowAttention": "shifted windows with relative position bias (Swin)",
}
LOOKS_LIKE_ATTENTION = re.compile(r"Attention(2d)?$|AttentionWith\w+$")


def original_class(layer):
    """The class a layer had before surgery: its own if it had none."""
    return getattr(type(layer), "original_class", type(layer))


def linear_class(cls):
    """The linear class for an attention class, or `None` if there is none.

    A subclass of a known class qualifies if it leaves the computation alone.
    """
    for base, linear in LINEAR_CLASSES.items():
        if cls is base:
            return linear
    for base in LINEAR_CLASSES:
        names = ("call", "_compute_attention", "_compute_attention_mask")
        if issubclass(cls, base) and all(
            getattr(cls, n) is getattr(base, n) for n in names
        ):
            LINEAR_CLASSES[cls] = make_linear_class(cls, LINEAR_CLASSES[base])
            return LINEAR_CLASSES[cls]
    return None


def make_linear_class(cls, linear=LinearAttention):
    """A class that is `cls` with linear attention, for layers changed in place."""
    bases = (LinearAttention, cls)
    members = {
        "__module__": __name__,
        "__doc__": cls.__doc__,
        "__reduce__": _reduce,
        "original_class": cls,
    }
    if "_kv_shape" in vars(linear):
        members["_kv_shape"] = linear._kv_shape
    # Known classes have a registered drop-in; layers of others are rebuilt by the
    # container that holds them, so that their config need not name this class.
    return type(cls.__name__, bases, members)


def _reduce(layer):
    """How a layer of a class that no import finds is pickled and copied."""
    config = layer.get_config()
    feature_map = config.pop("feature_map")
    options = {name: config.pop(name) for name in layer.options}
    arguments = _plain((config, layer.get_build_config(), feature_map, options))
    return unpickle, (original_class(layer), *arguments, layer.get_weights())


def _plain(x):
    """Without the dicts and lists by which Keras tracks layers: they do not pickle."""
    if isinstance(x, dict):
        return {key: _plain(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return (tuple if isinstance(x, tuple) else list)(_plain(item) for item in x)
    return x


def unpickle(cls, config, build_config, feature_map, options, weights):
    """The layer that `_reduce` took apart."""
    from keras_rfattn.models import replace

    layer = cls.from_config(config)
    layer.build_from_config(build_config)
    feature_map = feature_maps.get(feature_map)
    replace.build_map(layer, feature_map)
    replace.make_linear(layer, feature_map, options)
    layer.set_weights(weights)
    return layer


def unsupported(layer):
    """Why an attention layer cannot be replaced, or `None` if it can be."""
    cls = type(layer)
    if linear_class(cls) is not None:
        return refusal(layer)
    reason = REFUSED.get(cls.__name__)
    return reason or "no adapter for this class: its mathematics is not known"


def is_attention(layer):
    """Whether a layer is attention itself rather than a container of attention."""
    if isinstance(layer, LinearAttention) or linear_class(type(layer)):
        return True
    name = type(layer).__name__
    if name in REFUSED:
        return True
    if not LOOKS_LIKE_ATTENTION.search(name):
        return False
    inner = layer._flatten_layers(include_self=False)
    return not any(is_attention(child) for child in inner)


# The registered drop-ins are what `__class__` becomes; restoring needs the way back.
layers.MultiHeadAttention.original_class = keras.layers.MultiHeadAttention
layers.GroupedQueryAttention.original_class = keras.layers.GroupQueryAttention
