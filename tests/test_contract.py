"""A failing contract says which case failed, where, and how to run it again."""

import re

import keras
import numpy as np
import pytest

from tests import helpers as h
from tests import marks
from tests.contract import contract

pytestmark = pytest.mark.once

EXPECTED = np.arange(1.0, 13.0).reshape(2, 6)
ASSERTIONS = {
    "close": lambda actual: h.assert_close(actual, EXPECTED),
    "same": lambda actual: h.assert_same(actual, EXPECTED),
    "gradients": lambda actual: h.assert_gradients_close([actual], [EXPECTED], 1e-5),
    "rows": lambda actual: h.assert_rows_close(
        actual[..., None], EXPECTED[..., None], np.ones((2, 6)), 1.0
    ),
}


@pytest.mark.parametrize("name", ASSERTIONS)
def test_a_failure_names_the_case_and_the_worst_index(name):
    actual = EXPECTED.copy()
    actual[1, 3] += 1
    with pytest.raises(AssertionError) as caught:
        with contract("favorpp", "causal", seed=5):
            ASSERTIONS[name](actual)
    text = str(caught.value)
    assert "at index (1, 3)" in text
    assert "feature map: favorpp" in text and "algorithm:   causal" in text
    assert re.search(r"seed: +5$", text, re.M)
    backend = keras.backend.backend()
    command = f"KERAS_BACKEND={backend} pytest -m '' 'tests/test_contract.py::"
    assert (
        f"{command}test_a_failure_names_the_case_and_the_worst_index[{name}]'" in text
    )


def test_a_contract_that_holds_says_nothing():
    with contract("favorpp", "causal"):
        for name in ASSERTIONS:
            ASSERTIONS[name](EXPECTED)


def test_the_command_names_the_file_of_an_own_map(monkeypatch):
    monkeypatch.setitem(marks.OWN, "mine", "some folder/mine.py")
    with pytest.raises(AssertionError) as caught:
        with contract("mine", "causal"):
            h.assert_close(-EXPECTED, EXPECTED)
    test = "tests/test_contract.py::test_the_command_names_the_file_of_an_own_map"
    command = f"pytest '--map=some folder/mine.py' -m '' '{test}'"
    assert str(caught.value).endswith(command)
