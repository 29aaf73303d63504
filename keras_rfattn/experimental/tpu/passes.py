"""One pass over windows: which windows a kernel reads at a step, and in what order."""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from keras_rfattn.experimental.tpu.blocks import (
    ORDER,
    State,
    at_start,
    clear,
    float32,
    reset,
    state_shapes,
    summed_to,
    whole,
)


class Pass(NamedTuple):
    """The windows that the queries of a window see, by offset from their own window.

    Attributes:
        size: Number of tokens in a window.
        nearby: Offsets of the windows whose keys are weighed exactly.
        farther: Offset of the first window that is summed; all windows farther away on
            its side are summed too.
        is_causal: Whether a query does not see the keys of its own window after its
            token.
    """

    size: int
    nearby: tuple
    farther: int
    is_causal: bool

    @property
    def is_backward(self):
        """Whether queries read the sums of later windows, not of earlier ones."""
        return self.farther > 0

    @property
    def keys(self):
        """Offsets of the windows whose keys a step reads: nearby, and summed next."""
        is_nearby = self.joining in self.nearby
        return self.nearby if is_nearby else (*self.nearby, self.joining)

    @property
    def queries(self):
        """Offsets of the windows whose queries a step over keys reads."""
        return tuple(-x for x in self.keys)

    @property
    def joining(self):
        """Offset of the window that joins the sums once a window's rows read them."""
        return self.farther + (-1 if self.is_backward else 1)


class Rows(NamedTuple):
    """Queries, or references to the R rows of queries of a window.

    Attributes:
        query: `(R, H)`: the queries from which features are computed.
        near: `(R, H)`: the queries that weigh keys exactly.
        common: `(R, 1)`: the exponent term that all features of a query share.
        gradient: `(R, V)`: the output's gradient, divided by the denominator.
        delta: `(R, 1)`: the term that all gradients of the row's weights subtract.
        shift: `(R, 1)`: the weights are relative to `exp(shift)`.
        denominator: `(R, 1)`: sum of the weights.
        reference: `(1, M)`: the `reference_of` the block, for causal attention.
    """

    query: jax.Array
    near: jax.Array = None
    common: jax.Array = None
    gradient: jax.Array = None
    delta: jax.Array = None
    shift: jax.Array = None
    denominator: jax.Array = None
    reference: jax.Array = None


class Columns(NamedTuple):
    """Keys, or references to the C keys of a window, as in `causal`.

    `near`, `(C, H)`, are the keys that queries weigh exactly.
    """

    key: jax.Array
    near: jax.Array
    value: jax.Array
    term: jax.Array


def run(kernel, size, is_reversed, rows, row_windows, columns, key_windows, parameters,
        of_tokens, shared):  # fmt: skip
    """Runs a kernel over windows or blocks, from the first or from the last on."""
    batch, heads, length = columns.key.shape[:3]
    count = length // size

    def place(i):
        return count - 1 - i if is_reversed else i

    def block(x, offset=0):
        def index(b, k, i):
            # Windows beyond either end are read but not used.
            here = jnp.clip(place(i) + offset, 0, count - 1)
            return (b, k, here, 0, 0)[: x.ndim]

        if x.ndim == 5:
            return pl.BlockSpec((None, None, None, *x.shape[3:]), index)
        lengths = size * (x.shape[2] // length), x.shape[-1]
        return pl.BlockSpec((None, None, *lengths), index)

    (rows, rows_tree), (columns, columns_tree) = map(jax.tree.flatten, (rows, columns))
    inputs = [(x, block(x, i)) for i in row_windows for x in rows]
    inputs += [(x, block(x, i)) for i in key_windows for x in columns]
    inputs += [(x, whole(x)) for x in parameters]
    arrays, specs = zip(*inputs, strict=True)

    def body(*refs):
        refs, current = iter(refs), place(pl.program_id(2))

        def take(tree, windows):
            found = {}
            for window in windows:
                there = (current + window >= 0) & (current + window < count)
                some = itertools.islice(refs, tree.num_leaves)
                found[window] = jax.tree.unflatten(tree, some), there
            return found

        queries, keys = take(rows_tree, row_windows), take(columns_tree, key_windows)
        given = [next(refs) for _ in parameters]
        found = [next(refs) for _ in (*of_tokens, *shared)]
        state = State(*refs)
        at_start(lambda: reset(state))
        at_start(lambda: clear(*found[len(of_tokens) :]))
        kernel(queries, keys, given, found, state)

    value_dim = columns_tree.unflatten(columns).value.shape[-1]
    return pl.pallas_call(
        body, grid=(batch, heads, count), in_specs=list(specs),
        out_specs=[*map(block, of_tokens), *map(whole, shared)],
        out_shape=[*of_tokens, *shared],
        scratch_shapes=state_shapes(parameters[0].shape[-1], value_dim),
        compiler_params=ORDER,
    )(*arrays)  # fmt: skip


def run_backward(kernels, size, is_reversed, rows, known, row_windows, columns,
                 key_windows, parameters):  # fmt: skip
    """Runs a kernel over queries, and one in the other direction over keys."""
    shared = [float32(*rows.query.shape[:2], *x.shape[2:]) for x in parameters]
    like_rows, like_columns = (
        [float32(*x.shape) for x in jax.tree.leaves(side)] for side in (rows, columns)
    )
    *of_rows, of_query_vectors, of_query_bias = run(
        kernels[0], size, is_reversed, known, (0,), columns, key_windows, parameters,
        like_rows, shared[::2],
    )  # fmt: skip
    *of_columns, of_key_vectors, of_key_bias = run(
        kernels[1], size, not is_reversed, known, row_windows, columns, (0,),
        parameters, like_columns, shared[1::2],
    )  # fmt: skip
    of_parameters = of_query_vectors, of_key_vectors, of_query_bias, of_key_bias
    arrays, tree = jax.tree.flatten((rows, columns, parameters))
    found = map(summed_to, (*of_rows, *of_columns, *of_parameters), arrays)
    return jax.tree.unflatten(tree, found)
