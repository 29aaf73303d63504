"""What `describe_attention` prints."""

import keras
import keras_hub
import pytest

import keras_rfattn

LONG = 100


def own(*lengths, blocks=2, **arguments):
    """A small model of one's own, with attention over a fixed number of tokens."""
    x = inputs = keras.Input((*lengths, 32))
    for _ in range(blocks):
        x = keras.layers.MultiHeadAttention(4, 8, dropout=0.1)(x, x)
    model = keras.Model(inputs, x)
    return keras_rfattn.replace_attention(model, seed=0, **arguments)


def lines_of(model):
    lines = str(keras_rfattn.describe_attention(model)).splitlines()
    assert max(map(len, lines)) <= LONG
    return lines


def test_what_matters_comes_first_and_layers_that_are_alike_stand_together():
    lines = lines_of(own(64))
    assert lines[0].endswith(": 2 of 2 layers linear, 3,396 parameters added")
    assert lines[1] == "fewer operations than softmax above 32 tokens"
    assert " ".join(x.strip() for x in lines[-4:-2]) == (
        "favorpp_learned, width 16, bidirectional, MultiHeadAttention, uncalibrated, "
        "not trained, attention dropout 0.1 inactive"
    )
    assert all(line.startswith("  multi_head_attention") for line in lines[-2:])
    assert sum("not trained" in line for line in lines) == 1


def test_layers_that_differ_stand_apart():
    model = own(64, blocks=3, num_features=8)
    first = keras_rfattn.describe_attention(model).rows[0].path
    keras_rfattn.restore_attention(model, include=first)
    lines = lines_of(model)
    assert lines[-1] == f"  {first}"
    assert lines[-2].startswith("softmax, bidirectional")
    assert sum(line.startswith("favorpp_learned, width 8") for line in lines) == 1


@pytest.mark.parametrize("length, is_short", [(32, True), (33, False)])
def test_a_model_that_takes_too_few_tokens_is_warned_of(length, is_short):
    # Four heads of 8 with 16 features take fewer operations above 32 tokens.
    text = str(keras_rfattn.describe_attention(own(length)))
    warning = "Warning: fewer operations than softmax above 32 tokens, but the model "
    assert (warning + f"takes {length}" in text) == is_short
    assert "extend_positions" not in text
    assert "Warning" not in str(keras_rfattn.describe_attention(own(None)))


def test_a_model_with_positions_can_be_extended():
    model = keras_hub.models.BertBackbone(
        vocabulary_size=20, num_layers=1, num_heads=2, hidden_dim=16,
        intermediate_dim=8, max_sequence_length=32,
    )  # fmt: skip
    keras_rfattn.replace_attention(model, "favorplus", seed=0)
    text = "\n".join(lines_of(model))
    assert "but the model takes 32" in text and "extend_positions(model, " in text


def test_a_subclassed_model_takes_any_length():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.attention = keras.layers.MultiHeadAttention(2, 8)

        def call(self, x):
            return self.attention(x, x)

    model = Own()
    model(keras.ops.ones((2, 5, 16)))
    keras_rfattn.replace_attention(model, "favorplus", seed=0)
    assert keras_rfattn.describe_attention(model).max_length is None


def test_no_word_on_kernels_that_nobody_asked_for():
    text = str(keras_rfattn.describe_attention(own(64)))
    for word in ("computed", "xla", "Triton", "Pallas", "kernel"):
        assert word not in text


def test_long_paths_and_notes_are_wrapped():
    inputs = keras.Input((None, 16))
    name = "attention_of_a_model_with_a_name_that_is_rather_long_for_a_line"
    x = keras.layers.MultiHeadAttention(2, 8, name=name, dropout=0.1)(inputs, inputs)
    x = keras.layers.MultiHeadAttention(2, 8, name="second")(x, x)
    model = keras.Model(inputs, x)
    keras_rfattn.replace_attention(model, "favorplus", window=4, sliding=True)
    lines = lines_of(model)
    (row,) = (i for i, line in enumerate(lines) if line.strip() == name)
    text = " ".join(line.strip() for line in lines[:row])
    assert "windows beside, attention dropout 0.1 inactive" in text
