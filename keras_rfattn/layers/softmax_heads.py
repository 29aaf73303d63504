"""Heads that stay softmax in a layer whose other heads are linear.

A few heads retrieve a single token from elsewhere in the text, which random features of
any useful width blur. Most heads do not. "DuoAttention" (Xiao et al., 2024) keeps full
attention in such "retrieval heads". `diagnostics.sensitivity` finds them.
"""

from keras import ops


def with_softmax_heads(call, output):
    """Replaces the output of heads that stay softmax by softmax attention."""
    heads = call.options.softmax_heads
    if not heads:
        return output
    check_softmax_heads(heads, call.query.shape[2], "the queries")
    groups = call.query.shape[2] // call.key.shape[2]
    sinks = call.sink_logits
    if sinks is not None:
        sinks = _taken(ops.reshape(sinks, (1, 1, -1)), heads)
    exact = call.replace(
        query=_taken(call.query, heads),
        key=_taken(call.key, [head // groups for head in heads]),
        value=_taken(call.value, [head // groups for head in heads]),
        sink_logits=sinks,
    ).softmax()
    pieces, done = [], 0
    for i, head in enumerate(heads):
        pieces += [output[:, :, done:head]] * (done < head)
        pieces.append(exact[:, :, i : i + 1])
        done = head + 1
    pieces += [output[:, :, done:]] * (done < call.query.shape[2])
    return ops.concatenate(pieces, axis=2)


def _taken(x, heads):
    # Slices are used because an array of indices would have to be copied to the GPU.
    return ops.concatenate([x[:, :, head : head + 1] for head in heads], axis=2)


def check_softmax_heads(heads, count, whose):
    """Raises `ValueError` unless `softmax_heads` are some of the heads, but not all."""
    if heads and heads[-1] >= count:
        raise ValueError(
            f"`softmax_heads` must be head indices of {whose}, from 0 to {count - 1}. "
            f"Received: softmax_heads={heads}."
        )
    if len(heads) == count:
        raise ValueError(
            f"`softmax_heads` must leave at least one linear head. Received: "
            f"all {count} of {whose}, softmax_heads={heads}. Keep the layer softmax "
            "(`exclude=`)."
        )
