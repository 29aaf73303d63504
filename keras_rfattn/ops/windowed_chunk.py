"""Attention of many new tokens after a windowed state, in parallel.

The tokens of the last windows, which the state keeps, and the new tokens after them are
laid out from the beginning of a window. Attention then treats them like any sequence;
earlier tokens enter as sums.
"""

from keras import ops

from keras_rfattn.backend import clip, fits, representable, take_tokens, where
from keras_rfattn.ops.kernel_attention import exact_attention
from keras_rfattn.ops.layout import heads_first, split_heads
from keras_rfattn.ops.masks import heads_mask, hide, needed
from keras_rfattn.ops.sums import admit, summarize
from keras_rfattn.ops.windowed_state import Move, sums_at, to_local_state
from keras_rfattn.ops.windows import in_windows


def local_chunk(
    state, features, value, local, key_mask=None, passed=None, is_empty=False
):
    """Computes causal `local_attention` of tokens after those of a state."""
    query, key, kernel, window, _ = local
    moved = Move(state, ops.shape(value)[:2], key_mask, passed)
    num_kv_heads = value.shape[2]
    is_empty = is_empty or needed(state.position == 0) is None
    kept = 0 if is_empty else moved.near * window
    start = ops.zeros_like(moved.start) if is_empty else moved.start
    # Positions of the tokens that are laid out.
    token = start + ops.arange(kept + moved.length, dtype="int32")
    source, last = moved.source(token, start, kept), kept + moved.length - 1

    def lay_out(old, new):
        if not is_empty:
            new = ops.concatenate([ops.cast(old, new.dtype), new], axis=1)
        return take_tokens(new, source)

    def tokens_first(x):
        return ops.transpose(x, (0, 2, 1, 3))

    new = hide(split_heads(key, num_kv_heads), heads_mask(moved.new))
    sink = moved.sinks(state, new)
    none = ops.zeros((ops.shape(query)[0], kept, *query.shape[2:]), dtype=query.dtype)
    query = lay_out(none, query)
    key = lay_out(tokens_first(state.near_key), key)
    laid_value = lay_out(tokens_first(state.value), value)
    visible = lay_out(state.visible, moved.new) & moved.counts(token)
    far = sums_at(state, 0)
    if is_empty and fits(moved.length, window):
        output = exact_attention(query, key, laid_value, kernel, visible, causal=True)
    else:
        laid = local._replace(query=query, key=key)
        output, far = in_windows(
            features(query, key, sink, token), laid_value, laid, True, needed(visible),
            far, visible & (token < moved.new_start),
        )  # fmt: skip

    output = take_tokens(output, clip(moved.added - start, 0, last))
    # Before a row's first visible token there is nothing to see.
    output = where(ops.expand_dims(moved.added >= 0, (2, 3)), output, 0)

    found = clip(moved.slots - start, 0, last)
    visible = take_tokens(visible, found) & moved.exists
    key, laid_value = (
        hide(split_heads(take_tokens(x, found), num_kv_heads), heads_mask(visible))
        for x in (key, laid_value)
    )
    _, close = features(query, tokens_first(key), sink, moved.slots)
    close, wide = heads_first(close, num_kv_heads).compute(), representable(laid_value)
    sums = [far]
    for i in range(moved.near):
        part = slice(i * window, (i + 1) * window)

        def take(x, part=part):
            return x[:, :, part]

        mask = heads_mask(visible[:, part])
        tokens = close.of_tokens(take), take(wide)
        sums.append(summarize(*admit(*tokens, mask), mask))
    key = moved.sinks_before(state, new, key)
    return output, to_local_state(sums, key, laid_value, visible, moved.position)
