"""Finds the attention layers of a model, and whether each can be replaced."""

import re
from dataclasses import dataclass
from typing import Any

import keras

import keras_rfattn.models.adapters.known as known
import keras_rfattn.models.adapters.mixins as mixins
from keras_rfattn.layers.linear_attention import (
    LinearAttention,
    refusal,
    sliding_window,
)
from keras_rfattn.layers.self_attention import in_graph
from keras_rfattn.models.swap import linear_class, original_class

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

    @property
    def block(self):
        """The row of `known` for the block that holds the layer."""
        return known.block(original_class(self.parent))

    @property
    def masks(self):
        """The mixin that builds the block's masks, or `None`."""
        return block_mixin(original_class(self.parent))

    @property
    def has_prefix(self):
        """Whether all tokens see the whole prompt (prefix-LM)."""
        return self.masks is not None and self.masks.has_prefix


def survey(model, drop_window=False, drop_cap=False):
    """Returns a `Site` for each attention layer of a model, in a stable order."""
    sites, seen = [], {id(model)}

    def visit(layer, path=""):
        for child in layer._flatten_layers(include_self=False, recursive=False):
            if not isinstance(child, keras.layers.Layer) or id(child) in seen:
                continue
            seen.add(id(child))
            name = f"{path}/{child.name}".removeprefix("/")
            if not is_attention(child):
                visit(child, name)
                continue
            site = Site(name, child, layer, model, len(sites))
            site.causal, site.self_attention = _causality(site), _self_attention(site)
            if not site.is_linear:
                site.reason = unsupported(child, not drop_cap) or _block_reason(site)
                if site.linear_class is not None and not drop_window:
                    site.window = sliding_window(child)
            sites.append(site)

    visit(model)
    return sites


def block_mixin(cls):
    """Returns the mask-building mixin for a block class, or `None`."""
    name = known.masks(cls)
    return name and getattr(mixins, name)


def _causality(site):
    layer, parent = site.layer, site.parent
    if site.masks is not None:
        return site.masks.is_causal(parent, layer)
    causal = getattr(parent, "use_causal_mask", None)
    if isinstance(causal, bool):
        return causal
    if isinstance(parent, keras.Model) and layer._inbound_nodes:
        calls = [node.arguments.kwargs for node in layer._inbound_nodes]
        flags = {bool(x.get("use_causal_mask", False)) for x in calls}
        return flags.pop() if len(flags) == 1 else None
    return site.block.causal


def _self_attention(site):
    if site.masks is not None:
        return site.layer is mixins.self_attention(site.parent)
    # The blocks of encoders have no other attention.
    return True if site.block.causal is False else in_graph(site.layer)


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


def _block_reason(site):
    """Returns why the masks of a block rule linear attention out, or `None`."""
    if site.masks is not None:
        return site.masks.refusal(site.parent)
    row, name = site.block, original_class(site.parent).__name__
    if row.builds_mask:
        return f"its block ({name}) builds a dense mask {row.builds_mask}"
    if known.attention(type(site.layer)).takes_dense and row.causal is None:
        return f"its block ({name}) builds the causal mask, but has no adapter"
    return None
