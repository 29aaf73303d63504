"""The metadata that an index shows; the repository's address stands in one place."""

import os
import pathlib
import re
import tomllib

import pytest

import keras_rfattn

pytestmark = pytest.mark.once

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HOOK = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["custom"]
VERSION = keras_rfattn.__version__
FILES = f"{HOOK['repository']}/blob/v{VERSION}/"
PICTURES = f"{HOOK['repository']}/raw/v{VERSION}/"
GENERATED = {
    "PKG-INFO",
    ".git",
    ".ruff_cache",
    ".pytest_cache",
    "__pycache__",
    "site",
    "dist",
}


@pytest.fixture(scope="module")
def metadata():
    core = pytest.importorskip("hatchling.metadata.core")
    plugins = pytest.importorskip("hatchling.plugin.manager")
    return core.ProjectMetadata(str(ROOT), plugins.PluginManager()).core


def test_the_version_is_that_of_the_package(metadata):
    assert metadata.version == VERSION
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", VERSION)
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## {re.escape(VERSION.partition('.dev')[0])}", changelog, re.M)


def test_urls(metadata):
    names = {"Homepage", "Documentation", "Source", "Changelog", "Issues"}
    assert set(metadata.urls) == names
    assert all(x.startswith("https://") for x in metadata.urls.values())


def test_links_of_the_readme_work_on_an_index(metadata):
    readme = (ROOT / "README.md").read_text()
    links = re.findall(r"\]\(([^)]+)\)", metadata.readme)
    assert len(links) == len(re.findall(r"\]\(", readme)) > 5
    assert len([x for x in links if x.startswith(PICTURES)]) >= 1
    for link in links:
        assert link.startswith((FILES, PICTURES)), link
        path = link.removeprefix(FILES).removeprefix(PICTURES)
        assert (ROOT / path.partition("#")[0]).is_file(), link
    assert "REPOSITORY" not in metadata.readme


def test_the_address_has_one_place():
    address = HOOK["repository"].removeprefix("https://")
    found = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [x for x in folders if x not in GENERATED and "venv" not in x]
        for name in set(files) - GENERATED:
            file = pathlib.Path(folder, name)
            text = file.read_text(encoding="utf-8", errors="ignore")
            found += [str(file.relative_to(ROOT))] * text.count(address)
    assert found == ["pyproject.toml"]


def test_public_functions_are_annotated():
    assert (ROOT / "keras_rfattn" / "py.typed").is_file()
    for name in keras_rfattn.__all__:
        call = getattr(keras_rfattn, name)
        if not callable(call):
            continue
        function = call.__init__ if isinstance(call, type) else call
        code = function.__code__
        count = code.co_argcount + code.co_kwonlyargcount
        arguments = set(code.co_varnames[:count]) - {"self", "cls"}
        missing = arguments - set(function.__annotations__)
        assert not missing, f"{name} has no annotation of {sorted(missing)}"
        assert isinstance(call, type) or "return" in function.__annotations__, name
