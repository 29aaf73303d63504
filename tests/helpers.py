"""What tests share: small problems, comparisons that refuse zeros, gradients."""

import contextlib
import functools
import math
from typing import NamedTuple

import keras
import numpy as np
import pytest
from keras import ops

from keras_rfattn import feature_maps
from keras_rfattn.ops import Features
from tests import forms
from tests.assertions import (  # noqa: F401
    NARROW,
    assert_close,
    assert_gradients_close,
    assert_rows_close,
    assert_same,
    to_numpy,
)
from tests.feature_maps.cases import case, names
from tests.marks import ONE_BACKEND, each_map

NAMES = feature_maps.list()
EACH_MAP = each_map(NAMES)
# Their attention has a 1 in its denominator: no average of values.
POLYNOMIAL = names(kernel="polynomial")
AVERAGING = [name for name in NAMES if name not in POLYNOMIAL]
# Those for which attention may be exact within a window.
WINDOWED = names(kernel="softmax") + POLYNOMIAL
# Those with random vectors.
RANDOM = [
    name
    for name in NAMES
    if issubclass(feature_maps.class_of(name), feature_maps.RandomFeatureMap)
]
# Names of the synthetic maps of `tests/forms.py`, on which algorithms are tested.
FORMS = tuple(forms.FORMS)
AVERAGING_FORMS = tuple(name for name in FORMS if name != "squared")


def over(values, names=FORMS):
    """Returns all pairs of a name of a map and a value.

    By default, tests only run on the first value.
    """
    return [
        pytest.param(name, value, marks=ONE_BACKEND if i else ())
        for name in names
        for i, value in enumerate(values)
    ]


BATCH, LENGTH, HEADS, KV_HEADS, VALUE_DIM = 2, 37, 4, 2, 5
# One width for all maps without a pair of features per vector, so that JAX
# compiles an algorithm once for all of them.
HEAD_DIM = NUM_FEATURES = 24
# Small for the same reason: what JAX compiles grows with its logarithm.
BLOCK = 4


class Problem(NamedTuple):
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray


def problem(
    seed=0,
    length=LENGTH,
    key_length=None,
    heads=HEADS,
    kv_heads=KV_HEADS,
    size=1.0,
    dtype="float32",
):
    generator = np.random.default_rng(seed)
    key_length = length if key_length is None else key_length
    return Problem(
        size * generator.normal(size=(BATCH, length, heads, HEAD_DIM)).astype(dtype),
        size
        * generator.normal(size=(BATCH, key_length, kv_heads, HEAD_DIM)).astype(dtype),
        generator.normal(size=(BATCH, key_length, kv_heads, VALUE_DIM)).astype(dtype),
    )


def padding_masks(length=LENGTH):
    """Key masks by name; the rows of a batch differ, and each sees some key."""
    masks = {
        name: np.ones((BATCH, length), dtype=bool)
        for name in ("full", "left", "right", "middle", "scattered")
    }
    masks["left"][0, :5], masks["left"][1, :20] = False, False
    masks["right"][0, -7:], masks["right"][1, 4:] = False, False
    masks["middle"][0, 3:18], masks["middle"][1, 15:33] = False, False
    masks["scattered"][:] = np.random.default_rng(3).random((BATCH, length)) < 0.4
    return masks


@functools.cache
def build(name, kv_heads=KV_HEADS, head_dim=HEAD_DIM, seed=7, **arguments):
    """A built map of the registry or of `FORMS`; if it learns, it has met data."""
    if name in FORMS:
        feature_map = forms.FORMS[name](seed=seed)
        feature_map.build((None, None, kv_heads, head_dim))
        return feature_map
    row = case(name)
    feature_map = feature_maps.get(name, seed=seed, **{**small(name), **arguments})
    feature_map.build((None, None, kv_heads, head_dim))
    if row.prepare is not None:
        row.prepare(feature_map)
    if feature_map.is_adaptive and row.meets_data:
        feature_map.adapt([sample(kv_heads, head_dim, row.size)])
    return feature_map


def sample(kv_heads=KV_HEADS, head_dim=HEAD_DIM, size=1.0, length=60):
    """Queries and keys to adapt to; every other coordinate's means differ in sign."""
    generator = np.random.default_rng(1)
    means = np.stack([np.ones(head_dim), np.cos(np.pi * np.arange(head_dim))])
    noise = generator.normal(size=(2, kv_heads, length, head_dim))
    queries, keys = size * (0.4 * noise + 0.2 * means[:, None, None])
    return queries, keys


@functools.cache
def has_num_features(name):
    """Whether something about a map of this name has a number."""
    feature_map = feature_maps.get(name, seed=0)
    feature_map.build((None, None, 1, 4))
    return feature_map.num_features is not None


def small(name):
    """Constructor arguments of a map of little width."""
    arguments = case(name).arguments
    if arguments is None:
        arguments = {"num_features": NUM_FEATURES} if has_num_features(name) else {}
    return arguments


def input_size(feature_map):
    """What a map's queries and keys are multiplied by."""
    if isinstance(feature_map, forms.Form):
        return 1.0
    return case(feature_maps.name_of(feature_map)).size


def featurize(feature_map, query, key, causal=True):
    """`(query_features, key_features)` of unscaled queries and keys."""
    query, key = ops.convert_to_tensor(query), ops.convert_to_tensor(key)
    return _featurizer(feature_map, causal)(query, key)


@functools.cache
def _featurizer(feature_map, causal):
    return one_program(functools.partial(_featurize, feature_map, causal=causal))


def _featurize(feature_map, query, key, causal):
    side = math.sqrt(feature_map.default_scale(query.shape[-1]))
    side = side * input_size(feature_map)
    return featurized(feature_map, query, key, side, causal=causal)


def featurized(feature_map, query, key, side=1.0, *masks, causal=False):
    """The features of both sides by the map bound to this call, as `attend` does."""
    bound = feature_map.bind(query, key, side, *masks, causal=causal)
    return bound.query_features(query), bound.key_features(key)


@functools.cache
def what_is_not_finite(name):
    """Returns what a map returns that is not finite, as a sentence, or `None`."""
    for size in (0.0, 1.0, 50.0):
        x = problem(size=size)
        sides = featurize(build(name), x.query, x.key)
        for side, features in zip(("query", "key"), sides, strict=True):
            for part, array in features.dense()._asdict().items():
                numbers = np.zeros(1) if array is None else to_numpy(array)
                if not np.all(np.isfinite(numbers)):
                    return (
                        f"the map returned {numbers[~np.isfinite(numbers)][0]} in the "
                        f"`{part}` of `{side}_features`, for tokens of size {size:g}. "
                        "Features must be finite for every token: where a feature is "
                        "0, its logarithm is -inf, so that `log_activation(z)` adds a "
                        "small constant before the logarithm."
                    )
    return None


def one_program(function):
    """`function`, jitted on JAX.

    Outside of a program JAX compiles every operation by itself, for each shape anew: a
    layer's hundreds take longer than the layer does as one program.
    """
    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(function)
    return function


def forward(model):
    """`inputs -> outputs` of a model, with the weights it has by then.

    What replaces its attention makes another one necessary.
    """
    if keras.backend.backend() != "jax":
        return model

    def call(weights, inputs):
        return model.stateless_call(*weights, inputs)[0]

    program = one_program(call)

    def run(inputs):
        weights = model.trainable_variables, model.non_trainable_variables
        return program([[w.value for w in part] for part in weights], inputs)

    return run


@functools.cache
def compiled(algorithm, **options):
    """`algorithm` with some arguments fixed; jitted on JAX, slow otherwise."""
    return one_program(functools.partial(algorithm, **options))


def attention(feature_map, algorithm, **options):
    """`(query, key, value, key_mask=None) -> output` with the map inside.

    Without a mask it passes one that hides nothing, which JAX need not compile anew.
    """
    call = compiled(algorithm, **options)

    def attend(query, key, value, key_mask=None):
        features = featurize(feature_map, query, key)
        value = ops.convert_to_tensor(value)
        if key_mask is None:
            key_mask = np.ones(value.shape[:2], bool)
        return call(*features, value, ops.convert_to_tensor(key_mask))

    return attend


def gradients(function, *arrays, compiles=True):
    """Gradients, for every array, of `function(*arrays)` summed with fixed weights.

    JAX compiles them as one program, unless the function looks at values. Of a function
    that is called again, `gradient_of` makes a program once.

    The weights vary, as a plain sum over an average of values is too kind: its
    gradient for queries and keys is nearly nothing.
    """
    return gradient_of(function, len(arrays), compiles)(*arrays)


def gradient_of(function, count=3, compiles=True):
    """`(*arrays) -> gradients` as above, of so many arrays; one program on JAX."""

    def scalar(*tensors):
        output = function(*tensors)
        wide = keras.backend.standardize_dtype(output.dtype)
        wide = "float64" if wide == "float64" else "float32"
        weights = np.cos(np.arange(math.prod(output.shape))).reshape(output.shape)
        weights = ops.convert_to_tensor(weights.astype(wide))
        return ops.sum(ops.cast(output, wide) * weights)

    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        program = jax.grad(scalar, argnums=tuple(range(count)))
        if compiles:
            program = jax.jit(program)

    def gradient(*arrays):
        tensors = [ops.convert_to_tensor(x) for x in arrays]
        if backend == "jax":
            result = program(*tensors)
        elif backend == "tensorflow":
            import tensorflow as tf

            with tf.GradientTape() as tape:
                tape.watch(tensors)
                output = scalar(*tensors)
            result = tape.gradient(output, tensors)
        else:
            import torch

            tensors = [x.detach().clone().requires_grad_() for x in tensors]
            result = torch.autograd.grad(scalar(*tensors), tensors)
        return [to_numpy(x.detach() if backend == "torch" else x) for x in result]

    return gradient


class Reference(NamedTuple):
    """Attention by its definition, in float64 NumPy, from the features alone."""

    output: np.ndarray  # (B, T, N, V)
    # (B, T, N): Σ|w| / |Σ w| over keys and features, both of which may cancel.
    conditioning: np.ndarray
    size: float  # of the largest value


def reference(query_features, key_features, value, key_mask=None, causal=True):
    query = _wide(query_features)
    key = _wide(key_features)
    value = to_numpy(value).astype("float64")
    groups = query.log_scale.shape[2] // value.shape[2]
    mask = np.ones(value.shape[:2], bool) if key_mask is None else to_numpy(key_mask)
    mask = mask.astype(bool)
    value = np.where(mask[:, :, None, None], value, 0)

    def heads(x):
        return np.repeat(x, groups, axis=2).transpose(0, 2, 1, 3)

    # (B, N, T, S, M)
    exponent = query.log_scale.transpose(0, 2, 1, 3)[:, :, :, None]
    exponent = exponent + heads(key.log_scale)[:, :, None]
    visible = np.broadcast_to(mask[:, None, None, :], exponent.shape[:-1])
    if causal:
        visible = visible & np.tri(*visible.shape[-2:], dtype=bool)
    exponent = np.where(visible[..., None], exponent, -np.inf)
    largest = np.max(exponent, axis=(-2, -1), keepdims=True)
    largest = np.where(np.isfinite(largest), largest, 0)
    exponent = exponent - largest
    terms = np.exp(exponent)
    if query.is_signed:
        terms = terms * np.where(
            visible[..., None],
            query.values.transpose(0, 2, 1, 3)[:, :, :, None]
            * heads(key.values)[:, :, None],
            0,
        )
    weights = np.sum(terms, axis=-1)
    total = np.sum(weights, axis=-1)
    blind = ~np.any(visible, axis=-1)
    if query_features.has_offset:
        total = total + np.exp(-largest[..., 0, 0])
    denominator = np.where(blind, 1, total)
    output = (weights @ heads(value)) / denominator[..., None]
    conditioning = np.sum(np.abs(terms), axis=(-2, -1)) / np.abs(denominator)
    return Reference(
        output.transpose(0, 2, 1, 3),
        np.maximum(conditioning, 1).transpose(0, 2, 1),
        np.max(np.abs(value)),
    )


def _wide(features):
    features = features.dense()
    parts = [None if x is None else to_numpy(x).astype("float64") for x in features]
    return Features(*parts)


def assert_matches(feature_map, actual, expected, rtol=1e-5):
    """`actual` against a `Reference`, as strictly as the map's signs allow."""
    if feature_map.is_positive:
        assert_close(actual, expected.output, rtol)
    else:
        assert_rows_close(
            actual, expected.output, expected.conditioning, expected.size, rtol
        )


def gradient_rtol(feature_map):
    """Of a gradient of `problem()`; a signed map's rows are ill-conditioned twice.

    Their conditioning (`Reference`) stays below 32, with 6e-8 for float32's rounding.
    """
    return 1e-5 if feature_map.is_positive else 6e-5


def distance_to_prefix_mean(output, value):
    """How far causal attention is from the mean of the values so far."""
    groups = output.shape[2] // value.shape[2]
    value = np.repeat(value, groups, axis=2)
    count = np.arange(1, value.shape[1] + 1)[:, None, None]
    mean = np.cumsum(value, axis=1) / count
    late = slice(8, None)
    difference = output[:, late] - mean[:, late]
    return np.sqrt(np.mean(difference**2) / np.mean(output[:, late] ** 2))


@contextlib.contextmanager
def double_precision():
    """Lets JAX hold float64 for a while; the other backends always can."""
    if keras.backend.backend() != "jax":
        yield
        return
    import jax

    with jax.enable_x64(True):
        yield
