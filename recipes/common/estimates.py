"""How well maps estimate a trained model's softmax, untrained; not a recipe itself."""

import statistics

import keras

import keras_rfattn
from keras_rfattn import diagnostics
from keras_rfattn import feature_maps


def estimates(model, inputs, names, widths, draws, factors):
    """Errors of maps in a softmax model, whose products are multiplied by a factor too.

    The factor, a sharper softmax, tells whether a map falls behind for the size of the
    queries and keys at hand: queries and keys are both multiplied by its square root.

    Args:
        model: With `keras.layers.MultiHeadAttention` inside; left as it was.
        inputs: A batch of what it takes.
        names: Of maps of kernel softmax.
        widths: Numbers of features.
        draws: How many draws of the vectors.
        factors: Of `q · k`.

    Yields:
        A dict for each factor, width and map: medians over the draws of the median
        relative error of the kernel ("kernel error"), the error of attention outputs
        ("error") and that of uniform attention ("mean of V"), and the former of each
        draw ("kernel errors").
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
