"""Prepares small KerasHub models whose initializers assume a width of 768."""

import math

import keras_hub
from keras import ops

POSITIONS = 0.1  # size of the sinusoids


def prepare(model, width, embedding, context):
    """Rescales initial weights, and replaces trained positions by fixed sinusoids.

    Args:
        model: A new model, whose weights are changed in place.
        width: Its hidden dim.
        embedding: Its `keras_hub.layers.PositionEmbedding`.
        context: Wavelength of the longest sinusoid, in tokens.
    """
    for weight in model.trainable_weights:
        if weight.path.endswith(("kernel", "embeddings")):
            weight.assign((768 / width) ** 0.5 * weight)
    length = embedding.position_embeddings.shape[0]
    places = keras_hub.layers.SinePositionEncoding(context / (2 * math.pi))
    places = POSITIONS * places(ops.zeros((1, length, width)))[0]
    embedding.position_embeddings.assign(places)
    embedding.trainable = False
