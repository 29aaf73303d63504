"""Heads that stay softmax in a layer whose others are linear.

A few heads look a token up elsewhere in the text, which features of any useful width
blur; most do not ("DuoAttention", Xiao et al., 2024, keeps full attention in such
"retrieval heads"). `diagnostics.sensitivity` finds them.
"""

from keras import ops


def with_softmax_heads(call, output):
    """An output in which the heads that stay softmax are.

    Args:
        call: `layers.attend.Attention`.
        output: `(B, T, N, V)`, of whatever answers for the other heads: features, or a
            control in their place.

    Returns:
        `(B, T, N, V)`.

    Raises:
        ValueError: If there are no such heads, or no others.
    """
    heads = call.options.softmax_heads
    if not heads:
        return output
    check_softmax_heads(heads, call.query.shape[2], "the queries")
    groups = call.query.shape[2] // call.key.shape[2]
    exact = call.replace(
        query=_taken(call.query, heads),
        key=_taken(call.key, [head // groups for head in heads]),
        value=_taken(call.value, [head // groups for head in heads]),
    ).softmax()
    pieces, done = [], 0
    for i, head in enumerate(heads):
        pieces += [output[:, :, done:head]] * (done < head)
        pieces.append(exact[:, :, i : i + 1])
        done = head + 1
    pieces += [output[:, :, done:]] * (done < call.query.shape[2])
    return ops.concatenate(pieces, axis=2)


def _taken(x, heads):
    # Slices, as indices would have to be sent to a GPU.
    return ops.concatenate([x[:, :, head : head + 1] for head in heads], axis=2)


def check_softmax_heads(heads, count, whose):
    """Raises `ValueError` if not some of so many heads, named `whose`, can be kept."""
    if heads and heads[-1] >= count:
        raise ValueError(
            f"`softmax_heads` must be heads of {whose}, from 0 to {count - 1}. "
            f"Received: softmax_heads={heads}."
        )
    if len(heads) == count:
        raise ValueError(
            f"`softmax_heads` must leave a head to be linear. Received: all {count} of "
            f"{whose}, softmax_heads={heads}. Keep the layer softmax (`exclude=`)."
        )
