import dataclasses

import pytest

import keras_rfattn
from keras_rfattn.ops import Options


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(block_size=0), "`block_size` must be a positive integer"),
        (dict(block_size=True), "`block_size` must be a positive integer"),
        (dict(window=-1), "`window` must be a positive number"),
        (dict(window=2.0), "`window` must be a positive number"),
        (dict(sliding=1, window=4), "`sliding` must be `True` or `False`"),
        (dict(sliding=True), "`sliding` needs a `window`"),
    ],
)
def test_options_are_checked_when_made(arguments, message):
    with pytest.raises(ValueError, match=f"{message}.*Received"):
        Options(**arguments)


def test_options_are_frozen_and_compare_by_value():
    options = Options(window=4)
    assert options == Options(window=4) != Options()
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.window = 5


def test_options_are_taken_out_of_arguments():
    arguments = {"window": 4, "dropout": 0.1}
    assert Options.take(arguments) == Options(window=4)
    assert arguments == {"dropout": 0.1}
    assert Options.take(Options(block_size=3).config()) == Options(block_size=3)


def test_no_argument_is_swallowed():
    import keras

    x = keras.Input((6, 8))
    layer = keras.layers.MultiHeadAttention(2, 4, name="attention")
    model = keras.Model(x, layer(x, x))
    with pytest.raises(TypeError, match="windw.*Did you mean `window`"):
        keras_rfattn.replace_attention(model, "favorplus", windw=4)
    with pytest.raises(TypeError, match=r"options=Options.*\.$"):
        keras_rfattn.replace_attention(model, options=Options(window=4))
    assert type(layer) is keras.layers.MultiHeadAttention
    with pytest.raises((TypeError, ValueError), match="windw"):
        keras_rfattn.layers.MultiHeadAttention(2, 4, windw=4)
