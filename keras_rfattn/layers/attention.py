"""One call of an attention layer, and the ways to compute its output.

Shapes use B for the batch, T for the number of queries, S for the number of keys, K for
key/value heads, N for query heads (a multiple of K), H for the head dim and V for the
size of values.
"""

import dataclasses
import functools
import math
from typing import Any

import keras
from keras import ops

from keras_rfattn import fused
from keras_rfattn.backend import fits, wide_dtype
from keras_rfattn.layers.not_finite import judge, marked
from keras_rfattn.ops.bidirectional import bidirectional
from keras_rfattn.ops.causal import causal
from keras_rfattn.ops.features import Features
from keras_rfattn.ops.kernel_attention import Softmax, exact_attention, unit
from keras_rfattn.ops.masks import AttentionMask
from keras_rfattn.ops.options import Options
from keras_rfattn.ops.sink_logits import append_ones, append_sinks
from keras_rfattn.ops.windows import Local, local_attention

# Exponent of a feature that is negligible compared to any weight of a window.
NEGLIGIBLE = -1e5
PLAIN = Softmax()


def of_finite_tokens(method):
    """Decorator that hides tokens that are not finite from a method of `Attention`."""

    @functools.wraps(method)
    def output(self):
        call, finite = self.with_finite_tokens()
        return marked(method(call), finite, self.mask)

    return output


@dataclasses.dataclass(frozen=True)
class Attention:
    """One call of an attention layer, with several methods to compute its output."""

    query: Any  # (B, T, N, H), not scaled
    key: Any  # (B, S, K, H), not scaled; hidden keys are 0
    value: Any  # (B, S, K, V); hidden values are 0
    mask: AttentionMask  # without an offset
    scale: float  # factor on q · k
    feature_map: Any  # built for K heads of dim H
    options: Options
    softmax_kernel: Softmax = PLAIN  # of the layer's own softmax attention
    # (N,), a logit per query head whose weight is in the denominator of softmax only.
    # The feature map knows these logits, too.
    sink_logits: Any = None

    @property
    def logit_scale(self):
        """Factor that turns a dot product of `scaled` vectors into a softmax logit."""
        return 1 / (math.sqrt(self.query.shape[-1]) * self.scale)

    def scaled(self):
        """Returns queries and keys, each multiplied by the square root of the scale."""
        side = math.sqrt(self.scale)
        return tuple(x * side for x in self.wide())

    def softmax_terms(self):
        """Returns the queries, keys and kernel of the layer's own softmax attention."""
        query, key = self.scaled()
        query, kernel = query * self.logit_scale, self.softmax_kernel
        if self.sink_logits is not None:
            query, key = append_sinks(query, self.sink_logits), append_ones(key)
            kernel = dataclasses.replace(kernel, has_offset=True)
        return query, key, kernel

    def wide(self):
        """Returns queries and keys in float32 or float64."""
        return tuple(ops.cast(x, wide_dtype(x)) for x in (self.query, self.key))

    @property
    def query_mask(self):
        """Mask of shape `(B, T)`, true for queries that are real tokens, or `None`."""
        mask = self.mask
        if mask.query_mask is None and mask.self_attention:
            return mask.key_mask
        return mask.query_mask

    def replace(self, **changes):
        """Returns a copy with some attributes changed."""
        return dataclasses.replace(self, **changes)

    def with_finite_tokens(self):
        """Returns a copy in which 0 replaces the tokens that are not finite."""
        *tokens, finite = judge(self.query, self.key, self.value)
        call = self.replace(**dict(zip(("query", "key", "value"), tokens, strict=True)))
        return call, finite

    def without_window(self):
        """Returns the same call without a window and sinks: features alone."""
        options = dataclasses.replace(self.options, window=None, sliding=False, sinks=0)
        return self.replace(options=options)

    def features_alone(self):
        """Computes attention to all keys by features, without window and sinks."""
        return self.without_window().linear()

    def prepared(self):
        """Returns `(query, key, bound)`: tokens before scaling, and the bound map."""
        query, key = self.query, self.key
        mask, temperature = self.mask, self.options.temperature
        is_open = mask.self_attention is None and not mask.causal
        if is_open and self.feature_map.measures_sequence:
            name = type(self.feature_map).__name__
            raise ValueError(
                f"{name} needs to know whether queries and keys are the same tokens, "
                "which the arguments of a compiled function do not tell. Received: a "
                "layer whose `self_attention` is `None`, and arguments that are not "
                "the same object. Set `self_attention` of the layer to `True` or "
                "`False`, or call it once outside of the function."
            )
        side = math.sqrt(self.scale)
        if self.feature_map.is_preparing:
            query, key = self.feature_map.prepare(*self.wide())
        if temperature is not None:
            query, key = (unit(ops.cast(x, wide_dtype(x)))[0] for x in (query, key))
            side = temperature**-0.5
        masks, causal = (self.query_mask, mask.key_mask), mask.causal
        causal = causal or not mask.self_attention
        bound = self.feature_map.bind(query, key, side, *masks, causal)
        return query, key, bound

    def local(self, query, key, bound):
        """Returns the `Local` of the options' window, for results of `prepared`."""
        query, key = (bound.side * ops.cast(x, wide_dtype(x)) for x in (query, key))
        options, kernel = self.options, self.feature_map.exact_kernel
        return Local(query, key, kernel, options.window, options.sliding, options.sinks)

    @of_finite_tokens
    def softmax(self):
        """Computes softmax attention, at a cost of O(T · S)."""
        query, key, kernel = self.softmax_terms()
        masks = self.mask.key_mask, self.mask.causal, self.mask.prefix_mask
        return exact_attention(query, key, self.value, kernel, *masks)

    def zero(self):
        """Returns an output of zeros, `(B, T, N, V)`."""
        shape = (*ops.shape(self.query)[:-1], self.value.shape[-1])
        return ops.zeros(shape, dtype=self.value.dtype)

    @of_finite_tokens
    def mean_of_values(self):
        """Computes uniform attention: the mean of the values that a query sees."""
        features = (_one_feature(x, 0.0) for x in self.wide())
        mask, key_mask = self.mask, self.mask.key_mask
        size = self.options.block_size
        if mask.causal:
            prefix = mask.prefix_mask
            return causal(*features, self.value, key_mask, size, prefix_mask=prefix)
        return bidirectional(*features, self.value, key_mask)

    @of_finite_tokens
    def window_alone(self):
        """Computes attention to the window and the sinks only."""
        mask = self.mask
        if self.options.window is None:
            return self.zero()
        local = self.local(*self.prepared())
        features = _one_feature(local.query, 0.0), _one_feature(local.key, NEGLIGIBLE)
        return local_attention(*features, self.value, local, mask.key_mask, mask.causal)

    @of_finite_tokens
    def linear(self):
        """Computes linear attention, by the algorithm for the mask and the options."""
        query, key, bound = self.prepared()
        feature_map, mask, window = self.feature_map, self.mask, self.options.window
        # If products of features equal the kernel, and there are no more keys than
        # features, then the kernel gives the same output at no greater cost.
        is_equal = feature_map.has_exact_features and window is None
        is_short = is_equal and fits(key.shape[1], feature_map.output_dim)
        is_exact, local = feature_map.is_exact or is_short, None
        if is_exact or window is not None:
            local = self.local(query, key, bound)
        if is_exact:
            masks = mask.key_mask, mask.causal, mask.prefix_mask
            kernel = feature_map.exact_kernel
            return exact_attention(*local[:2], self.value, kernel, *masks)
        if window is not None and not (mask.causal or mask.self_attention):
            raise ValueError(
                "A `window` needs self-attention, where queries and keys are the same "
                f"tokens. Received: window={window} in cross-attention. Leave such "
                "layers out (`exclude=`), or set the layer's `self_attention` if the "
                "arguments of the call are copies of the same tokens."
            )
        features = bound.query_features(query), bound.key_features(key)
        return self._by_features(features, local)

    def _by_features(self, features, local):
        """Computes `linear` from features, with a window if there is a `Local`."""
        options, mask, value = self.options, self.mask, self.value
        key_mask, is_causal, prefix = mask.key_mask, mask.causal, mask.prefix_mask
        output = fused.attention(features, value, local, key_mask, is_causal, options)
        if output is not None:
            return output
        # A distribution of `experimental.sequence_parallel` divides the tokens.
        distribution = keras.distribution.distribution()
        divided = getattr(distribution, "linear_attention", None)
        if divided is not None and prefix is None:
            output = divided(self, *features, local, is_causal)
            if output is not None:
                return output
        if local is not None:
            return local_attention(*features, value, local, key_mask, is_causal)
        if is_causal:
            size = options.block_size
            return causal(*features, value, key_mask, size, prefix_mask=prefix)
        return bidirectional(*features, value, key_mask)


def _one_feature(x, log_scale):
    """Returns `Features` of width 1 that equal `exp(log_scale)` for all tokens of x."""
    return Features(None, ops.zeros_like(x[..., :1]) + log_scale)
