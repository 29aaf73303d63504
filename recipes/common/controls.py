"""Sets up the arms of a comparison, including controls; not a recipe itself."""

import warnings

import keras
import numpy as np
from common.results import report

import keras_rfattn
from keras_rfattn import feature_maps


def set_attention(model, name, mechanism, seed):
    """Gives a softmax model the attention of an arm, in place.

    Args:
        model: A model with `keras.layers.MultiHeadAttention` inside.
        name: Name of the arm. "softmax", "uniform" and "no_attention" are controls.
        mechanism: `(name of a feature map, its arguments, further arguments of
            replace_attention)` for any other arm.
        seed: Seed of the random vectors.

    Returns:
        A dict with the width of the features; empty for a control, or with a window.
    """
    if name == "softmax":
        return {}
    if name == "no_attention":
        silence(model)
        return {}
    if name == "uniform":
        # At this temperature all attention weights are equal to seven digits.
        mechanism = "favorplus", {"num_features": 1}, {"temperature": 1e14}
    map_name, arguments, options = mechanism
    feature_map = feature_maps.get(map_name, seed=seed, **arguments)
    with warnings.catch_warnings():
        # Hybrids warn about queries and keys of any length, which is intended here.
        warnings.filterwarnings("ignore", ".* not normalized")
        keras_rfattn.replace_attention(model, feature_map, seed=seed, **options)
    if name == "uniform" or "window" in options:
        return {}
    return {"width": keras_rfattn.describe_attention(model).replaced[0].width}


def silence(model):
    """Makes attention output 0, in training too."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.MultiHeadAttention):
            dense = layer.output_dense
            dense.set_weights([0 * weight for weight in dense.get_weights()])
            layer.trainable = False


def summarize(rows, columns, pairs):
    """Prints means and standard deviations over seeds, and compares arms.

    Args:
        rows: List of dicts with `start`, `arm` and results.
        columns: Names of the results to print; the last one is compared.
        pairs: List of `((start, arm), (start, arm))`; the first of each pair is
            expected to have the smaller result.
    """
    means = {}
    print(f"{'':<36}" + "".join(f"{name:>17}" for name in columns))
    for key in dict.fromkeys((row["start"], row["arm"]) for row in rows):
        some = [row for row in rows if (row["start"], row["arm"]) == key]
        line = f"{key[0]:<12}{key[1]:<24}"
        for name in columns:
            found = [row[name] for row in some if name in row]
            digits = 0 if name in ("width", "multiplications") else 4
            mean, spread = np.mean(found or 0), np.std(found or 0)
            cell = f"{mean:.{digits}f} ± {spread:.{digits}f}" if found else ""
            line += f"{cell:>17}"
        means[key] = np.mean(found)
        print(line)
    for low, high in pairs:
        if low in means and high in means:
            text = f"{columns[-1]}: {' '.join(low)} < {' '.join(high)}"
            report(text, means[low] < means[high])
