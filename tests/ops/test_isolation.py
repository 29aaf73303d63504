"""What must not reach an output: the future, other sequences, other heads."""

import functools

import numpy as np
import pytest
from keras import ops

from keras_rfattn.ops import bidirectional, causal
from tests import helpers as h

# Layers bound what is larger.
CONTENTS = (1e12, 100.0, -1e12)


def disturb(array, where, content):
    """`array` times 100, or one huge number, at an index."""
    array = array.copy()
    array[where] = array[where] * content if content == 100 else np.float32(content)
    return array


@pytest.mark.parametrize(
    ("name", "content", "now"),
    [(name, CONTENTS[0], 15) for name in h.FORMS]
    + [(name, x, now) for name in h.FORMS for x in CONTENTS for now in (1, 21)],
)
def test_the_future_changes_nothing(name, content, now):
    x = h.problem()
    call = h.attention(h.build(name), causal, block_size=h.BLOCK)
    expected = h.to_numpy(call(*x))
    later = (slice(None), slice(now, None))
    changed = [disturb(a, later, content) for a in x]
    actual = h.to_numpy(call(*changed))
    h.assert_same(actual[:, :now], expected[:, :now])
    # Else the algorithm might never look at what was changed.
    assert not np.array_equal(actual[:, now:], expected[:, now:])


@pytest.mark.parametrize("now", [13, 15])
def test_larger_keys_of_the_future_change_nothing(now):
    # The exponents of this map grow with its keys, so that a maximum over the block
    # would follow those of the future. Blocks are full, so that no mask hides padding.
    x = h.problem(length=9 * h.BLOCK)
    call = h.compiled(causal, block_size=h.BLOCK)
    later = (slice(None), slice(now, None))

    def output(arrays):
        features = h.featurize(h.build("elu"), *arrays[:2])
        return h.to_numpy(call(*features, ops.convert_to_tensor(arrays[2])))

    expected, actual = output(x), output([disturb(a, later, 1e12) for a in x])
    h.assert_same(actual[:, :now], expected[:, :now])
    assert not np.array_equal(actual[:, now:], expected[:, now:])


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("name", h.FORMS)
def test_the_future_changes_nothing_behind_a_gap(name, content):
    # Hidden tokens at the start of a block: its first visible key is then in the
    # future of rows that see earlier blocks.
    x = h.problem()
    mask = np.ones((h.BATCH, h.LENGTH), bool)
    start = 4 * h.BLOCK
    mask[:, start : start + 2] = False
    call = h.attention(h.build(name), causal, block_size=h.BLOCK)
    expected = h.to_numpy(call(*x, mask))
    later = (slice(None), slice(start + 2, None))
    actual = h.to_numpy(call(*(disturb(a, later, content) for a in x), mask))
    now = start + 2
    h.assert_same(actual[:, :now], expected[:, :now])


@pytest.mark.full
@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("name", h.FORMS)
def test_the_future_changes_nothing_in_a_long_sequence(name, content):
    x = h.problem(length=150)
    call = h.attention(h.build(name), causal)
    expected = h.to_numpy(call(*x))
    for now in (100, 140):
        later = (slice(None), slice(now, None))
        actual = h.to_numpy(call(*(disturb(a, later, content) for a in x)))
        h.assert_same(actual[:, :now], expected[:, :now])


@functools.cache
def gradient_of_the_past(name, now):
    call = h.attention(h.build(name), causal, block_size=h.BLOCK)
    return h.gradient_of(lambda *arrays: call(*arrays)[:, :now])


@pytest.mark.parametrize("content", [100.0, 1e3])
@pytest.mark.parametrize("name", h.FORMS)
def test_the_future_changes_no_gradient(name, content):
    x, now = h.problem(), 21
    gradient = gradient_of_the_past(name, now)
    later = (slice(None), slice(now, None))
    expected = gradient(*x)
    actual = gradient(*(disturb(a, later, content) for a in x))
    for a, e in zip(actual, expected, strict=True):
        h.assert_same(a[:, :now], e[:, :now])
        np.testing.assert_array_equal(a[:, now:], 0)


def run(name, algorithm, x):
    """Statistics included, as a layer takes them."""
    feature_map = h.build(name)
    is_causal = algorithm is causal
    features = h.featurize(feature_map, x[0], x[1], causal=is_causal)
    options = {"block_size": h.BLOCK} if is_causal else {}
    call = h.compiled(algorithm, **options)
    return h.to_numpy(call(*features, ops.convert_to_tensor(x[2])))


@pytest.mark.parametrize("algorithm", [bidirectional, causal])
@pytest.mark.parametrize(("name", "content"), h.over(CONTENTS))
def test_sequences_of_a_batch_are_strangers(name, algorithm, content):
    x = h.problem()
    expected = run(name, algorithm, x)
    for row in range(h.BATCH):
        actual = run(name, algorithm, [disturb(a, (row,), content) for a in x])
        other = np.arange(h.BATCH) != row
        h.assert_same(actual[other], expected[other])


@pytest.mark.parametrize("algorithm", [bidirectional, causal])
@pytest.mark.parametrize(("name", "content"), h.over(CONTENTS))
def test_heads_are_strangers(name, algorithm, content):
    x = h.problem()
    groups = h.HEADS // h.KV_HEADS
    expected = run(name, algorithm, x)
    for head in range(h.KV_HEADS):
        mine = slice(head * groups, (head + 1) * groups)
        query = disturb(x.query, (slice(None), slice(None), mine), content)
        at = (slice(None), slice(None), head)
        key, value = disturb(x.key, at, content), disturb(x.value, at, content)
        actual = run(name, algorithm, (query, key, value))
        other = np.arange(h.HEADS) // groups != head
        h.assert_same(actual[:, :, other], expected[:, :, other])


@pytest.mark.parametrize("algorithm", [bidirectional, causal])
@pytest.mark.parametrize("name", h.FORMS)
def test_another_query_of_the_group_changes_nothing(name, algorithm):
    x = h.problem()
    expected = run(name, algorithm, x)
    query = disturb(x.query, (slice(None), slice(None), 1), 100.0)
    actual = run(name, algorithm, (query, x.key, x.value))
    other = np.arange(h.HEADS) != 1
    h.assert_same(actual[:, :, other], expected[:, :, other])
