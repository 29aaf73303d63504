"""Linear attention by the Mosaic GPU kernels, with gradients."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from keras_rfattn.fused.mosaic.blocks import SIZE, UNSEEN, rounded
from keras_rfattn.fused.mosaic.gradients import key_slopes, query_slopes
from keras_rfattn.fused.mosaic.outputs import outputs
from keras_rfattn.fused.mosaic.plan import Plan
from keras_rfattn.fused.mosaic.sums import scanned, sum_tokens
from keras_rfattn.ops.features import LOWEST


class Arguments(NamedTuple):
    """The arrays that kernels read: whole blocks, tiles and pieces of 64.

    Attributes:
        query: Array of shape `(B, T, N, H)`.
        key: Array of shape `(B, S, K, H)`.
        query_vectors: Two parts of shape `(B or 1, K, M, H)`, in the dtype of tokens.
        key_vectors: The same for keys.
        query_bias: Array of shape `(B or 1, K, M)`, float32.
        key_bias: The same for keys.
        term: Array of shape `(B, K, S)`, float32, `LOWEST` for hidden keys.
        anchor: Array of shape `(B, K, S)`, 0 for a key that belongs to the reference of
            its block, else `LOWEST`; see `reference_of`.
        value: Array of shape `(B, S, K, V)`.
    """

    query: Any
    key: Any
    query_vectors: tuple
    key_vectors: tuple
    query_bias: Any
    key_bias: Any
    term: Any
    anchor: Any
    value: Any

    def flat(self):
        """Returns the arrays in the order in which kernels take them."""
        return jax.tree.leaves(tuple(self))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def linear_attention(tokens, maps, term, value, is_causal, blocks):
    """Computes linear attention by exponential features.

    Args:
        tokens: Queries `(B, T, N, H)` and keys `(B, S, K, H)`, finite, both in the
            dtype of the values, or in float32.
        maps: Vectors of queries and of keys, `(B or 1, K, H, M)`, and their biases,
            `(B or 1, K, 1, M)`, float32.
        term: Array of shape `(B, K, S)`, float32, added to all exponents of a key;
            `LOWEST` if it is hidden.
        value: Array of shape `(B, S, K, V)`, finite, bfloat16 or float16.
        is_causal: Whether query i sees only keys `j <= i`.
        blocks: Number of blocks of 64 tokens that a program computes.

    Returns:
        Array of shape `(B, T, N, V)` in the dtype of `value`. A row that sees no key is
        0.
    """
    return _save(tokens, maps, term, value, is_causal, blocks)[0]


def _save(tokens, maps, term, value, is_causal, blocks):
    """Returns the result of `linear_attention`, and what `_gradient` needs."""
    given = tokens, maps, term, value
    plan, arguments = prepared(*given, is_causal, blocks)
    pair = sum_tokens(
        plan, 1, arguments.key, arguments.key_vectors, arguments.key_bias,
        arguments.term, arguments.value,
    )  # fmt: skip
    pair = scanned(pair, "before" if is_causal else "all")
    found, logs, references = outputs(plan, arguments, *pair)
    found, logs = _joined(found, logs, value.dtype)
    output = found[:, : tokens[0].shape[1], :, : value.shape[-1]]
    references = references if is_causal else None
    return output, (given, output, logs, references, pair)


def prepared(tokens, maps, term, value, is_causal, blocks):
    """Returns the `Plan`, and the `Arguments`, padded with hidden tokens and zeros.

    A float32 token is replaced by two bfloat16 ones, its rounded value and the rest,
    side by side.
    """
    query, key = tokens
    width = maps[0].shape[-1]
    is_wide = query.dtype == jnp.float32
    vectors = [_parts(x, jnp.bfloat16 if is_wide else query.dtype) for x in maps[:2]]
    if is_wide:
        query, key = (jnp.concatenate(_parts(x), -1) for x in (query, key))
        # The small part of tokens times the small part of vectors is negligible.
        vectors = [
            (jnp.concatenate([a, a], 2), jnp.concatenate([b, 0 * b], 2))
            for a, b in vectors
        ]
    query, key, value = (_padded(x, (1, 3)) for x in (query, key, value))
    vectors = [tuple(_padded(x.mT, (2, 3)) for x in pair) for pair in vectors]
    biases = [_padded(x[:, :, 0], (2,), LOWEST) for x in maps[2:]]
    term = _padded(term, (2,), LOWEST)
    plan = Plan(
        batch=len(query), heads=key.shape[2], groups=query.shape[2] // key.shape[2],
        tiles=-(-width // SIZE), blocks=blocks, is_shared=len(maps[0]) == 1,
        is_causal=is_causal,
    )  # fmt: skip
    arguments = query, key, *vectors, *biases, term, _anchors(term), value
    return plan, Arguments(*arguments)


def _parts(x, dtype=jnp.bfloat16):
    """Returns an array rounded to a dtype, and the rest."""
    high, wide = rounded(x, dtype)
    return high, (x - wide).astype(dtype)


def _padded(x, axes, constant=0):
    """Pads axes at the end to multiples of 64."""
    widths = [(0, -n % SIZE if i in axes else 0) for i, n in enumerate(x.shape)]
    return jnp.pad(x, widths, constant_values=constant)


def _anchors(term):
    """Returns 0 for keys that belong to the reference of their block, else `LOWEST`."""
    visible = (term > LOWEST / 2).reshape(*term.shape[:2], -1, SIZE)
    count = jnp.cumsum(visible, axis=-1)
    before = jnp.cumsum(count[..., -1:], axis=2) - count[..., -1:]
    is_known = (jnp.arange(SIZE) == 0) | (before == 0)
    return jnp.where(visible & (count == 1) & is_known, 0.0, LOWEST).reshape(term.shape)


def _joined(found, logs, dtype):
    """Joins the outputs of tiles by their denominators, and the denominators."""
    if len(logs) == 1:
        return found[0], logs[0]
    shares = jax.nn.softmax(jnp.where(logs < UNSEEN, logs, LOWEST), axis=0)
    joint = jax.nn.logsumexp(jnp.where(logs < UNSEEN, logs, LOWEST), axis=0)
    joint = jnp.where(joint > LOWEST / 2, joint, UNSEEN)
    found = jnp.einsum("ibnt,ibtnv->btnv", shares, found)
    return found.astype(dtype), joint


def _gradient(is_causal, blocks, saved, gradient):
    """Returns the gradients of all arrays that `linear_attention` takes."""
    given, output, logs, references, pair = saved
    tokens, maps, term, value = given
    plan, arguments = prepared(*given, is_causal, blocks)
    (query, key), lengths = tokens, (tokens[0].shape[1], tokens[1].shape[1])
    delta = jnp.einsum(
        "btnv,btnv->bnt", gradient, output, preferred_element_type=jnp.float32
    )
    delta = _padded(delta, (2,))
    gradient = _padded(gradient.astype(value.dtype), (1, 3))
    logs = logs.at[:, :, lengths[0] :].set(UNSEEN)
    known = gradient, delta, logs
    of_queries = query_slopes(plan, arguments, *pair, *known)
    later = sum_tokens(
        plan, plan.groups, arguments.query, arguments.query_vectors,
        arguments.query_bias, -logs, gradient, delta,
    )  # fmt: skip
    later = scanned(later, "after" if is_causal else "all")
    of_keys, of_value = key_slopes(plan, arguments, *later, *known, references)
    width = maps[0].shape[-1]
    of_queries = of_queries[:, :, : lengths[0], :width]
    of_queries = of_queries.reshape(plan.batch, plan.heads, plan.groups, -1, width)
    of_keys = of_keys[:, :, :width, : lengths[1]].mT[:, :, None]
    of_query, *of_query_map = _of_exponents(of_queries, query, maps[0], maps[2])
    of_key, *of_key_map = _of_exponents(of_keys, key, maps[1], maps[3])
    of_value = of_value.sum(0)[:, : lengths[1], :, : value.shape[-1]]
    of_maps = of_query_map[0], of_key_map[0], of_query_map[1], of_key_map[1]
    return (
        (of_query, of_key), of_maps, of_keys.sum((2, 4)), of_value.astype(value.dtype)
    )  # fmt: skip


def _of_exponents(slope, x, vectors, bias):
    """Returns the gradients of tokens, vectors and bias, from those of exponents.

    Args:
        slope: Array of shape `(B, K, G, T, M)`.
        x: Tokens `(B, T, K · G, H)`.
        vectors: Array of shape `(B or 1, K, H, M)`.
        bias: Array of shape `(B or 1, K, 1, M)`.
    """
    batch, length, _, size = x.shape
    heads, groups = slope.shape[1:3]
    own = jnp.broadcast_to(vectors, (batch, *vectors.shape[1:]))
    of_x = jnp.einsum("bkgtm,bkhm->btkgh", slope, own).reshape(x.shape)
    wide = x.astype(jnp.float32).reshape(batch, length, heads, groups, size)
    of_vectors = jnp.einsum("bkgtm,btkgh->bkhm", slope, wide)
    of_bias = slope.sum((2, 3))[:, :, None]
    if len(vectors) == 1:
        of_vectors, of_bias = (y.sum(0, keepdims=True) for y in (of_vectors, of_bias))
    return of_x.astype(x.dtype), of_vectors, of_bias.reshape(bias.shape)


linear_attention.defvjp(_save, _gradient)
