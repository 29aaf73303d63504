"""What Keras says where a file is loaded without `import keras_rfattn`."""

import os
import pathlib
import subprocess
import sys

import keras
import keras_hub
import pytest

import keras_rfattn

GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "pages" / "guides" / "errors.md"
LOAD = """
import sys
import keras
import keras_hub

folder = sys.argv[1]
for load in (
    lambda: keras_hub.models.Backbone.from_preset(f"{folder}/preset"),
    lambda: keras.saving.load_model(f"{folder}/model.keras"),
):
    try:
        load()
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
assert "keras_rfattn" not in sys.modules
"""


def backbone():
    model = keras_hub.models.BertBackbone(
        vocabulary_size=20, num_layers=1, num_heads=2, hidden_dim=8,
        intermediate_dim=8, max_sequence_length=6,
    )  # fmt: skip
    return keras_rfattn.replace_attention(model, "favorplus", num_features=4, seed=0)


def quotations():
    """The texts that the guide quotes, each in one line, without the end it omits."""
    section = GUIDE.read_text().split("## Loading without `import keras_rfattn`")[1]
    blocks = section.split("\n## ")[0].split("```text\n")[1:]
    texts = [" ".join(block.split("```")[0].split()) for block in blocks]
    return [text.removesuffix(" ...") for text in texts]


@pytest.mark.full
@pytest.mark.once
def test_the_guide_quotes_what_keras_says(tmp_path):
    model = backbone()
    model.save_to_preset(str(tmp_path / "preset"))
    model.save(tmp_path / "model.keras")
    result = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    said = " ".join(result.stdout.split())
    of_preset, of_file = quotations()
    assert of_preset in said and of_file in said
    for text in (of_preset, of_file):
        assert "keras_rfattn" in text


def test_a_config_begins_with_what_to_import():
    config = keras.saving.serialize_keras_object(backbone())
    first, entry = next(iter(config["config"].items()))
    assert first == "attention"
    assert next(iter(entry.items())) == ("how_to_load", "import keras_rfattn")
    # Files of earlier versions have no such line.
    del entry["how_to_load"]
    again = keras.saving.deserialize_keras_object(config)
    assert len(keras_rfattn.describe_attention(again).replaced) == 1
