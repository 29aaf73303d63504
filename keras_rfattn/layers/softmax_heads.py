"""Heads that stay softmax in a layer whose other heads are linear.

A few heads retrieve a single token from elsewhere in the text, which random features of
any useful width blur. Most heads do not. "DuoAttention" (Xiao et al., 2024) keeps full
attention in such "retrieval heads". `diagnostics.sensitivity` finds them. They are
key/value heads, because keys and values are what a cache holds for them.
"""

from keras import ops


def with_softmax_heads(call, output):
    """Replaces the output of heads that stay softmax by softmax attention."""
    heads, count = call.options.softmax_heads, call.key.shape[2]
    if not heads:
        return output
    check_softmax_heads(heads, count, "the keys")
    groups = call.query.shape[2] // count
    sinks = call.sink_logits
    if sinks is not None:
        sinks = _taken(ops.reshape(sinks, (1, 1, -1)), heads, groups)
    exact = call.replace(
        query=_taken(call.query, heads, groups),
        key=_taken(call.key, heads),
        value=_taken(call.value, heads),
        sink_logits=sinks,
    ).softmax()
    pieces, done = [], 0
    for i, head in enumerate(heads):
        pieces += [output[:, :, done : head * groups]] * (done < head * groups)
        pieces.append(exact[:, :, i * groups : (i + 1) * groups])
        done = (head + 1) * groups
    pieces += [output[:, :, done:]] * (done < call.query.shape[2])
    return ops.concatenate(pieces, axis=2)


def _taken(x, heads, groups=1):
    """Returns some key/value heads of `(B, T, K · groups, ...)`."""
    # Slices are used because an array of indices would have to be copied to the GPU.
    starts = [head * groups for head in heads]
    return ops.concatenate([x[:, :, i : i + groups] for i in starts], axis=2)


def check_softmax_heads(heads, count, whose):
    """Raises `ValueError` unless `softmax_heads` are some of the heads, but not all."""
    if heads and heads[-1] >= count:
        raise ValueError(
            f"`softmax_heads` must be indices of key/value heads of {whose}, from 0 to "
            f"{count - 1}. Received: softmax_heads={heads}."
        )
    if len(heads) == count:
        raise ValueError(
            "`softmax_heads` must leave at least one linear head. Received: all "
            f"{count} key/value heads of {whose}, softmax_heads={heads}. Keep the "
            "layer softmax (`exclude=`)."
        )
