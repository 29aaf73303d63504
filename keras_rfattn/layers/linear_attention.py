"""The mixin of all layers: where Keras computes softmax, `attend` comes in.

Some 25 attention classes of Keras and KerasHub leave this step to one method,
`_compute_attention(query, key, value, attention_mask, ...)`. `LinearAttention`
overrides it and nothing else of the computation; projections, rotary embeddings
and gates stay with the class it is mixed into.
"""

import functools
import warnings

from keras import ops

from keras_rfattn import feature_maps
from keras_rfattn.feature_maps.names import fix_name
from keras_rfattn.layers.attend import attend
from keras_rfattn.layers.call_context import CallContext
from keras_rfattn.layers.call_context import context_of
from keras_rfattn.layers.call_context import recorder_of
from keras_rfattn.layers.call_context import taken_over
from keras_rfattn.layers.checks import num_heads
from keras_rfattn.layers.checks import title
from keras_rfattn.layers.fingerprint import mark
from keras_rfattn.layers.implementation import check_options
from keras_rfattn.layers.softmax_heads import check_softmax_heads
from keras_rfattn.ops.masks import interpret_mask

# What a layer has only while it is linear.
STATE = ("options", "is_from_config", "refusal", "trained")

# What attention classes call the number of tokens that a query sees at most.
SLIDING_WINDOWS = ("_sliding_window", "sliding_window", "sliding_window_size")

NO_SCORES = (
    "Linear attention never forms attention scores. Received: "
    "return_attention_scores=True. Keep this layer softmax (`exclude=`)."
)


class LinearAttention:
    """Mixin that makes a Keras attention layer linear in sequence length.

    Comes before a class that has `_compute_attention` in the bases. The layer then
    owns a feature map (sublayer `feature_map`), and its saved weights carry a mark
    that names it, so that no checkpoint of another mechanism loads in silence.
    """

    # Whether a saved config, and not `replace_attention`, made it linear.
    is_from_config = False
    # Why weights could not be loaded.
    refusal = None
    # Paths of the checkpoint's own weights, in the whole model, that were trained.
    trained = ()
    # Watches the layer, or answers for it (see `attend`), in all threads: replicas of
    # a model run in threads of their own.
    recorder = None
    # Attributes that normalize queries where a layer has one of them.
    query_normalizations = ("query_norm", "_query_norm", "q_norm")

    def _set_mechanism(self, feature_map, options):
        """Makes the layer the owner of a map, summed as `ops.Options` say."""
        check_options(options, feature_map)
        check_softmax_heads(options.softmax_heads, num_heads(self), title(self))
        fix_name(feature_map, "feature_map")
        self.feature_map, self.options = feature_map, options

    def _kv_shape(self):
        """`(K, H)`: number of key/value heads and head dim."""
        return self._num_heads, self._key_dim

    def _build_mechanism(self):
        if not self.feature_map.built:
            self.feature_map.build((None, None, *self._kv_shape()))
        if not self.trainable:
            # Keras freezes the sublayers that a layer has when it is frozen.
            self.feature_map.trainable = False
        warn_of_lengths(self)
        mark(self)

    def build(self, query_shape, value_shape, key_shape=None):
        """Builds the projections, then the feature map."""
        super().build(query_shape, value_shape, key_shape)
        refuse_unsupported(self)
        # Weights in the order of a layer that was replaced in place: the map last.
        self._tracker.untrack(self.feature_map)
        self._tracker.track(self.feature_map)
        self._build_mechanism()

    def __call__(self, *args, **kwargs):
        # Here the arguments are still the caller's objects; casts make copies.
        inputs = dict(zip(("query", "value", "key"), args, strict=False))
        query, value, key = (
            (inputs | kwargs).get(x) for x in ("query", "value", "key")
        )
        if "attention_mask" in kwargs:
            kwargs["attention_mask"] = taken_over(kwargs["attention_mask"])
        recorder = recorder_of(self)
        is_same = query is value and (key is None or key is value)
        # Keys of a cache are not the queries' tokens.
        is_same = is_same and kwargs.get("cache") is None
        with CallContext(self, is_same, recorder=recorder).active():
            if hasattr(recorder, "arguments"):
                recorder.arguments.append((args, kwargs))
            if hasattr(recorder, "around"):
                return recorder.around(self, super().__call__, args, kwargs)
            return super().__call__(*args, **kwargs)

    def rematerialized_call(self, layer_call, *args, **kwargs):
        """As Keras', which on JAX and TensorFlow takes every argument for an array.

        What runs again for the gradient does so outside of this call, possibly in
        another thread, and gets the context of this call.
        """
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
            # Keras repeats keys over the query heads that share them.
            key, value = key[:, :, ::groups], value[:, :, ::groups]
        output = attend(
            query,
            key,
            value,
            self.feature_map,
            mask=attention_mask,
            # What runs again for the gradient must leave no trace: stored statistics
            # stay as they are.
            training=bool(training) and getattr(self, "_remat_mode", None) is None,
            recorder=context_of(self).recorder,
            options=self.options,
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
        """An `AttentionMask`, which goes straight to `_compute_attention`."""
        masks = [m for m in (value_mask, key_mask) if m is not None]
        mask = interpret_mask(attention_mask, query.shape[1], value.shape[1])
        for extra in masks:
            extra = ops.cast(extra, "bool")
            known = mask.key_mask
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
        trained = config.get("trained", ())
        config = {k: v for k, v in config.items() if k != "trained"}
        layer = super().from_config(config)
        layer.is_from_config, layer.trained = True, tuple(trained)
        return layer

    def get_config(self):
        return {
            **super().get_config(),
            "feature_map": feature_maps.serialize(self.feature_map),
            **self.options.config(),
            **({"trained": list(self.trained)} if self.trained else {}),
        }


class Packable(LinearAttention):
    """`LinearAttention` of the drop-ins, whose call takes `segment_ids` besides."""

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
        """As the Keras layer's.

        Args:
            segment_ids: Integers `(B, T)` of rows that hold several texts: tokens see
                those with an equal number alone, as if each text had a row of its own
                (key padding still applies). Sums, windows and statistics begin anew
                with each. The work is that of `max_segments` rows inside a compiled
                function, and of the texts there are elsewhere.
        """
        if return_attention_scores:
            # Before Keras' grouped layer keeps the argument as an attribute.
            raise ValueError(NO_SCORES)
        context = context_of(self, query is value and (key is None or key is value))
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
        """As without `segment_ids`."""
        return super().compute_output_spec(*args, **kwargs)


def warn_of_lengths(layer):
    """Warns of a hybrid whose queries and keys may have any length."""
    names = layer.query_normalizations
    normalizes = any(getattr(layer, name, None) is not None for name in names)
    normalizes = normalizes or layer.options.temperature is not None
    if layer.feature_map.assumes_equal_lengths and not normalizes:
        name = feature_maps.name_of(layer.feature_map)
        warnings.warn(
            f"{name!r} in attention whose queries and keys are not normalized: its "
            "coefficients go by the angle or the distance between them, and its "
            "variance is small only where all have one length; signed estimates of "
            "large variance can make a row's denominator vanish. Normalize them "
            "(`temperature=`), which is another attention than the checkpoint's, or "
            "use 'favorpp_dense' with `keras_rfattn.calibrate`.",
            stacklevel=2,
        )


def refusal(layer, windows=True):
    """Why a layer's own arguments rule linear attention out, or `None`.

    Args:
        layer: An attention layer.
        windows: Whether a sliding window is such a reason.
    """
    found = (getattr(layer, name, None) for name in SLIDING_WINDOWS)
    window = next((x for x in found if x is not None), None)
    if windows and window and getattr(layer, "use_sliding_window_attention", True):
        return f"sliding window of {window} tokens (`drop_sliding_window` ignores it)"
    cap = getattr(layer, "logit_soft_cap", None)
    if cap is not None:
        return f"soft cap of {cap} on its logits"
    axes = getattr(layer, "_attention_axes", None)
    if axes is not None and tuple(axes) != (1,):
        return f"attention over axes {tuple(axes)}; only sequences (axis 1) are linear"
    return None


def refuse_unsupported(layer):
    """Raises `ValueError` for arguments that linear attention cannot keep."""
    reason = refusal(layer)
    if reason:
        raise ValueError(
            f"Layer '{layer.name}' cannot be linear attention: {reason}. Use the "
            "softmax layer instead."
        )
