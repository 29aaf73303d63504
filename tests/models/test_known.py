"""The table of foreign classes is true of the libraries that are installed."""

import importlib
import importlib.util
import inspect
import pathlib
import pkgutil
import re

import keras
import keras_hub
import pytest

from keras_rfattn.models import survey, swap
from keras_rfattn.models.adapters import known
from keras_rfattn.models.adapters.keras_hub import subclasses
from keras_rfattn.models.survey import is_attention, unsupported
from tests.marks import slow_on_jax

pytestmark = pytest.mark.once

DOCS = pathlib.Path(__file__).parents[2] / "docs"
HUB = sorted(n for n, x in known.ATTENTION.items() if x.package == known.HUB)
BLOCKS = sorted(n for n, x in known.BLOCKS.items() if x.package == known.HUB)


def test_every_row_of_keras_hub_is_a_class_of_it():
    root = pathlib.Path(keras_hub.__file__).parent / "src"
    text = "\n".join(file.read_text() for file in root.rglob("*.py"))
    defined = set(re.findall(r"^class (\w+)\(", text, re.M))
    missing = [name for name in (*HUB, *BLOCKS) if name not in defined]
    assert not missing, f"keras_hub {keras_hub.__version__} has no {missing}"


def test_a_class_of_keras_hub_is_linear_or_refused():
    for name in HUB:
        row = known.ATTENTION[name]
        assert (row.mixin is None) == (row.refused is not None), name


@pytest.mark.parametrize(
    "name", [n for n, x in known.ATTENTION.items() if x.refused is None]
)
def test_rows_that_can_be_linear_are(name):
    row = known.ATTENTION[name]
    found = {cls.__name__: cls for cls in swap.LINEAR_CLASSES}
    cls, linear = found[name], swap.linear_class(found[name])
    assert issubclass(linear, cls) and linear.original_class is cls
    if row.package == known.HUB:
        assert linear.mixin.__name__ == row.mixin


@pytest.mark.parametrize("name", [n for n, x in known.BLOCKS.items() if x.masks])
def test_blocks_that_build_masks_have_mixins(name):
    found = {cls.__name__: cls for cls in subclasses(keras.layers.Layer)}
    mixin = survey.block_mixin(found[name])
    assert mixin.__name__ == known.BLOCKS[name].masks
    # A class of the user's own has the name only.
    assert survey.block_mixin(type(name, (keras.layers.Layer,), {})) is None


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


# They hold attention of a class that is known.
HOLDERS = {
    "DINOV2Attention": "MultiHeadAttention",
    "Gemma3nAudioConformerAttention": "Gemma3nAudioAttention",
    "Gemma4AudioConformerAttention": "Gemma4AudioAttention",
    "MobileAttention": "MultiQueryAttention2d",
    "SelfAttention": "FluxRoPEAttention",
    "TwoWayMultiHeadAttention": "MultiHeadAttentionWithDownsampling",
}


def classes_of_keras_hub():
    """Every layer class in the files of its backbones, by name."""
    found = {}
    for module in pkgutil.walk_packages(
        keras_hub.src.models.__path__, "keras_hub.src.models."
    ):
        if module.name.endswith("_test"):
            continue
        for name, cls in vars(importlib.import_module(module.name)).items():
            is_layer = isinstance(cls, type) and issubclass(cls, keras.layers.Layer)
            if is_layer and cls.__module__ == module.name:
                found[name] = cls
    return found


@slow_on_jax
def test_every_class_of_keras_hub_is_one_or_the_other():
    found = classes_of_keras_hub()
    assert len([x for x in found if x.endswith("Backbone")]) > 60
    for name, cls in found.items():
        source = inspect.getsource(cls)
        weighs = re.search(r"dot_product_attention\(|einsum.*\n.*softmax", source)
        if not weighs and not survey.LOOKS_LIKE_ATTENTION.search(name):
            continue
        if name in HOLDERS:
            assert HOLDERS[name] in inspect.getsource(inspect.getmodule(cls))
            assert known.ATTENTION[HOLDERS[name]]
            continue
        row = known.ATTENTION.get(name)
        assert row is not None, f"{name} of {cls.__module__} has no row"
        is_linear = swap.linear_class(cls) is not None
        assert is_linear == (row.refused is None), name


# What a reason claims, and what the class must then have.
CLAIMS = {
    "ALiBi": r"alibi",
    "soft cap": r"soft_cap|softcap",
    "sliding window": r"sliding_window",
    "reuse the keys and values": r"shared",
    "in one softmax": r"merged",
    "relative position": r"rel",
    "downsampled": r"downsample",
    "deformable": r"deformable",
    "softmax inside its own call": r"softmax|dot_product_attention",
}


def test_reasons_are_true():
    found, seen = classes_of_keras_hub(), set()
    for name, row in known.ATTENTION.items():
        if row.refused is None or name not in found:
            continue
        source = inspect.getsource(inspect.getmodule(found[name]))
        for words, pattern in CLAIMS.items():
            if words in row.refused:
                seen.add(words)
                assert re.search(pattern, source, re.I), (name, row.refused)
    assert seen == set(CLAIMS)
