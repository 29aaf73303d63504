"""Maps that are not of this repository: CONTRIBUTING's example, and `--map`."""

import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from keras_rfattn import feature_maps
from tests import conftest
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
            f"--map={right}", f"--map={tmp_path / 'wrong_sign.py'}",
            "-k", "average or positive_if or shapes",
            "tests/feature_maps/test_laws.py",
        ],
        cwd=ROOT, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    failed = re.findall(r"^FAILED \S+::(\S+)", done.stdout, re.M)
    assert failed == ["test_products_average_to_the_kernel[wrong_sign]"], done.stdout
    assert "law 3 does not hold of wrong_sign" in done.stdout
    assert " passed" in done.stdout


def pytest_prints(*arguments):
    """Returns what pytest prints with these arguments in the project's root."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.mark.full
def test_every_example_keeps_the_laws():
    files = sorted(EXAMPLES.glob("*.py"))
    assert {file.stem for file in files} > {"own_exponential", "own_positive"}
    laws = "tests/feature_maps/test_laws.py"
    printed = pytest_prints("-rA", *(f"--map={file}" for file in files), laws)
    assert " passed" in printed and " failed" not in printed, printed
    passed = re.findall(r"^PASSED \S+\[(?:\w+-)*(\w+)\]", printed, re.M)
    assert {file.stem for file in files} <= {*passed}, printed


@pytest.mark.full
def test_a_file_anywhere_is_tested_and_a_failure_runs_again(tmp_path):
    file = tmp_path / "my_map.py"
    text = (EXAMPLES / "squared_relu.py").read_text()
    assert text.count(" + 1e-3") == 1
    file.write_text(text.replace(" + 1e-3", "").replace('"squared_relu"', '"mine"'))
    contracts = "tests/feature_maps/test_contracts.py"
    printed = pytest_prints(f"--map={file}", "-k", "large_logits_choose", contracts)
    assert f"FAILED {contracts}::test_large_logits_choose_among_keys[mine]" in printed
    assert "the map returned -inf in the `log_scale` of `query_features`" in printed
    assert "1 failed, " in printed and " passed" not in printed
    (again,) = re.findall(r"^E +run again: +(.*)", printed, re.M)
    backend, command, *arguments = shlex.split(again)
    assert backend.startswith("KERAS_BACKEND=") and command == "pytest"
    assert "1 failed in" in pytest_prints(*arguments)
    # With the constant, the same command passes.
    file.write_text(text.replace('"squared_relu"', '"mine"'))
    assert "1 passed in" in pytest_prints(*arguments)


@pytest.mark.parametrize("text", [None, "import keras\n"])
def test_a_file_without_a_map_is_refused(tmp_path, text):
    file = tmp_path / "my_map.py"
    if text is not None:
        file.write_text(text)
    config = Options([str(file)])
    with pytest.raises(pytest.UsageError, match="`--map` must be a file") as caught:
        conftest.pytest_configure(config)
    assert str(file) in str(caught.value)


class Options(list):
    """Stands for pytest's configuration: the values of `--map`."""

    def getoption(self, name):
        return self if name == "--map" else None
