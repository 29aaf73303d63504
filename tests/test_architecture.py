import dataclasses
import importlib
import inspect
import os
import subprocess
import sys

import keras
import pytest

from tests.house import (
    ROOT,
    asks_for_backend,
    circles,
    code,
    edges,
    files,
    imports,
    knows_of_nan,
    lines,
    module,
    part_of,
    public_names,
)

pytestmark = pytest.mark.once

# Floor by floor; a folder may import the folders named, and files of its own.
MAY_IMPORT = {
    "kernels": set(),
    "projections": set(),
    "backend": set(),
    "ops": {"backend"},
    "fused": {"backend", "ops"},
    "feature_maps": {"backend", "projections", "ops", "kernels"},
    "layers": {"backend", "feature_maps", "fused", "ops"},
    "models": {"backend", "layers", "feature_maps", "projections", "ops"},
    "generation": {"backend", "models", "layers", "ops"},
    "distribution": {"backend", "models", "layers"},
    "uptraining": {
        "backend", "models", "layers", "feature_maps", "projections", "ops",
    },
    "maps": {"backend", "models", "layers", "feature_maps", "ops", "uptraining"},
    "diagnostics": {
        "backend", "models", "layers", "feature_maps", "projections", "ops", "kernels",
    },
    "papers": {
        "backend", "layers", "feature_maps", "projections", "ops", "kernels",
        "uptraining",
    },
    "experimental": {"backend", "models", "layers", "feature_maps", "fused", "ops"},
}  # fmt: skip
# A file that imports nothing of the package, which every folder may import.
GROUND = "arguments"
# The most lines that each part may have. A commit that needs more raises its bar here,
# and says which row of a results page pays for it.
LINES = {
    "core": 15_000,
    "backend": 870,
    "ops": 2_820,
    "feature_maps": 1_690,
    "models": 3_330,
    "uptraining": 1_980,
    "maps": 540,
    "papers": 3_200,
    "experimental": 2_500,
}
RECIPE_LINES = {"recipes": 5_500, "recipes/common": 1_500}
PUBLIC_NAMES, ARGUMENTS = 20, 10
SPECIAL = ("__init__", "__call__")
# Of a library, and imported only once that library is, or on its backend alone.
FOREIGN = {
    "backend/jax.py": {"jax"},
    "backend/tensorflow.py": {"tensorflow"},
    "backend/torch.py": {"torch"},
    "experimental/compiled_step.py": {"torch"},
    "fused/torch_cpu.py": {"torch"},
    **{
        f"experimental/triton/{path.name}": {"torch", "triton"}
        for path in (ROOT / "experimental" / "triton").glob("*.py")
    },
    **{
        f"experimental/tpu/{path.name}": {"jax"}
        for path in (ROOT / "experimental" / "tpu").glob("*.py")
    },
    "models/adapters/keras_hub.py": {"keras_hub"},
    "maps/sources.py": {"keras_hub"},
    "papers/sklearn.py": {"sklearn"},
}
FILES = files()
IDS = [str(file.relative_to(ROOT)) for file in FILES]
HEAVY = ("keras_hub", "keras_nlp", "keras_cv", "matplotlib", "scipy", "sklearn")


def folders(file):
    """Folders of the package that a file imports, other than its own."""
    own = file.relative_to(ROOT).parts[0]
    names = (name.split(".") for name in imports(file))
    return {x[1] for x in names if x[0] == "keras_rfattn"} - {own, GROUND}


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_imports_go_down(file):
    parts = file.relative_to(ROOT).parts
    if len(parts) == 1:
        assert folders(file) <= set(MAY_IMPORT)
        return
    assert parts[0] in MAY_IMPORT, f"on which floor is {parts[0]}?"
    assert folders(file) <= MAY_IMPORT[parts[0]]


def test_the_walk_sees_imports():
    # Else all of the above would hold of an empty set.
    found = folders(ROOT / "feature_maps" / "projected.py")
    assert found == {"backend", "projections", "kernels", "ops"}
    found = folders(ROOT / "layers" / "attend.py")
    assert found == {"backend", "feature_maps", "fused", "ops"}


def test_the_ground_imports_nothing_of_the_package():
    found = list(imports(ROOT / f"{GROUND}.py"))
    assert found and not any(x.startswith("keras_rfattn") for x in found)


def test_no_two_files_import_each_other():
    found = edges()
    assert not circles(found)
    assert sum(map(len, found.values())) > 100, "the search finds no imports"


def test_the_search_finds_circles():
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"d"}, "e": {"a"}}
    assert circles(graph) == [("a", "b", "c"), ("d",)]


def test_figures_see_code_alone(tmp_path):
    file = tmp_path / "a.py"
    file.write_text(
        '"""Asks keras.backend.backend(), and knows nan."""\n\n'
        "import keras  # not torch\n\n\n"
        "def f(x):\n"
        '    """Finite."""\n'
        "    # nan\n"
        '    text = """two\n    lines"""\n'
        "    return text\n"
    )
    assert len(code(file)) == 5
    assert not asks_for_backend(file) and not knows_of_nan(file)
    for line, tell in (
        ("import jax.numpy", asks_for_backend),
        ("y = keras.backend.backend()", asks_for_backend),
        ("y = keras.ops.isnan(0)", knows_of_nan),
        ("not_finite = 3", knows_of_nan),
    ):
        other = tmp_path / "b.py"
        other.write_text(f"{file.read_text()}{line}\n")
        assert tell(other)


def test_the_table_of_foreign_classes_imports_nothing_but_a_type():
    assert set(imports(ROOT / "models" / "adapters" / "known.py")) == {
        "typing.NamedTuple"
    }


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_the_oracle_is_only_for_maps_and_diagnostics(file):
    # Maps state their theory in its terms; no algorithm or layer asks it.
    name = str(file.relative_to(ROOT))
    if not name.startswith(("diagnostics", "kernels", "feature_maps", "papers")):
        names = imports(file)
        assert not any("kernels" in n and "variance" in n for n in names)


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_only_keras_and_numpy_come_first(file):
    name = str(file.relative_to(ROOT))
    allowed = {"keras", "numpy", "keras_rfattn", *sys.stdlib_module_names}
    found = {x.split(".")[0] for x in imports(file, top_level_only=True)}
    assert found <= allowed | FOREIGN.get(name, set())


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_a_file_fits_in_a_head(file):
    assert len(file.read_text().splitlines()) <= 400


def test_the_parts_stay_small():
    parts = lines()
    assert set(parts) == set(LINES) and parts["core"] > 10_000, "the count sees files"
    for part, count in parts.items():
        assert count <= LINES[part], (
            f"{part} has {count} lines of at most {LINES[part]}. Cut, or raise the bar "
            "and say what pays for it (CONTRIBUTING.md)."
        )


@pytest.mark.parametrize("folder", RECIPE_LINES)
def test_the_recipes_stay_small(folder):
    programs = files(ROOT.parent / folder)
    count = sum(len(file.read_text().splitlines()) for file in programs)
    assert count > 1_000, "the count sees files"
    assert count <= RECIPE_LINES[folder], (
        f"{folder} has {count} lines of at most {RECIPE_LINES[folder]}. Cut, or raise "
        "the bar and say what pays for it (CONTRIBUTING.md)."
    )


def test_few_public_names():
    assert len(public_names(ROOT / "__init__.py")) <= PUBLIC_NAMES


def public_functions():
    """Exported functions, and public methods of exported classes with their class."""
    for file in FILES:
        for name in public_names(file):
            found = getattr(importlib.import_module(module(file)), name)
            if inspect.isfunction(found):
                yield None, found
            elif inspect.isclass(found):
                for key, method in inspect.getmembers(found, inspect.isroutine):
                    its = getattr(method, "__module__", None) or ""
                    is_public = not key.startswith("_") or key in SPECIAL
                    if is_public and its.startswith("keras_rfattn"):
                        yield found, method


def is_exempt(cls, function):
    """Whether it is the constructor of a layer, or that of a record from its fields."""
    if cls is None or function.__name__ != "__init__":
        return False
    return issubclass(cls, keras.layers.Layer) or dataclasses.is_dataclass(cls)


def number_of_arguments(cls, function):
    """Without `self`, and without those that Keras gives to the method it overrides."""
    names, theirs = set(), {"self"}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            names.add(parameter.name)
    for parent in getattr(cls, "__mro__", ()):
        method = vars(parent).get(function.__name__)
        if inspect.isfunction(method) and parent.__module__.startswith("keras.src"):
            theirs |= set(inspect.signature(method).parameters)
    return len(names - theirs)


def test_few_arguments():
    counts = {
        function.__qualname__: number_of_arguments(cls, function)
        for cls, function in public_functions()
        if not is_exempt(cls, function)
    }
    assert len(counts) > 150, "the search finds no functions"
    assert {"Packable.call", "HeadSelection.save"} < set(counts)
    assert not {name: n for name, n in counts.items() if n > ARGUMENTS}


def test_core_imports_neither_papers_nor_experimental():
    seen = set()
    for file in FILES:
        if part_of(file) == "core":
            seen |= folders(file)
    assert "ops" in seen and not seen & {"papers", "experimental"}


def test_importing_loads_nothing_heavy():
    code = (
        "import sys, keras; before = set(sys.modules); import keras_rfattn; "
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT.parent)},
    )
    loaded = result.stdout.split()
    assert "keras_rfattn" in loaded
    assert not set(loaded) & set(HEAVY)
    third_party = set(loaded) - set(sys.stdlib_module_names)
    assert third_party == {"keras_rfattn"}


def test_folders_load_when_they_are_used():
    code = (
        "import sys, keras_rfattn; "
        "print(*(m for m in sys.modules if m.startswith('keras_rfattn.')))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT.parent)},
    )
    loaded = {name.split(".")[1] for name in result.stdout.split()}
    assert "ops" in loaded
    assert not loaded & {"diagnostics", "distribution", "experimental", "papers"}
