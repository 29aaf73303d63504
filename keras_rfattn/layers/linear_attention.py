"""The mixin of all linear attention layers, which replaces softmax by `attend`.

About 25 attention classes of Keras and KerasHub compute softmax attention in the method
`_compute_attention(query, key, value, attention_mask, ...)`. `LinearAttention`
overrides this method and no other part of the computation. The class that it is mixed
into still computes projections, rotary embeddings and gates.
"""

import functools

from keras import ops

from keras_rfattn import feature_maps
from keras_rfattn.arguments import check_flag
from keras_rfattn.feature_maps.base import set_trainable
from keras_rfattn.feature_maps.weights import fix_name
from keras_rfattn.layers.attend import attend, check_options
from keras_rfattn.layers.call_context import (
    CallContext,
    Interceptor,
    context_of,
    taken_over,
)
from keras_rfattn.layers.checks import title
from keras_rfattn.layers.fingerprint import mark
from keras_rfattn.layers.self_attention import is_self_attention, tokens_of
from keras_rfattn.layers.softmax_heads import check_softmax_heads
from keras_rfattn.ops.kernel_attention import Softmax
from keras_rfattn.ops.masks import interpret_mask

# Attributes that a layer has only while its attention is linear.
STATE = ("options", "is_from_config", "refusal", "self_attention", "kinds_of_calls")

# Names under which attention classes store the size of a sliding window.
SLIDING_WINDOWS = ("_sliding_window", "sliding_window", "sliding_window_size")

NO_SCORES = (
    "Linear attention never forms attention scores. Received: "
    "return_attention_scores=True. Keep this layer softmax (`exclude=`)."
)


class LinearAttention:
    """Mixin that makes a Keras attention layer linear in sequence length.

    In the bases, the mixin must come before a class that has `_compute_attention`. The
    layer then owns a feature map (sublayer `feature_map`). Its saved weights contain a
    fingerprint of the map, so that loading weights of another mechanism raises.
    """

    # Whether the layer is linear because of a saved config, not `replace_attention`.
    is_from_config = False
    # Why the weights are those of another mechanism, in part; `None` if they are not.
    refusal = None
    # Whether queries, keys and values are the same tokens wherever they are of one
    # number; `None` if only the graph of a model or the calls tell.
    self_attention = None
    # Which of these kinds, `True` or `False`, calls outside of compiled functions had.
    kinds_of_calls = frozenset()
    # An `Interceptor` or a function. It applies in all threads, because replicas of a
    # model run in separate threads.
    recorder = None
    # Attribute that holds the logits of attention sinks, in classes that have them.
    sink_logits = None

    def _set_mechanism(self, feature_map, options, self_attention=None):
        """Checks and stores what makes the layer linear."""
        check_options(options, feature_map)
        check_softmax_heads(options.softmax_heads, self._kv_shape()[0], title(self))
        fix_name(feature_map, "feature_map")
        self.feature_map, self.options = feature_map, options
        if self_attention is not None:
            check_flag("self_attention", self_attention)
            self.self_attention = bool(self_attention)

    @property
    def trainable(self):
        """Whether the layer trains, as in Keras."""
        return self._trainable

    @trainable.setter
    def trainable(self, value):
        set_trainable(self, value)

    def _kv_shape(self):
        """Returns `(K, H)`, the number of key/value heads and the head dim."""
        return self._num_heads, self._key_dim

    def _build_mechanism(self):
        if not self.feature_map.built:
            self.feature_map.build((None, None, *self._kv_shape()))
        if not self.trainable:
            # Freezing a layer freezes only the sublayers that it has at that time.
            set_trainable(self.feature_map, False)
        mark(self)

    def build(self, query_shape, value_shape, key_shape=None):
        """Builds the projections, then the feature map."""
        super().build(query_shape, value_shape, key_shape)
        window = sliding_window(self)
        reason = refusal(self) or (window and f"it has a sliding window of {window}")
        if reason:
            raise ValueError(
                f"Layer '{self.name}' cannot be linear attention: {reason}. Use the "
                "softmax layer instead."
            )
        # The map comes last, so that weights have the same order as in a layer that was
        # replaced after it was built.
        self._tracker.untrack(self.feature_map)
        self._tracker.track(self.feature_map)
        self._build_mechanism()

    def __call__(self, *args, **kwargs):
        if self.refusal is not None:
            raise ValueError(
                f"{self.refusal} The layer computes nothing until weights of its own "
                "mechanism are loaded, or its attention is restored and replaced."
            )
        # Keras casts the arguments later, which makes copies.
        is_itself = is_self_attention(self, *tokens_of(args, kwargs))
        # With a cache, keys include tokens other than the queries'.
        is_itself = is_itself and kwargs.get("cache") is None
        if "attention_mask" in kwargs:
            kwargs["attention_mask"] = taken_over(kwargs["attention_mask"])
        recorder = context_of(self).recorder
        with CallContext(self, is_itself, recorder=recorder).active():
            if isinstance(recorder, Interceptor):
                return recorder.around(self, super().__call__, args, kwargs)
            return super().__call__(*args, **kwargs)

    def rematerialized_call(self, layer_call, *args, **kwargs):
        """Rematerializes `layer_call` like Keras, in the context of this call."""
        # Keras treats every argument as an array, so others are bound first. The
        # gradient computes again outside of this call, possibly in another thread.
        parent, context = super().rematerialized_call, context_of(self)

        @functools.wraps(layer_call)
        def in_context(*args, **kwargs):
            with context.active():
                return layer_call(*args, **kwargs)

        def split(*args, **kwargs):
            arrays = {k: x for k, x in kwargs.items() if ops.is_tensor(x)}
            fixed = {k: x for k, x in kwargs.items() if k not in arrays}
            call = functools.partial(in_context, **fixed)
            return parent(call, *args, **arrays)(*args, **arrays)

        return split

    def _compute_attention(
        self,
        query,
        key,
        value,
        attention_mask=None,
        training=None,
        return_attention_scores=False,
        **unused,
    ):
        if return_attention_scores:
            raise ValueError(NO_SCORES)
        num_kv_heads, _ = self._kv_shape()
        groups = key.shape[2] // num_kv_heads
        if groups > 1:
            # Keras repeats keys and values for the query heads that share them.
            key, value = key[:, :, ::groups], value[:, :, ::groups]
        output = attend(
            query,
            key,
            value,
            self.feature_map,
            mask=attention_mask,
            recorder=context_of(self).recorder,
            options=self.options,
            softmax_kernel=Softmax(soft_cap(self)),
            sink_logits=self.sink_logits and getattr(self, self.sink_logits),
        )
        return output, None

    def _compute_attention_mask(
        self,
        query,
        value,
        query_mask=None,
        value_mask=None,
        key_mask=None,
        attention_mask=None,
        use_causal_mask=False,
    ):
        """Returns an `AttentionMask`, which Keras passes to `_compute_attention`."""
        mask = interpret_mask(attention_mask, query.shape[1], value.shape[1])
        for extra in (value_mask, key_mask):
            if extra is not None:
                extra, known = ops.cast(extra, "bool"), mask.key_mask
                extra = extra if known is None else known & extra
                mask = mask.replace(key_mask=extra)
        if query_mask is not None:
            query_mask = ops.cast(query_mask, "bool")
        context = context_of(self)
        segment_ids = context.segment_ids
        return mask.replace(
            query_mask=query_mask,
            causal=mask.causal or use_causal_mask,
            self_attention=context.self_attention,
            segment_ids=mask.segment_ids if segment_ids is None else segment_ids,
        )

    @classmethod
    def from_config(cls, config):
        layer = super().from_config(config)
        layer.is_from_config = True
        return layer

    def get_config(self):
        return {
            **super().get_config(),
            "feature_map": feature_maps.serialize(self.feature_map),
            **self.options.config(),
            "self_attention": self.self_attention,
        }


class Packable(LinearAttention):
    """`LinearAttention` for layers whose call also takes `segment_ids`."""

    def call(
        self,
        query,
        value,
        key=None,
        query_mask=None,
        value_mask=None,
        key_mask=None,
        attention_mask=None,
        return_attention_scores=False,
        training=None,
        use_causal_mask=False,
        segment_ids=None,
    ):
        """Computes attention from the Keras layer's arguments and `segment_ids`.

        Args:
            segment_ids: Integers of shape `(B, T)`, for rows that hold several texts.
                Tokens see only tokens with the same integer, as if each text were a
                separate row; key padding still applies. Inside a compiled function, the
                cost is that of `max_segments` rows for each row.
        """
        if return_attention_scores:
            # This is raised early, because Keras' grouped layer would first store the
            # argument.
            raise ValueError(NO_SCORES)
        context = context_of(self, is_self_attention(self, query, value, key))
        with context.replace(segment_ids=segment_ids).active():
            return super().call(
                query,
                value,
                key=key,
                query_mask=query_mask,
                value_mask=value_mask,
                key_mask=key_mask,
                attention_mask=attention_mask,
                training=training,
                use_causal_mask=use_causal_mask,
            )

    def compute_output_spec(self, *args, segment_ids=None, **kwargs):
        """Returns the Keras layer's output spec, which ignores `segment_ids`."""
        return super().compute_output_spec(*args, **kwargs)


def sliding_window(layer):
    """Returns the size of a layer's own sliding window in tokens, or `None`."""
    found = (getattr(layer, name, None) for name in SLIDING_WINDOWS)
    window = next((x for x in found if x is not None), None)
    is_used = getattr(layer, "use_sliding_window_attention", True)
    return window if window and is_used else None


def soft_cap(layer):
    """Returns the number that bounds a layer's softmax logits, or `None`."""
    return getattr(layer, "logit_soft_cap", None)


def refusal(layer, with_cap=True):
    """Returns why a layer's arguments rule linear attention out, or `None`."""
    cap = soft_cap(layer)
    if with_cap and cap is not None:
        return f"soft cap of {cap:g} on its logits (`drop_soft_cap=True` ignores it)"
    axes = getattr(layer, "_attention_axes", None)
    if axes is not None and tuple(axes) != (1,):
        return f"attention over axes {tuple(axes)}; only sequences (axis 1) are linear"
    return None
