"""Lets each attention layer use its own state or cache while a model generates.

Linear layers keep recurrent sums; softmax layers keep keys and values.
"""

import contextlib
from functools import partial

from keras import ops

from keras_rfattn.layers.call_context import context_of
from keras_rfattn.layers.decoding import CACHES, empty_exact
from keras_rfattn.layers.replaced_call import replacing_call
from keras_rfattn.ops.masks import AttentionMask


@contextlib.contextmanager
def carried(task, known, cache, decoder):
    """Context manager in which attention layers compute from their own caches."""
    parts, longest = {}, 1
    with contextlib.ExitStack() as stack:
        for site in known.sites:
            layer, state = site.layer, cache.layers.get(f"{site.index}")
            if sums_up(site):
                if layer.recorder is not None:
                    raise ValueError(
                        "`metric` must not generate tokens. Generation always uses the "
                        "features, whose outputs `attribute` replaces (at "
                        f"{site.path!r}). Use a metric that calls, predicts or "
                        "evaluates, such as the loss of given tokens."
                    )
                part = decoder(state)
                context = context_of(layer).replace(recorder=part)
                stack.enter_context(context.active())
            elif state is not None:
                part, longest = Exact(site, state, known), state.shape[2]
                stack.enter_context(replacing_call(layer, part.around))
            else:
                continue
            parts[f"{site.index}"] = part
        batch = ops.shape(cache.seen)[0]
        yield parts, placeholder(task, known.sites, batch, longest)


def placeholder(task, sites, batch, length=1):
    """Returns an array in place of a task's own cache of keys and values."""
    shape = batch, len(sites), 2, length, 1, 1
    return ops.zeros(shape, dtype=task.compute_dtype)


def kept(parts):
    """Returns the states and caches after a call, in the form of `Cache.layers`."""
    return {i: part.state for i, part in parts.items() if part.state is not None}


class Exact:
    """A layer's `call`, which gets its own keys and values instead of a placeholder."""

    # For softmax layers, and linear ones with exact maps or softmax heads. `state`
    # holds keys and values `(B, 2, S, K, H)`.
    def __init__(self, site, state, known):
        self.layer, self.state, self.known = site.layer, state, known
        self.placed = None
        if not site.is_linear:
            self.placed = getattr(site.linear_class, "placed", None)

    def around(self, call):
        """Returns a function to be used in place of the layer's `call`."""
        return partial(self, call)

    def __call__(self, call, *args, **kwargs):
        name = next((x for x in CACHES if kwargs.get(x) is not None), None)
        if name is None:
            return call(*args, **kwargs)
        # The keys and values in the form of the block's own cache.
        is_pair = isinstance(kwargs[name], tuple)
        cache = (self.state[:, 0], self.state[:, 1]) if is_pair else self.state
        given = {**kwargs, name: cache}
        if self.known.hidden is not None:
            positions = ops.arange(self.state.shape[2], dtype="int32")
            visible = ~self.known.padding(positions, ops.shape(self.state)[0])
            given["attention_mask"] = also(kwargs.get("attention_mask"), visible)
        placed = contextlib.nullcontext()
        if self.placed is not None:
            placed = self.placed(self.layer, given)
        with placed:
            output, cache = call(*args, **given)
        self.state = ops.stack(cache, axis=1) if isinstance(cache, tuple) else cache
        return output, kwargs[name]


def also(mask, visible):
    """Returns a mask that also hides keys where `visible`, `(B, S)`, is false."""
    if isinstance(mask, AttentionMask):
        known = mask.key_mask
        return mask.replace(key_mask=visible if known is None else known & visible)
    visible = visible[:, None]
    return visible if mask is None else ops.cast(mask, "bool") & visible


def sums_up(site):
    """Returns whether a layer keeps a `State`, not the keys and values of its block."""
    if not site.is_linear or site.layer.feature_map.is_exact:
        return False
    return site.causal or not site.layer.options.softmax_heads


def empty_layers(sites, batch_size, max_length):
    """Allocates keys and values for the layers that keep them, as in `Cache.layers`."""
    layers = {}
    for site in sites:
        if sums_up(site):
            room = empty_exact(site.layer, batch_size, max_length)
            layers |= {f"{site.index}": room} if room else {}
        else:
            cache = empty_keys_and_values(site, batch_size, max_length)
            layers[f"{site.index}"] = cache
    return layers


def empty_keys_and_values(site, batch_size, max_length):
    """Allocates keys and values of all heads of a layer, `(B, 2, S, K, H)`."""
    heads, head_dim = site.linear_class._kv_shape(site.layer)
    shape = (batch_size, 2, max_length, heads, head_dim)
    return ops.zeros(shape, dtype=site.layer.compute_dtype)
