"""Every public class and function shows an example in its docstring, which runs."""

import doctest
import importlib
import inspect
import pkgutil

import keras
import numpy as np
import pytest

import keras_rfattn
from keras_rfattn import feature_maps, kernels
from tests.marks import SLOW_ON_JAX

# The first module that exports an object gives it its name here.
MODULES = (
    "keras_rfattn",
    "keras_rfattn.feature_maps",
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
ONLY_ON = {
    "keras_rfattn.distribution.SequenceParallel": "jax",
    "keras_rfattn.distribution.distribute": "jax",
}

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


# One of each family shows how it is used, and so does each function of the top level.
FAMILIES = (
    "diagnostics.approximation_report", "diagnostics.sensitivity",
    "distribution.distribute", "feature_maps.Activation", "feature_maps.Exponential",
    "feature_maps.FeatureMap", "feature_maps.get",
    "generation.prefill", "generation.state_bytes", "layers.MultiHeadAttention",
    "layers.attend", "layers.record", "models.Plan", "ops.AttentionMask",
    "ops.Features", "ops.causal", "papers.Gerf", "papers.Hybrid",
    "papers.KernelFeatures",
    "projections.Projection", "uptraining.Checkpoint", "uptraining.Stage",
)  # fmt: skip


def test_every_family_has_an_example():
    parser = doctest.DocTestParser()
    shown = {x for x in OBJECTS if parser.get_examples(source_of_example(OBJECTS[x]))}
    first = {x for x in OBJECTS if x.count(".") == 1}
    assert {f"keras_rfattn.{x}" for x in FAMILIES} | first <= shown


def test_every_public_object_has_a_docstring():
    assert len(OBJECTS) > 100
    assert [x for x in OBJECTS if not (OBJECTS[x].__doc__ or "").strip()] == []


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
