"""Docstrings: an example of each family, which runs; one line for what is internal."""

import ast
import doctest
import importlib
import inspect
import pkgutil

import keras
import numpy as np
import pytest

import keras_rfattn
from keras_rfattn import feature_maps, kernels
from tests.house import OUTSIDE, files, module, name_of
from tests.marks import SLOW_ON_JAX

# The first module that exports an object gives it its name here.
MODULES = (
    "keras_rfattn",
    "keras_rfattn.feature_maps",
    "keras_rfattn.feature_maps.fits",
    "keras_rfattn.projections",
    "keras_rfattn.layers",
    "keras_rfattn.models",
    "keras_rfattn.generation",
    "keras_rfattn.diagnostics",
    "keras_rfattn.distribution",
    "keras_rfattn.uptraining",
    "keras_rfattn.ops",
    "keras_rfattn.papers",
    "keras_rfattn.papers.calibrate_after",
    "keras_rfattn.papers.hybrid_variance",
    "keras_rfattn.papers.second_moments",
    "keras_rfattn.papers.sklearn",
    "keras_rfattn.papers.tails",
    *(x.name for x in pkgutil.walk_packages(kernels.__path__, "keras_rfattn.kernels.")),
)

# The one backend that can run an example.
ONLY_ON = {"keras_rfattn.distribution.distribute": "jax"}

# Libraries that the package does not depend on.
OPTIONAL = ("keras_hub",)

# mkdocstrings renders a section of this title, and no other, as code.
TITLE = "\nExamples:\n"


def exported(module):
    """Returns a dict from name to value: `__all__`, or else what the file defines."""
    if hasattr(module, "__all__"):
        return {name: getattr(module, name) for name in module.__all__}
    return {
        name: value
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__ and name[0] != "_"
    }


def public_objects():
    """Returns a dict from dotted name to each public class and function, once each."""
    candidates = {
        f"{name}.{member}": value
        for name in MODULES
        for member, value in exported(importlib.import_module(name)).items()
    }
    candidates |= {
        f"{cls.__module__}.{cls.__name__}": cls
        for cls in map(feature_maps.class_of, feature_maps.list())
        if cls.__module__.startswith("keras_rfattn.")
    }
    found = {}
    for name, value in candidates.items():
        is_documented = inspect.isclass(value) or inspect.isfunction(value)
        if is_documented and not any(value is other for other in found.values()):
            found[name] = value
    return found


def source_of_example(value):
    """Returns the section Examples of a docstring, empty if there is none."""
    _, _, section = inspect.cleandoc(value.__doc__ or "").partition(TITLE)
    return inspect.cleandoc(section) + "\n" if section else ""


OBJECTS = public_objects()


def names():
    """Parameters for all objects; JAX and TensorFlow run one example of each module.

    What examples call is tested on every backend elsewhere.
    """
    seen, found = set(), []
    for name in sorted(x for x in OBJECTS if source_of_example(OBJECTS[x])):
        module = name.rpartition(".")[0]
        is_one_of_many = module in seen and name not in ONLY_ON
        marks = (pytest.mark.once, *SLOW_ON_JAX) if is_one_of_many else ()
        found.append(pytest.param(name, marks=marks))
        seen.add(module)
    return found


# Modules of formulas, whose functions are each one line of a paper.
FORMULAS = ("fits", "hybrid_variance", "second_moments", "sklearn", "tails")


def test_every_family_has_an_example():
    parser = doctest.DocTestParser()
    shown = {x for x in OBJECTS if parser.get_examples(source_of_example(OBJECTS[x]))}
    families = {x for x in MODULES if not x.endswith(FORMULAS) and ".kernels" not in x}
    assert len(families) > 8
    assert families - {x.rpartition(".")[0] for x in shown} == set()
    # An example of a program, not of each name.
    assert len([x for x in shown if x.startswith("keras_rfattn.ops.")]) <= 2


def test_every_public_object_has_a_docstring():
    assert len(OBJECTS) > 100
    assert [x for x in OBJECTS if not (OBJECTS[x].__doc__ or "").strip()] == []


def documented():
    """Returns the pairs of module and qualified name that pages of the API show."""
    found = set()
    for value in OBJECTS.values():
        members = inspect.getmembers(value) if inspect.isclass(value) else ()
        shown = [x for name, x in members if not name.startswith("_")]
        shown = [x.fget if isinstance(x, property) else x for x in shown]
        for x in (value, *shown):
            found.add((getattr(x, "__module__", ""), getattr(x, "__qualname__", "")))
    return found


def docstrings(node, prefix=""):
    """Yields the qualified names and docstrings of functions and classes in a node."""
    for child in ast.iter_child_nodes(node):
        name = prefix
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            name = f"{prefix}{child.name}"
            yield name, ast.get_docstring(child, clean=False) or ""
            name += "." if isinstance(child, ast.ClassDef) else ".<locals>."
        yield from docstrings(child, name)


def test_docstrings_of_what_is_internal_have_one_line():
    public, seen, long = documented(), 0, []
    for file in files():
        for name, text in docstrings(ast.parse(file.read_text())):
            if (module(file), name) in public or name_of(file).startswith(OUTSIDE):
                continue
            seen += 1
            # The attributes of a record, which a public function may return, are shown.
            if "\n" in text and "Attributes:" not in text:
                long.append(f"{name_of(file)}: {name}")
    assert seen > 800
    assert long == []


@pytest.mark.parametrize("name", names())
def test_example_runs(name, tmp_path, monkeypatch):
    if keras.backend.backend() != ONLY_ON.get(name, keras.backend.backend()):
        pytest.skip(f"runs on {ONLY_ON[name]} only")
    source = source_of_example(OBJECTS[name])
    for library in OPTIONAL:
        if library in source:
            pytest.importorskip(library)
    # Examples write files and register maps.
    monkeypatch.chdir(tmp_path)
    registry = dict(feature_maps.FEATURE_MAPS)
    monkeypatch.setattr(feature_maps.registry, "FEATURE_MAPS", registry)
    names = {"keras": keras, "keras_rfattn": keras_rfattn, "np": np}
    names["__name__"] = name
    test = doctest.DocTestParser().get_doctest(source, names, name, None, None)
    output = []
    result = doctest.DocTestRunner().run(test, out=output.append)
    assert result.failed == 0, "".join(output)
