"""Maps that are not of this repository: CONTRIBUTING's example, and `--map`."""

import pathlib
import re
import subprocess
import sys

import pytest

from keras_rfattn import feature_maps
from tests.environment import environment
from tests.feature_maps.cases import CASES

EXAMPLES = pathlib.Path(__file__).parent / "examples"
ROOT = pathlib.Path(__file__).parents[2]


def test_contributing_shows_a_file_that_runs():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.S)
    assert block == (EXAMPLES / "squared_relu.py").read_text()
    # And which every contract runs on, as a map without a row.
    assert "squared_relu" in feature_maps.list() and "squared_relu" not in CASES


def contracts(file, name, *tests):
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
            "--map", str(file), "-k", name, *tests,
        ],
        cwd=ROOT, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.long
def test_a_wrong_sign_is_named(tmp_path):
    laws = "tests/feature_maps/test_laws.py"
    right = (EXAMPLES / "own_positive.py").read_text()
    wrong = right.replace("SIGN = -1", "SIGN = 1")
    assert wrong != right
    (tmp_path / "wrong.py").write_text(wrong)
    code, text = contracts(EXAMPLES / "own_positive.py", "own_positive", laws)
    assert code == 0, text
    code, text = contracts(tmp_path / "wrong.py", "own_positive", laws)
    assert code == 1
    assert "law 3 does not hold of own_positive" in text
    assert "test_products_average_to_the_kernel[own_positive]" in text
