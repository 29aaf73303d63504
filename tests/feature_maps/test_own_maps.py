"""Maps that are not of this repository: CONTRIBUTING's example, and `--map`."""

import pathlib
import re
import subprocess
import sys

import pytest

from keras_rfattn import feature_maps
from tests.environment import environment
from tests.feature_maps.cases import CASES
from tests.marks import each_map

pytestmark = pytest.mark.once

EXAMPLES = pathlib.Path(__file__).parent / "examples"
ROOT = pathlib.Path(__file__).parents[2]


def test_contributing_shows_a_file_that_runs():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.S)
    assert block == (EXAMPLES / "squared_relu.py").read_text()
    # The map has no row in the table, so every contract runs on it by default.
    assert "squared_relu" in feature_maps.list() and "squared_relu" not in CASES
    assert each_map(["squared_relu"]) == [pytest.param("squared_relu")]


@pytest.mark.full
def test_a_wrong_sign_is_named(tmp_path):
    right = EXAMPLES / "own_positive.py"
    text = right.read_text()
    for before, after in (
        ("SIGN = -1", "SIGN = 1"),
        ("OwnPositive", "WrongSign"),
        ('"own_positive"', '"wrong_sign"'),
    ):
        assert before in text
        text = text.replace(before, after)
    (tmp_path / "wrong_sign.py").write_text(text)
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
            "--map", right, "--map", tmp_path / "wrong_sign.py",
            "-k", "(own_positive or wrong_sign) and (average or positive_if or shapes)",
            "tests/feature_maps/test_laws.py",
        ],
        cwd=ROOT, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    failed = re.findall(r"^FAILED \S+::(\S+)", done.stdout, re.M)
    assert failed == ["test_products_average_to_the_kernel[wrong_sign]"], done.stdout
    assert "law 3 does not hold of wrong_sign" in done.stdout
    assert " passed" in done.stdout
