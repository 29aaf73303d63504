"""Causal linear attention in blocks: O(T · (M · V + C · M)), for any length.

A query reads the keys before its block from prefix sums (`sums.read`). These are exact
for exponents of any size, because each feature keeps its own running maximum. The keys
in its own block are weighed one by one, in a C × C matrix of weights; see
`causal_block`.
"""

from keras import ops

from keras_rfattn.backend import compiled, fold, representable, smaller
from keras_rfattn.ops.causal_block import read_block
from keras_rfattn.ops.causal_fallback import unbounded_weights
from keras_rfattn.ops.layout import (
    block_mask,
    cut_blocks,
    features_in_blocks,
    join_blocks,
    split_heads,
)
from keras_rfattn.ops.options import Options
from keras_rfattn.ops.prefix_sums import prefix_sums
from keras_rfattn.ops.state import State, count_visible, in_float32, sum_tokens
from keras_rfattn.ops.sums import (
    Sums,
    admit,
    cast_sums,
    no_sums_of,
    normalize,
    summarize,
)

SPAN = 30.0


def causal(
    query_features,
    key_features,
    value,
    key_mask=None,
    block_size=None,
    state=None,
    return_state=False,
    prefix_mask=None,
):
    """Computes linear attention in which query i sees keys `j <= i`.

    Args:
        query_features: `Features` of shape `(B, T, N, M)`, or `Exponents`, which
            are computed block by block.
        key_features: `Features` or `Exponents` of shape `(B, T, K, M)`.
        value: Array of shape `(B, T, K, V)`; its dtype is the compute dtype.
        key_mask: Optional array of shape `(B, T)`, true for visible keys. Hidden keys
            and values may hold anything.
        block_size: Number of tokens in a block, any positive integer. It has no effect
            on the result. `None` chooses it by the device (see `Options`).
        state: Optional `State` of earlier tokens, which every query sees.
        return_state: Whether to also return the state after the last token.
        prefix_mask: Optional booleans of shape `(B, T)`, true for keys that every query
            sees (prefix-LM). It replaces `state`.

    Returns:
        Array of shape `(B, T, N, V)` in the dtype of `value`, and the `State` if
        `return_state`. A row that sees no key is 0.

    Raises:
        ValueError: If `block_size` is not a positive integer.

    Examples:
        >>> from keras_rfattn import ops
        >>> rng = np.random.default_rng(0)
        >>> phi = ops.Features(None, rng.standard_normal((1, 10, 2, 16), "float32"))
        >>> value = rng.standard_normal((1, 10, 2, 8), "float32")
        >>> output = ops.causal(phi, phi, value, block_size=4)
        >>> bool(np.allclose(output[:, 0], value[:, 0], atol=1e-5))
        True
    """
    block_size = Options(block_size).block_length
    if prefix_mask is not None:
        others = ops.logical_not(prefix_mask)
        if key_mask is not None:
            prefix_mask = ops.logical_and(prefix_mask, key_mask)
            others = ops.logical_and(others, key_mask)
        sums, key_mask = sum_tokens(key_features, value, prefix_mask), others
        state = State(in_float32(sums), count_visible(value, prefix_mask))
    call = compiled(
        _causal, block_size=block_size, span=SPAN, fallback=unbounded_weights
    )
    earlier = None if state is None else state.far
    output, sums = call(query_features, key_features, value, key_mask, earlier)
    if not return_state:
        return output
    position = count_visible(value, key_mask)
    if state is None:
        return output, State(in_float32(sums), position)
    position = state.position + position
    return output, state._replace(far=in_float32(sums), position=position)


def _causal(query, key, value, key_mask, earlier, block_size, span, fallback):
    """Returns the output, and the sums after the last token."""
    (batch, length), num_kv_heads = ops.shape(value)[:2], value.shape[2]
    num_heads, groups = query.num_heads, query.num_heads // num_kv_heads
    block_size = max(smaller(length, block_size), 1)
    dtype, value = value.dtype, representable(value)

    start = no_sums_of(key, (batch, num_kv_heads), value)
    start = start if earlier is None else cast_sums(earlier, start)
    query = features_in_blocks(query.relative(), num_kv_heads, block_size, groups)
    key = features_in_blocks(key, num_kv_heads, block_size)
    value = cut_blocks(split_heads(value, num_kv_heads), block_size)
    query_weights, key_weights = query.shared(), key.shared()
    mask = block_mask(key_mask, length, block_size)

    def step(sums, query, key, value, mask):
        query = query.joined(query_weights).compute()
        key = key.joined(key_weights).compute()
        # Hidden rows may hold anything, so they are removed before any product.
        key, value = admit(key, value, mask)
        prefix, last = prefix_sums(summarize(key, value, mask), Sums(*sums))
        reading = read_block(prefix, query, key, value, mask, groups, span, fallback)
        return tuple(last), normalize(reading, query, dtype)

    last, found = fold(step, tuple(start), (query.tokens(), key.tokens(), value, mask))
    return join_blocks(found, num_heads, length), Sums(*last)
