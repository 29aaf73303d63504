"""Finds the attention layers of a model, and whether each can be replaced."""

import re
from dataclasses import dataclass
from typing import Any

import keras

import keras_rfattn.models.adapters.known as known
from keras_rfattn.layers.linear_attention import (
    LinearAttention,
    refusal,
    sliding_window,
)
from keras_rfattn.layers.self_attention import in_graph
from keras_rfattn.models.swap import linear_class, original_class

# Block class -> mixin that builds the mask of the block's attention layer. An adapter
# adds the classes of its library when that library is imported.
BLOCK_MIXINS = {}
LOOKS_LIKE_ATTENTION = re.compile(r"Attention(2d)?$|AttentionWith\w+$")


@dataclass
class Site:
    """One attention layer of a model."""

    path: str  # layer names from the model (excluded) to this layer, joined by `/`
    layer: Any
    parent: Any  # the layer or model that directly holds it
    model: Any  # in which it was found
    index: int  # among all attention layers; seeds and saved configs use it
    reason: str | None = None  # why it cannot be replaced
    causal: bool | None = None  # `None` if each call decides
    # Tokens of the sliding window that makes a softmax layer linear in length already.
    window: int | None = None
    # Whether queries and keys are the same tokens; `None` if no block or graph tells.
    self_attention: bool | None = None

    @property
    def is_linear(self):
        return isinstance(self.layer, LinearAttention)

    @property
    def linear_class(self):
        """The linear class of the layer, or `None` if there is none."""
        return linear_class(original_class(self.layer))


def survey(model, drop_window=False, drop_cap=False):
    """Returns a `Site` for each attention layer of a model, in a stable order."""
    sites, seen = [], {id(model)}

    def visit(layer, path=""):
        for child in layer._flatten_layers(include_self=False, recursive=False):
            if not isinstance(child, keras.layers.Layer) or id(child) in seen:
                continue
            seen.add(id(child))
            name = f"{path}/{child.name}".removeprefix("/")
            if is_attention(child):
                site = Site(name, child, layer, model, len(sites))
                site.causal = _causality(child, layer)
                site.self_attention = _self_attention(child, layer)
                if not site.is_linear:
                    site.reason = unsupported(child, not drop_cap)
                    site.reason = site.reason or _parent_reason(child, layer)
                    if site.linear_class is not None and not drop_window:
                        site.window = sliding_window(child)
                sites.append(site)
            else:
                visit(child, name)

    visit(model)
    return sites


def block_mixin(cls):
    """Returns the mask-building mixin for a block class, or `None`."""
    found = (x for base, x in BLOCK_MIXINS.items() if issubclass(cls, base))
    return next(found, None)


def _causality(layer, parent):
    mixin = block_mixin(original_class(parent))
    if mixin is not None:
        return mixin.is_causal(parent, layer)
    causal = getattr(parent, "use_causal_mask", None)
    if isinstance(causal, bool):
        return causal
    if isinstance(parent, keras.Model) and layer._inbound_nodes:
        flags = {
            bool(node.arguments.kwargs.get("use_causal_mask", False))
            for node in layer._inbound_nodes
        }
        return flags.pop() if len(flags) == 1 else None
    return known.block(original_class(parent)).causal


def _self_attention(layer, parent):
    cls = original_class(parent)
    mixin = block_mixin(cls)
    if mixin is not None:
        return not mixin.is_cross(parent, layer)
    # The blocks of encoders have no other attention.
    return True if known.block(cls).causal is False else in_graph(layer)


def has_prefix(site):
    """Returns whether all tokens see the whole prompt (prefix-LM)."""
    mixin = block_mixin(original_class(site.parent))
    return mixin is not None and mixin.has_prefix


def unsupported(layer, with_cap=True):
    """Returns why a softmax layer cannot be replaced, or `None` if it can."""
    cls = type(layer)
    if linear_class(cls) is not None:
        return refusal(layer, with_cap)
    row = known.ATTENTION.get(cls.__name__, known.NOTHING)
    return row.refused or "no adapter for this class: its computation is unknown"


def is_attention(layer):
    """Returns whether a layer is attention itself, not a container of attention."""
    if isinstance(layer, LinearAttention) or linear_class(type(layer)):
        return True
    name = type(layer).__name__
    if known.ATTENTION.get(name, known.NOTHING).refused:
        return True
    if not LOOKS_LIKE_ATTENTION.search(name):
        return False
    inner = layer._flatten_layers(include_self=False)
    return not any(is_attention(child) for child in inner)


def _parent_reason(layer, parent):
    cls = original_class(parent)
    row, name, mixin = known.block(cls), cls.__name__, block_mixin(cls)
    if row.builds_mask:
        return f"its block ({name}) builds a dense mask {row.builds_mask}"
    takes_dense = known.attention(type(layer)).takes_dense
    if takes_dense and mixin is None and row.causal is None:
        return f"its block ({name}) builds the causal mask, but has no adapter"
    return None if mixin is None else mixin.refusal(parent)


def is_pooling(site):
    """Returns whether a site has only one query, for which softmax is linear."""
    return known.block(original_class(site.parent)).is_pooling
