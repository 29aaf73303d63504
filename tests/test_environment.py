import pathlib
import re
import tomllib

import keras
import pytest

from tests.environment import xla_flags

ROOT = pathlib.Path(__file__).parents[1]
on_jax = pytest.mark.skipif(keras.backend.backend() != "jax", reason="JAX's flags")


@on_jax
def test_an_unknown_flag_is_left_out():
    known = "--xla_backend_optimization_level=0"
    assert xla_flags((known, "--xla_no_such_flag=1")) == known


@on_jax
def test_a_start_that_fails_says_why(monkeypatch, tmp_path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho no such library >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    with pytest.raises(RuntimeError, match="exit status 3[^$]*no such library"):
        xla_flags(("--xla_backend_optimization_level=1",))


def test_the_oldest_releases_are_the_lower_bounds():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = project["dependencies"] + extras["jax"] + extras["hub"]
    bounds = dict(re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join(required), re.M))
    text = (ROOT / ".ci" / "oldest.txt").read_text()
    oldest = dict(re.findall(r"^([\w-]+)==([\d.]+)", text, re.M))
    assert len(bounds) == len(required)
    for name, bound in bounds.items():
        assert f"{oldest[name]}.".startswith(f"{bound}."), name
