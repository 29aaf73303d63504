"""Draw the figures of the documentation from `benchmarks/results`.

    pip install ".[recipes]"
    python benchmarks/plot.py [--folder docs/pages/images]

Nothing is measured here. `models.py`, `decoding.py` and `tpu.py`, and the recipes
`uptrain_decoder.py` and `embed_long_documents.py`, have written the rows. Of rows that
differ only in measured values, the last one counts.
"""

import argparse
import json
import pathlib

from style import COLORS, figure, legend, save, token_ticks

RESULTS = pathlib.Path(__file__).parent / "results"
OF_RECIPES = pathlib.Path(__file__).parents[1] / "recipes" / "results"
MEASURED = ("ms", "least", "times as fast", "ours times as fast", "share of matmul",
            "bytes", "share of bytes", "commit", "others GB", "GB accessed",
            "seconds to compile", "tera-operations", "weights GB", "refused",
            "score", "by quarter", "command", "title", "passage", "party")  # fmt: skip
# Plots rows with blocks of this many tokens, and the rows of softmax.
TPU_BLOCK = 512


def rows(name, folder=RESULTS, **wanted):
    """Returns the rows of a file that have the wanted values."""
    found = {}
    for line in (folder / f"{name}.jsonl").read_text().splitlines():
        row = json.loads(line)
        if all(row.get(k) == x for k, x in wanted.items()):
            key = {k: x for k, x in row.items() if k not in MEASURED}
            found[json.dumps(key, sort_keys=True)] = row
    return list(found.values())


def curves(rows, name, x, y):
    """Returns `{name: (xs, ys)}`, in the order in which names first appear."""
    found = {}
    for row in sorted(rows, key=lambda row: row[x]):
        if row.get(y) is not None:
            found.setdefault(row[name], []).append((row[x], row[y]))
    return {k: tuple(zip(*points, strict=True)) for k, points in found.items()}


def tokens_of(row):
    """Returns a row of models with the number of tokens of a sequence added."""
    return {**row, "tokens": int(row["shape"].split("x")[1])}


def decoding():
    """Plots milliseconds and bytes of one more token by context."""
    found = [x for x in rows("decoding", backend="jax", batch=1) if "model" not in x]
    labels = {
        "softmax": "softmax with its cache",
        "favorpp": "favorpp 256",
        "favorpp window 128": "favorpp 256, window 128",
    }
    picture, panels = figure(5.2, 2, sharex=True)
    for axes, y, label, unit in zip(
        panels, ("ms", "bytes"), ("ms per token", "memory, MB"), (1, 1e6), strict=True
    ):
        for name, (x, values) in curves(found, "mechanism", "context", y).items():
            if name in labels:
                color = COLORS[name.split()[0]]
                line = ":" if "window" in name else "-"
                values = [value / unit for value in values]
                axes.plot(x, values, f"o{line}", color=color, label=labels[name])
        axes.set(yscale="log", ylabel=label)
        token_ticks(axes, [512, 1024, 4096, 16_384, 65_536])
    panels[-1].set(xlabel="tokens before it")
    legend(picture, panels[0])
    return picture


def memory():
    """Plots gigabytes that a TPU's compiler plans for a training step."""
    found = [
        x for x in rows("tpu", chip="v5e", layers=12, window=None)
        if x["mechanism"] == "softmax" or x.get("block_size") == TPU_BLOCK
    ]  # fmt: skip
    labels = {"softmax": "softmax", "favorpp": "favorpp 256"}
    picture, (axes,) = figure(3)
    for name, points in curves(found, "mechanism", "tokens", "others GB").items():
        axes.plot(*points, "o-", color=COLORS[name], label=labels[name])
    axes.axhline(15.75, color=COLORS["control"], ls="--", label="memory of a v5e")
    axes.set(xlabel="tokens", ylabel="GB, one training step")
    axes.set_title("GPT-2 small")
    legend(picture, axes, columns=3)
    return picture


def quality():
    """Plots the quality of the shipped maps of MiniLM, and their speed by length."""
    shipped = pathlib.Path(__file__).parents[1] / "keras_rfattn" / "maps" / "shipped"
    scores = {"softmax": 1.0}
    for file in sorted(shipped.glob("minilm_*_64/maps.json")):
        manifest = json.loads(file.read_text())
        metrics, (first, *_) = manifest["metrics"], manifest["layers"]
        name = f"{first['mechanism']} {first['feature_map']['config']['num_features']}"
        scores[name] = metrics["share_of_softmax"]
        control = metrics["control_zero_attention"] / metrics["softmax"]
    picture, (above, below) = figure(4, 2)
    bars = [*scores.items(), ("no attention", control)]
    for i, (name, score) in enumerate(reversed(bars)):
        color = COLORS.get(name.split()[0], COLORS["control"])
        above.barh(i, score, color=color)
        above.text(score - 0.01, i, f"{score:.3f}", color="w", ha="right", va="center")
    # A hedgehog has two features for each of its vectors: both sets have 64 features.
    names = [name.removesuffix(" 32").removesuffix(" 64") for name, _ in bars]
    above.set_yticks(range(len(bars)), reversed(names))
    above.set(xlim=(0, 1.02))
    above.set_title("quality relative to softmax: rank correlation, STS")
    wanted = {"model": "bert", "training": False, "dropout": 0.0}
    found = map(tokens_of, rows("models", backend="jax", **wanted))
    # Each row has the ratio of two times of one run.
    for name, points in curves(found, "mechanism", "tokens", "times as fast").items():
        if name in scores:
            label, *_ = name.split()
            below.plot(*points, "o-", color=COLORS[label], label=label)
    below.set_title("speed relative to softmax: JAX, one CPU thread")
    below.set(xlabel="tokens of a sequence", ylim=(0, None))
    token_ticks(below, [64, 128, 512, 2048])
    legend(picture, below, columns=3)
    return picture


def decoders():
    """Plots perplexity and recall of SmolLM2 against memory, and time by context."""
    found = rows("uptrain_decoder", folder=OF_RECIPES, heads="selected")
    # Maps of phase 3 that predict next tokens, as trained and as shipped.
    names = "--load more_maps", "--load smollm2_heads"
    found = [x for x in found if any(name in x["command"] for name in names)]
    found += rows("uptrain_decoder", folder=OF_RECIPES, share=1.0)
    found = [x for x in found if x["tokens"] in (2048, 20_480)]  # not at 8192
    picture, (quality, answers, time) = figure(6.4, 3)
    for text, color in (("tinyshakespeare", "tab:blue"), ("sotu", "tab:cyan")):
        by_memory = memory_of([x for x in found if x.get("text") == text], "whole")
        (softmax,) = by_memory[1]
        more = [[100 * (y / softmax - 1) for y in x] for x in by_memory.values()]
        label = {"sotu": "messages"}.get(text, text)
        band(quality, list(by_memory), more, label, color)
    quality.set(ylabel="perplexity, % more")
    quality.set_title("with some heads softmax, relative to all")
    some = [
        {**x, "at once": x.get("exact", x["accuracy"])}
        for x in found
        if x["test"] == "passkey" and x["tokens"] == 2048
    ]
    by_memory = memory_of(some, "at once")
    band(answers, list(by_memory), list(by_memory.values()), "pass key", "tab:red")
    answers.set(ylabel="found at 2048 tokens", ylim=(0, 1.05))
    answers.set_xlabel("memory of a sequence of 8192 tokens, relative to softmax")
    times = rows("decoding", backend="jax", model="smollm2")
    labels = {None: "softmax", 27: "27 of 90", 18: "18 of 90 heads softmax"}
    colors = {None: "black", 27: "tab:green", 18: "tab:blue"}
    for name, points in curves(times, "mechanism", "context", "ms").items():
        heads = int(name.split()[-1]) if "window 240" in name else None
        if name == "softmax" or heads is not None:
            time.plot(*points, "o-", color=colors[heads], label=labels[heads])
    time.set(xlabel="tokens before it", ylabel="ms per token (JAX)", ylim=(0, None))
    time.set_xticks([2048, 8192], ["2,048", "8,192"])
    for axes in (quality, answers, time):
        axes.legend()
    return picture


def memory_of(found, name):
    """Returns `{share of softmax's memory: values of all seeds}`, by memory."""
    values = {}
    for row in sorted(found, key=lambda row: row.get("bytes", float("inf"))):
        share = row["bytes"] / row["bytes of softmax"] if "bytes" in row else 1
        values.setdefault(round(share, 3), []).append(row[name])
    return values


def long_documents():
    """Plots by length which documents MiniLM finds; seeds are a band."""
    found = rows("embed_long_documents", folder=OF_RECIPES)
    arms = {
        "cut": ("cut at 512", "cut", "-"),
        "mean": ("mean of chunks of 512", "mean of chunks", "-"),
        "best": ("best chunk of 512", "best chunk", ":"),
        "best of 128": ("best chunk of 128", "best chunk", "-"),
        "linear": ("linear", "favorpp_learned", ":"),
        "linear, long": ("trained for length", "favorpp_learned", "-"),
    }
    tests = {"passkey": "pass keys found", "planted": "planted sentences found"}
    picture, panels = figure(5.6, 2, sharex=True)
    for axes, (test, label) in zip(panels, tests.items(), strict=True):
        for name, (row_of_table, method, line) in arms.items():
            by_length = {}
            for row in sorted(found, key=lambda row: row.get("tokens", 0)):
                if row.get("arm") == name and row["test"] == test:
                    by_length.setdefault(row["tokens"], []).append(row["score"])
            values = list(by_length.values())
            band(axes, list(by_length), values, row_of_table, COLORS[method], line)
        chance = next(row["chance"] for row in found if row.get("test") == test)
        axes.axhline(chance, color=COLORS["control"], ls="--", label="chance")
        token_ticks(axes, [256, 512, 1024, 2048, 4096, 8192])
        axes.set(ylabel=label, ylim=(-0.05, 1.05))
    panels[-1].set(xlabel="tokens of a document")
    legend(picture, panels[0])
    return picture


def band(axes, x, values, label, color, line="-"):
    """Plots the mean of the values at each x, and their range."""
    means = [sum(y) / len(y) for y in values]
    axes.plot(x, means, f"o{line}", markersize=4, label=label, color=color)
    low, high = [min(y) for y in values], [max(y) for y in values]
    axes.fill_between(x, low, high, color=color, alpha=0.2)


def main(folder):
    for draw in (decoding, memory, quality, decoders, long_documents):
        save(draw(), folder / f"{draw.__name__}.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = pathlib.Path(__file__).parent.parent / "docs/pages/images"
    parser.add_argument("--folder", type=pathlib.Path, default=default)
    main(parser.parse_args().folder)
