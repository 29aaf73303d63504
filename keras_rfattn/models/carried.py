"""What each attention layer keeps while a model generates: sums, or keys and values."""

import contextlib

from keras import ops

import keras_rfattn.models.swap as swap
from keras_rfattn.layers.call_context import answered_by
from keras_rfattn.layers.decoding import CACHES
from keras_rfattn.layers.replaced_call import answering
from keras_rfattn.ops.masks import AttentionMask


@contextlib.contextmanager
def carried(sites, layers, decoder, is_hidden=None):
    """Meanwhile, attention layers answer by what they keep.

    Args:
        sites: `survey.Site`s.
        layers: What they keep, as in `Cache`.
        decoder: `state -> recorder` of a linear layer.
        is_hidden: `length -> (B, length)`, which of so many keys are padding.

    Yields:
        `(parts, blank)`: what answers, by number of the layer, with its `state`; and
        `(batch_size, dtype) -> placeholder` of the one cache that nobody reads.
    """
    parts, longest = {}, 1
    with contextlib.ExitStack() as stack:
        for site in sites:
            layer, state = site.layer, layers.get(f"{site.index}")
            if sums_up(site):
                if layer.recorder is not None:
                    raise ValueError(
                        "A model generates by its features alone: it cannot while "
                        "`attribute` or `sensitivity` put other answers in their place "
                        f"(at {site.path!r}). Use a metric that calls, predicts or "
                        "evaluates, such as the loss of given tokens."
                    )
                part = decoder(state)
                stack.enter_context(answered_by(layer, part))
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
    """What layers keep after a call, as in `Cache`."""
    return {i: part.state for i, part in parts.items() if part.state is not None}


class Exact:
    """A layer's `call`, with keys and values of its own for a placeholder.

    That of a softmax layer, or of a map that computes its kernel.
    """

    def __init__(self, site, state, is_hidden=None):
        self.layer, self.function = site.layer, None
        self.state, self.is_hidden = state, is_hidden
        self.placed = None
        if not site.is_linear:
            linear = swap.linear_class(swap.original_class(site.layer))
            self.placed = getattr(linear, "placed", None)

    def around(self, call):
        """This, in place of a layer's `call`."""
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
    """An attention mask that hides keys too where `(B, S)` is false."""
    if isinstance(mask, AttentionMask):
        known = mask.key_mask
        return mask.replace(key_mask=visible if known is None else known & visible)
    visible = visible[:, None]
    return visible if mask is None else ops.cast(mask, "bool") & visible


def sums_up(site):
    """Whether a layer keeps sums alone: none of its heads is exact."""
    if not site.is_linear:
        return False
    return not (site.layer.feature_map.is_exact or site.layer.options.softmax_heads)


def empty_layers(sites, batch_size, max_length):
    """Room for the keys and values of softmax layers, as in `Cache`."""
    layers = {}
    for site in sites:
        if not sums_up(site):
            linear = swap.linear_class(swap.original_class(site.layer))
            heads, head_dim = linear._kv_shape(site.layer)
            shape = (batch_size, 2, max_length, heads, head_dim)
            layers[f"{site.index}"] = ops.zeros(shape, dtype=site.layer.compute_dtype)
    return layers
