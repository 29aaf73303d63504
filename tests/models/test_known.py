"""The table of foreign classes is true of the libraries that are installed."""

import importlib.util
import pathlib
import re

import keras
import keras_hub
import pytest

from keras_rfattn.models import swap
from keras_rfattn.models.adapters import known
from keras_rfattn.models.survey import is_attention
from keras_rfattn.models.survey import unsupported

DOCS = pathlib.Path(__file__).parents[2] / "docs"
HUB = sorted(n for n, x in known.ATTENTION.items() if x.package == known.HUB)
BLOCKS = sorted(n for n, x in known.BLOCKS.items() if x.package == known.HUB)


def test_every_row_of_keras_hub_is_a_class_of_it():
    root = pathlib.Path(keras_hub.__file__).parent / "src"
    text = "\n".join(file.read_text() for file in root.rglob("*.py"))
    defined = set(re.findall(r"^class (\w+)\(", text, re.M))
    missing = [name for name in (*HUB, *BLOCKS) if name not in defined]
    assert not missing, f"keras_hub {keras_hub.__version__} has no {missing}"


def test_a_class_is_linear_or_refused():
    for name, row in known.ATTENTION.items():
        assert (row.module is None) == (row.refused is not None), name


@pytest.mark.parametrize(
    "name", [n for n, x in known.ATTENTION.items() if x.module is not None]
)
def test_rows_that_can_be_linear_are(name):
    row = known.ATTENTION[name]
    module = importlib.import_module(row.module)
    # Keras exports the class of grouped queries by another name.
    exported = {"GroupedQueryAttention": "GroupQueryAttention"}.get(name, name)
    cls = getattr(module, exported)
    assert cls.__name__ == name
    linear = swap.linear_class(cls)
    assert issubclass(linear, cls) and linear.original_class is cls


@pytest.mark.parametrize(
    "name", [n for n, x in known.ATTENTION.items() if x.refused is not None]
)
def test_refused_rows_say_why(name):
    layer = type(name, (keras.layers.Layer,), {})()
    assert is_attention(layer)
    assert unsupported(layer) == known.ATTENTION[name].refused


def test_the_page_of_models_has_the_table():
    spec = importlib.util.spec_from_file_location("table", DOCS / "models_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = module.PAGE.read_text()
    assert module.written(page) == page, "run `python docs/models_table.py`"
    assert all(f"`{name}`" in page for name in known.ATTENTION)
