"""Lets each attention layer use its own state or cache while a model generates.

Linear layers keep recurrent sums; softmax layers keep keys and values.
"""

import contextlib

from keras import ops

import keras_rfattn.models.swap as swap
from keras_rfattn.layers.call_context import context_of
from keras_rfattn.layers.decoding import CACHES
from keras_rfattn.layers.replaced_call import answering
from keras_rfattn.ops.masks import AttentionMask


@contextlib.contextmanager
def carried(sites, layers, decoder, is_hidden=None):
    """Context manager in which attention layers compute from their own caches.

    Args:
        sites: List of `survey.Site`.
        layers: Dict of states and caches by layer number, as in `Cache.layers`.
        decoder: Function from a state (or `None`) to the `Interceptor` of a linear
            layer.
        is_hidden: Function from a number of keys S to booleans `(B, S)`, true for
            padding. `None` if there is no padding.

    Yields:
        `(parts, blank)`. `parts` is a dict from layer number to the object that
        computes the layer's output and holds its new `state`. `blank` is a function
        from `(batch_size, dtype)` to a placeholder for the model's cache, which no
        layer reads.
    """
    parts, longest = {}, 1
    with contextlib.ExitStack() as stack:
        for site in sites:
            layer, state = site.layer, layers.get(f"{site.index}")
            if sums_up(site):
                if layer.recorder is not None:
                    raise ValueError(
                        "`metric` must not generate tokens. Generation always uses the "
                        "features, whose outputs `attribute` and `sensitivity` replace "
                        f"(at {site.path!r}). Use a metric that calls, predicts or "
                        "evaluates, such as the loss of given tokens."
                    )
                part = decoder(state)
                context = context_of(layer).replace(recorder=part)
                stack.enter_context(context.active())
            elif state is not None:
                part, longest = Exact(site, state, is_hidden), state.shape[2]
                stack.enter_context(answering(layer, part.around))
            else:
                continue
            parts[f"{site.index}"] = part

        def blank(batch_size, dtype):
            return ops.zeros((batch_size, len(sites), 2, longest, 1, 1), dtype=dtype)

        yield parts, blank


def kept(parts):
    """Returns the states and caches after a call, in the form of `Cache.layers`."""
    return {i: part.state for i, part in parts.items() if part.state is not None}


class Exact:
    """A layer's `call`, which gets its own keys and values instead of a placeholder.

    It serves softmax layers, and linear layers with exact maps or softmax heads.

    Args:
        site: `survey.Site` of the layer.
        state: Keys and values `(B, 2, S, K, H)`: batch B, length S, K key heads, head
            dim H.
        is_hidden: Function from S to booleans `(B, S)`, true for padding, or `None`.
    """

    def __init__(self, site, state, is_hidden=None):
        self.layer, self.function = site.layer, None
        self.state, self.is_hidden = state, is_hidden
        self.placed = None
        if not site.is_linear:
            linear = swap.linear_class(swap.original_class(site.layer))
            self.placed = getattr(linear, "placed", None)

    def around(self, call):
        """Keeps the layer's `call`, and returns this object to be used in its place."""
        self.function = call
        return self

    def __call__(self, *args, **kwargs):
        name = next((x for x in CACHES if kwargs.get(x) is not None), None)
        if name is None:
            return self.function(*args, **kwargs)
        given = {**kwargs, name: self.state}
        if self.is_hidden is not None:
            visible = ~self.is_hidden(self.state.shape[2])
            given["attention_mask"] = also(kwargs.get("attention_mask"), visible)
        placed = contextlib.nullcontext()
        if self.placed is not None:
            placed = self.placed(self.layer, given)
        with placed:
            output, self.state = self.function(*args, **given)
        return output, kwargs[name]


def also(mask, visible):
    """Returns an attention mask that also hides keys where `visible` is false.

    Args:
        mask: `AttentionMask`, dense array, or `None`.
        visible: Booleans `(B, S)`.
    """
    if isinstance(mask, AttentionMask):
        known = mask.key_mask
        return mask.replace(key_mask=visible if known is None else known & visible)
    visible = visible[:, None]
    return visible if mask is None else ops.cast(mask, "bool") & visible


def sums_up(site):
    """Returns whether a layer keeps only recurrent sums, i.e. no head is exact."""
    if not site.is_linear:
        return False
    return not (site.layer.feature_map.is_exact or site.layer.options.softmax_heads)


def empty_layers(sites, batch_size, max_length):
    """Allocates keys and values for the layers that keep them, as in `Cache.layers`."""
    layers = {}
    for site in sites:
        if not sums_up(site):
            linear = swap.linear_class(swap.original_class(site.layer))
            heads, head_dim = linear._kv_shape(site.layer)
            shape = (batch_size, 2, max_length, heads, head_dim)
            layers[f"{site.index}"] = ops.zeros(shape, dtype=site.layer.compute_dtype)
    return layers
