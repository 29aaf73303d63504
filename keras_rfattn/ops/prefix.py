"""Causal attention with a prefix that all queries see (prefix-LM)."""

from keras import ops

from keras_rfattn.backend import representable
from keras_rfattn.ops.causal import causal
from keras_rfattn.ops.layout import heads_first, split_heads
from keras_rfattn.ops.masks import heads_mask
from keras_rfattn.ops.recurrent import count_visible, to_state
from keras_rfattn.ops.sums import admit, summarize


def after_prefix(
    query_features, key_features, value, prefix_mask, key_mask=None, block_size=None
):
    """Computes linear attention in which query i sees keys `j <= i` and a prefix.

    Args:
        query_features: `Features` of shape `(B, T, N, M)`, or `Deferred` features.
        key_features: `Features` of shape `(B, T, K, M)`, or `Deferred` features.
        value: Array of shape `(B, T, K, V)`; its dtype is the compute dtype.
        prefix_mask: Booleans of shape `(B, T)`, true for keys of the prefix.
        key_mask: Optional booleans of shape `(B, T)`, true for visible keys.
        block_size: Number of tokens in a block; `None` chooses it by the device.

    Returns:
        Array of shape `(B, T, N, V)` in the dtype of `value`. A row that sees no key is
        0.
    """
    others = ops.logical_not(prefix_mask)
    if key_mask is not None:
        prefix_mask = ops.logical_and(prefix_mask, key_mask)
        others = ops.logical_and(others, key_mask)
    num_kv_heads, mask = value.shape[2], heads_mask(prefix_mask)
    heads = split_heads(representable(value), num_kv_heads)
    key = heads_first(key_features, num_kv_heads)
    state = to_state(
        summarize(*admit(key, heads, mask), mask), count_visible(value, prefix_mask)
    )
    return causal(query_features, key_features, value, others, block_size, state=state)


def check_prefix(mask, options):
    """Checks that the options and the mask can be combined with a prefix.

    Raises:
        ValueError: If the mask has a prefix, and is not causal or asks for something
            that does not work with a prefix.
    """
    asked = {
        "window": options.window is not None,
        "segment_ids": mask.segment_ids is not None,
        "offset": mask.offset is not None,
        "implementation='pallas'": options.implementation == "pallas",
    }
    asked = sorted(k for k, x in asked.items() if x)
    if mask.prefix_mask is not None and (asked or not mask.causal):
        raise ValueError(
            "A prefix that all queries see (`prefix_mask`, prefix-LM) needs causal "
            "attention, by features alone and computed by XLA. Received: "
            f"causal={mask.causal}, and also {asked}. Leave these out."
        )
