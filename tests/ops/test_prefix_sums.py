import numpy as np
import pytest
from keras import ops

from keras_rfattn.ops import prefix_sums
from keras_rfattn.ops.sums import Sums, merge_sums
from tests import helpers as h
from tests.marks import ONE_BACKEND, first

LEAD, WIDTH, DIM = (2, 3), 7, 5


def sums(rng, *count, scales=WIDTH):
    shapes = (scales,), (DIM, WIDTH), (WIDTH,), (scales,)
    arrays = [rng.random((*LEAD, *count, *x)).astype("float32") for x in shapes]
    # Exponents far apart, so that sums which are not rescaled overflow.
    arrays[0] = 200 * arrays[0]
    return Sums(*map(ops.convert_to_tensor, arrays))


def at(blocks, i):
    return Sums(*(ops.convert_to_tensor(h.to_numpy(x)[:, :, i]) for x in blocks))


@pytest.mark.parametrize("scales", first([WIDTH, 1]))
@pytest.mark.parametrize(
    "count", [3, 17, *(pytest.param(x, marks=ONE_BACKEND) for x in (16, 40))]
)
def test_sums_of_groups_are_those_in_turn(count, scales):
    rng = np.random.default_rng(0)
    blocks, start = sums(rng, count, scales=scales), sums(rng, scales=scales)
    expected, merge = [start], h.compiled(merge_sums)
    for i in range(count):
        expected.append(merge(expected[-1], at(blocks, i)))
    found, last = h.compiled(prefix_sums.prefix_sums)(blocks, start)
    for i, one in enumerate([*(at(found, i) for i in range(count)), last]):
        for actual, wanted in zip(one, expected[i], strict=True):
            h.assert_close(actual, wanted, 2e-6)


@pytest.mark.parametrize("count", [2, 33])
def test_an_unknown_number_of_blocks(count, monkeypatch):
    # As where the size of the array is unknown, groups are made to the last level.
    rng = np.random.default_rng(0)
    blocks, start = sums(rng, count), sums(rng)
    expected, whole = prefix_sums.prefix_sums(blocks, start)
    monkeypatch.setattr(prefix_sums, "is_known", lambda size: False)
    found, last = prefix_sums.prefix_sums(blocks, start)
    for actual, wanted in zip([*found, *last], [*expected, *whole], strict=True):
        h.assert_close(actual, wanted, 2e-6)
