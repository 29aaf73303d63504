"""Measures how untrained maps estimate a model's softmax; not a recipe itself."""

import statistics

import keras

import keras_rfattn
from keras_rfattn import diagnostics, feature_maps


def estimates(model, inputs, names, widths, draws, factors):
    """Measures errors of maps in a softmax model, with `q · k` scaled by factors.

    A larger factor makes softmax sharper. This shows whether a map has large errors
    because of the size of the queries and keys. Queries and keys are both multiplied by
    the square root of the factor.

    Args:
        model: A model with `keras.layers.MultiHeadAttention` inside. It is unchanged
            afterwards.
        inputs: A batch of model inputs.
        names: Names of maps that estimate the softmax kernel.
        widths: Numbers of features to try.
        draws: Number of draws of the random vectors.
        factors: Factors that `q · k` is multiplied by.

    Yields:
        A dict for each factor, width and map. It holds medians over draws of the median
        relative error of the kernel ("kernel error"), the error of attention outputs
        ("error") and the error of uniform attention ("mean of V"), and the kernel error
        of each draw ("kernel errors").
    """
    scaled = [
        dense
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.MultiHeadAttention)
        for dense in (layer.query_dense, layer.key_dense)
    ]
    weights = [dense.get_weights() for dense in scaled]
    for factor in factors:
        for dense, own in zip(scaled, weights, strict=True):
            dense.set_weights([factor**0.5 * weight for weight in own])
        for width in widths:
            for name in names:
                found = [_errors(model, inputs, name, width, i) for i in range(draws)]
                kernel, error, mean = map(statistics.median, zip(*found, strict=True))
                yield {
                    "start": "estimates", "factor": factor, "width": width, "arm": name,
                    "kernel error": kernel, "error": error, "mean of V": mean,
                    "kernel errors": [x[0] for x in found],
                }  # fmt: skip
    for dense, own in zip(scaled, weights, strict=True):
        dense.set_weights(own)


def _errors(model, inputs, name, width, seed):
    feature_map = feature_maps.get(name, num_features=width, seed=seed)
    keras_rfattn.replace_attention(model, feature_map, seed=seed)
    mean = diagnostics.approximation_report(model, [inputs], verbose=0).mean
    keras_rfattn.restore_attention(model)
    return mean.kernel, mean.output, mean.mean_of_values
