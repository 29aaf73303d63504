"""Attention of many new tokens after a windowed state, in parallel.

The tokens of the last windows, which the state keeps, and the new tokens after them are
laid out from the beginning of a window. Attention then treats them like any sequence;
earlier tokens enter as sums.
"""

from keras import ops

from keras_rfattn.backend import clip, compiled, fits, representable, take_tokens, where
from keras_rfattn.ops.kernel_attention import exact_attention
from keras_rfattn.ops.layout import heads_first, split_heads, take_apart
from keras_rfattn.ops.masks import heads_mask, hide, needed
from keras_rfattn.ops.sums import admit, summarize
from keras_rfattn.ops.windowed_state import LocalState, Move, sums_at
from keras_rfattn.ops.windows import causal_windows


def local_chunk(
    state, features, value, local, key_mask=None, passed=None, is_empty=False
):
    """Computes causal `local_attention` of tokens after those of a state.

    Args:
        state: A `LocalState`.
        features: Function of scaled queries and keys that returns their `Features`, or
            `Deferred` features.
        value: Array of shape `(B, S, K, V)`; its dtype is the compute dtype.
        local: `Local` of the new tokens.
        key_mask: Optional array of shape `(B, S)`, true for visible keys.
        passed: Optional array of shape `(B, S)`, false for tokens at the end that do
            not count at all, such as padding after a text.
        is_empty: Whether no token has entered the state yet, which saves laying it out.

    Returns:
        `(output, state)`: the output of shape `(B, S, N, V)`, and the extended
        `LocalState`.
    """
    query, key, kernel, window, sliding = local
    near, num_kv_heads = 2 if sliding else 1, value.shape[2]
    is_empty = is_empty or needed(state.position == 0) is None
    batch, length = ops.shape(value)[:2]
    new = ops.ones((batch, length), "bool")
    new = new if key_mask is None else ops.cast(key_mask, "bool")
    passed = ops.ones_like(new) if passed is None else passed
    elapsed = ops.sum(ops.cast(passed, "int32"), axis=1)
    moved = Move(state.position, new, elapsed, window, near)

    # Positions of the tokens that are laid out, counted from each row's first visible
    # token.
    kept = 0 if is_empty else near * window
    first = (moved.before - near + 1) * window
    first = ops.expand_dims((ops.zeros_like(first) if is_empty else first), 1)
    places = ops.expand_dims(ops.arange(kept + length, dtype="int32"), 0)
    token = first + places
    came = kept + token - ops.expand_dims(moved.offset, 1)
    source = ops.where(token < ops.expand_dims(state.position, 1), places, came)
    source = clip(source, 0, kept + length - 1)

    def lay_out(old, new):
        if not is_empty:
            new = ops.concatenate([ops.cast(old, new.dtype), new], axis=1)
        return take_tokens(new, source)

    def tokens_first(x):
        return ops.transpose(x, (0, 2, 1, 3))

    none = ops.zeros((batch, kept, *query.shape[2:]), dtype=query.dtype)
    query = lay_out(none, query)
    key = lay_out(tokens_first(state.key), key)
    laid_value = lay_out(tokens_first(state.value), value)
    exists = (token >= 0) & (token < ops.expand_dims(moved.position, 1))
    visible = lay_out(state.visible, new) & exists
    beyond = token < (ops.expand_dims(moved.own, 1) - near + 1) * window
    far = sums_at(state, 0)
    if is_empty and fits(length, window):
        output = exact_attention(query, key, laid_value, kernel, visible, causal=True)
    else:
        arrays, functions = zip(*map(take_apart, features(query, key)), strict=True)
        call = compiled(
            causal_windows, functions=functions, kernel=kernel, window=window,
            sliding=sliding,
        )  # fmt: skip
        output, far = call(
            *arrays, laid_value, query, key, needed(visible), visible & beyond, far
        )

    own = ops.expand_dims(moved.offset, 1) + ops.arange(length, dtype="int32")
    output = take_tokens(output, clip(own - first, 0, kept + length - 1))
    # Before a row's first visible token there is nothing to see.
    output = where(ops.expand_dims((own >= 0), (2, 3)), output, 0)

    slots = ops.expand_dims(ops.arange(near * window, dtype="int32"), 0)
    slots = (ops.expand_dims(moved.own, 1) - near + 1) * window + slots - first
    found = clip(slots, 0, kept + length - 1)
    query, key, laid_value = (take_tokens(x, found) for x in (query, key, laid_value))
    visible = take_tokens(visible, found) & (slots >= 0) & (slots < kept + length)
    key, laid_value = (
        hide(split_heads(x, num_kv_heads), heads_mask(visible))
        for x in (key, laid_value)
    )
    _, close = features(query, tokens_first(key))
    close, wide = heads_first(close, num_kv_heads).compute(), representable(laid_value)
    sums = [far]
    for i in range(near):
        part = slice(i * window, (i + 1) * window)

        def take(x, part=part):
            return x[:, :, part]

        mask = heads_mask(visible[:, part])
        tokens = close.of_tokens(take), take(wide)
        sums.append(summarize(*admit(*tokens, mask), mask))
    return output, LocalState(
        *(
            ops.cast(ops.stack(parts, axis=2), "float32")
            for parts in zip(*sums, strict=True)
        ),
        ops.cast(key, "float32"),
        laid_value,
        visible,
        moved.position,
    )
