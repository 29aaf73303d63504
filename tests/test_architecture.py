import os
import subprocess
import sys

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
)

pytestmark = pytest.mark.once

# Floor by floor; a folder may import the folders named, and files of its own.
MAY_IMPORT = {
    "kernels": set(),
    "projections": set(),
    "backend": set(),
    "ops": {"backend", "fused"},
    "fused": {"backend", "ops"},
    "feature_maps": {"backend", "projections", "ops", "kernels"},
    "layers": {"backend", "feature_maps", "fused", "ops"},
    "models": {"backend", "layers", "feature_maps", "projections", "ops"},
    "generation": {"backend", "models", "layers", "ops"},
    "distribution": {"backend", "models", "layers"},
    "uptraining": {
        "backend", "models", "layers", "feature_maps", "projections", "ops",
    },
    "experimental": {"backend", "models", "layers"},
    "maps": {"backend", "models", "layers", "feature_maps", "ops", "uptraining"},
    "diagnostics": {
        "backend", "models", "layers", "feature_maps", "projections", "ops", "kernels",
    },
}  # fmt: skip
# Of a library, and imported only once that library is, or on its backend alone.
FOREIGN = {
    "backend/jax.py": {"jax"},
    "backend/tensorflow.py": {"tensorflow"},
    "backend/torch.py": {"torch"},
    "experimental/compiled_step.py": {"torch"},
    "fused/torch_cpu.py": {"torch"},
    **{
        f"fused/triton/{path.name}": {"torch", "triton"}
        for path in (ROOT / "fused" / "triton").glob("*.py")
    },
    **{
        f"fused/mosaic/{path.name}": {"jax"}
        for path in (ROOT / "fused" / "mosaic").glob("*.py")
    },
    "models/adapters/keras_hub.py": {"keras_hub"},
    "maps/sources.py": {"keras_hub"},
    "sklearn.py": {"sklearn"},
    **{
        f"fused/tpu/{name}.py": {"jax"}
        for name in (
            "attention",
            "bidirectional",
            "blocks",
            "causal",
            "passes",
            "windowed",
        )
    },  # fmt: skip
}
FILES = files()
IDS = [str(file.relative_to(ROOT)) for file in FILES]
HEAVY = ("keras_hub", "keras_nlp", "keras_cv", "matplotlib", "scipy", "sklearn")


def folders(file):
    """Folders of the package that a file imports, other than its own."""
    own = file.relative_to(ROOT).parts[0]
    names = (name.split(".") for name in imports(file))
    return {x[1] for x in names if x[0] == "keras_rfattn"} - {own}


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
    assert found == {"backend", "projections", "kernels"}
    found = folders(ROOT / "layers" / "implementation.py")
    assert found == {"feature_maps", "fused"}


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
    if not name.startswith(("diagnostics", "kernels", "feature_maps")):
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
