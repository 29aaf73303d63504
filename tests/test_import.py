"""The error of an import whose Keras backend is not installed says what to set."""

import subprocess
import sys

import pytest

from tests.environment import environment

pytestmark = pytest.mark.once
HIDDEN = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name == {0!r}:
            raise ModuleNotFoundError("No module named {0}", name=name)

sys.meta_path.insert(0, Hidden())
import keras_rfattn
"""


def last_line(name, backend, folder):
    """The last line that the import prints where a package cannot be imported."""
    variables = {**environment(backend or "jax"), "KERAS_HOME": str(folder)}
    if backend is None:
        del variables["KERAS_BACKEND"]
    code = HIDDEN.format(name)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=variables
    )
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    "name, backend",
    [
        ("tensorflow", None),
        pytest.param("jax", "jax", marks=pytest.mark.full),
        pytest.param("torch", "torch", marks=pytest.mark.full),
    ],
)
def test_a_missing_backend_is_named_and_what_to_set(name, backend, tmp_path):
    line = last_line(name, backend, tmp_path)
    assert line.startswith(
        f"ModuleNotFoundError: Keras' backend {name!r} must be installed. Set the "
        "environment variable KERAS_BACKEND to 'jax', "
    )


def test_other_missing_packages_keep_their_error(tmp_path):
    assert "KERAS_BACKEND" not in last_line("numpy", "torch", tmp_path)
