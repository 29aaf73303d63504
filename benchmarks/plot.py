"""Draw the figures of the documentation from `benchmarks/results`.

    pip install ".[recipes]"
    python benchmarks/plot.py [--folder docs/pages/images]

Nothing is measured here. `models.py`, `peers.py`, `decoding.py` and `tpu.py`, and the
recipes `uptrain_decoder.py` and `embed_long_documents.py`, have written the rows. Of
rows that differ only in measured values, the last one counts.
"""

import argparse
import json
import pathlib

RESULTS = pathlib.Path(__file__).parent / "results"
OF_RECIPES = pathlib.Path(__file__).parents[1] / "recipes" / "results"
MEASURED = ("ms", "least", "times as fast", "ours times as fast", "share of matmul",
            "bytes", "commit", "others GB", "GB accessed", "seconds to compile",
            "tera-operations", "weights GB", "refused",
            "score", "by quarter", "command", "title", "passage", "party")  # fmt: skip
# Shapes of `models.py` with MiniLM's shape.
LENGTHS = ("8 × 64", "8 × 128", "2 × 512", "1 × 2048")
MARKERS = "os^D"
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


def speed(plt):
    """Plots the speed-up of whole models with presets' dropout by length."""
    names = ("jax", "torch", "tensorflow")
    wanted = {"model": "bert", "training": False, "dropout": 0.1}
    found = {x: rows("models", backend=x, **wanted) for x in names}
    found = {k: list(map(tokens_of, x)) for k, x in found.items() if x}
    figure, all_axes = plt.subplots(1, len(found), figsize=(5 * len(found), 4),
                                    sharey=True, squeeze=False)  # fmt: skip
    colors, lines = {}, {}
    for axes, (backend, some) in zip(all_axes[0], found.items(), strict=True):
        for name, points in curves(
            some, "mechanism", "tokens", "times as fast"
        ).items():
            if name != "softmax":
                # A mechanism keeps its color even if a backend lacks others.
                color = colors.setdefault(name, f"C{len(colors)}")
                (lines[name],) = axes.plot(*points, marker="o", color=color)
        axes.axhline(1, color="black", linewidth=1)
        axes.set(xscale="log", yscale="log", title=backend, xlabel="tokens")
        axes.set_xticks([64, 128, 512, 2048], ["64", "128", "512", "2048"])
        axes.set_yticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
        axes.minorticks_off()
    all_axes[0][0].set_ylabel("times as fast as softmax, MiniLM's shape")
    all_axes[0][-1].legend(lines.values(), lines, fontsize=7, loc="upper left")
    return figure


def peers(plt):
    """Plots causal attention, forward and backward, and its peers by length."""
    found = rows("peers", causal=True, direction="forward + backward")
    figure, axes = plt.subplots(figsize=(6, 4))
    for backend in ("jax", "torch"):
        some = [x for x in found if x["backend"] == backend]
        for name, points in curves(some, "name", "length", "ms").items():
            if name == "ours":
                axes.plot(*points, marker="o", label=f"ours, {backend}")
            elif backend == "torch":
                axes.plot(*points, marker="o", linestyle="--", label=name)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms, one thread")
    axes.set_title("causal attention, forward and backward")
    axes.legend(fontsize=8)
    return figure


def decoding(plt):
    """Plots milliseconds and bytes of one more token by context."""
    found = [x for x in rows("decoding", backend="jax", batch=1) if "model" not in x]
    figure, all_axes = plt.subplots(1, 2, figsize=(10, 4))
    for axes, (y, label) in zip(
        all_axes, (("ms", "ms a token"), ("bytes", "bytes kept")), strict=True
    ):
        for name, points in curves(found, "mechanism", "context", y).items():
            axes.plot(*points, marker="o", label=name)
        axes.set(xscale="log", yscale="log", xlabel="tokens before", ylabel=label)
    all_axes[1].legend(fontsize=8)
    return figure


def memory(plt):
    """Plots gigabytes that a TPU's compiler plans for a training step."""
    found = [
        x for x in rows("tpu", chip="v5e", layers=12, window=None)
        if x["mechanism"] == "softmax" or x.get("block_size") == TPU_BLOCK
    ]  # fmt: skip
    figure, axes = plt.subplots(figsize=(6, 4))
    for name, points in curves(found, "mechanism", "tokens", "others GB").items():
        axes.plot(*points, marker="o", label=name)
    axes.axhline(15.75, color="black", linewidth=1, label="memory of a v5e")
    axes.set(xlabel="tokens", ylabel="GB, GPT-2 small, one training step")
    axes.legend(fontsize=8)
    return figure


def quality(plt):
    """Plots the quality of the shipped maps of MiniLM against time, by length."""
    shipped = pathlib.Path(__file__).parents[1] / "keras_rfattn" / "maps" / "shipped"
    shares, control = {"softmax": 1.0}, None
    for file in sorted(shipped.glob("minilm_*/maps.json")):
        manifest = json.loads(file.read_text())
        metrics, (first, *_) = manifest["metrics"], manifest["layers"]
        vectors = first["feature_map"]["config"]["num_features"]
        shares[f"{first['mechanism']} {vectors}"] = metrics["share_of_softmax"]
        control = metrics["control_zero_attention"] / metrics["softmax"]
    wanted = {"model": "bert", "training": False, "dropout": 0.0}
    found = map(tokens_of, rows("models", backend="jax", **wanted))
    figure, axes = plt.subplots(figsize=(7, 3.6))
    for name, (_, ms) in curves(found, "mechanism", "tokens", "ms").items():
        if name in shares:
            line = axes.plot(ms, [shares[name]] * len(ms), label=name)
            for x, marker in zip(ms, MARKERS, strict=True):
                axes.plot(x, shares[name], marker, color=line[0].get_color())
    for length, marker in zip(LENGTHS, MARKERS, strict=True):
        axes.plot([], [], marker, color="black", label=f"{length} tokens")
    axes.axhline(control, color="black", linewidth=1, label="control: zero attention")
    axes.set(xscale="log", ylim=(0.88, 1.015))
    axes.set_xticks(
        [200, 500, 1000, 2000, 4000], ["200", "500", "1000", "2000", "4000"]
    )
    axes.minorticks_off()
    axes.set_xlabel("ms, forward pass (JAX, one core)")
    axes.set_ylabel("quality relative to softmax, STS")
    axes.set_title("MiniLM, by batch × tokens", fontsize=10)
    axes.legend(fontsize=8, loc="center right", ncols=2)
    return figure


def decoders(plt):
    """Plots what SmolLM2 recalls, by position and by length; seeds are a band."""
    found = rows("uptrain_decoder", folder=OF_RECIPES)
    names = "linear", "hybrid", "softmax"
    last = "4096 to 8192"
    positions = [x for x in found if x.get("text") == "sotu" and last in x]
    figure, (first, *others) = plt.subplots(1, 3, figsize=(12, 3.6))
    for name in names:
        some = [x for x in positions if x["model"] == name]
        places = [x for x in some[0] if " to " in x]
        values = [[row[place] for row in some] for place in places]
        band(first, [int(x.split()[-1]) for x in places], values, name)
    first.set(xlabel="position, up to", ylabel="perplexity, presidential messages")
    for axes, test in zip(others, ("passkey", "needle 1"), strict=True):
        for name in names:
            some = [x for x in found if x["test"] == test and x["model"] == name]
            by_length = {}
            for row in sorted(some, key=lambda row: row["tokens"]):
                by_length.setdefault(row["tokens"], []).append(row["accuracy"])
            band(axes, list(by_length), list(by_length.values()), name)
        axes.set(xlabel="tokens", ylabel=f"right answers, {test}", ylim=(-0.05, 1.05))
    for axes in (first, *others):
        axes.set_xscale("log", base=2)
    first.legend(fontsize=8)
    return figure


def long_documents(plt):
    """Plots by length which documents MiniLM finds; seeds are a band."""
    found = rows("embed_long_documents", folder=OF_RECIPES)
    names = ("cut", "mean", "best", "best of 128", "linear", "linear, long")
    tests = {"passkey": "pass keys found", "planted": "planted sentences found"}
    figure, all_axes = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True)
    for axes, (test, label) in zip(all_axes, tests.items(), strict=True):
        for name in names:
            by_length = {}
            for row in sorted(found, key=lambda row: row.get("tokens", 0)):
                if row.get("arm") == name and row["test"] == test:
                    by_length.setdefault(row["tokens"], []).append(row["score"])
            band(axes, list(by_length), list(by_length.values()), name)
        chance = next(row["chance"] for row in found if row.get("test") == test)
        axes.axhline(chance, color="black", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set(xlabel="tokens of a document", ylabel=label, ylim=(-0.05, 1.05))
    all_axes[1].legend(fontsize=8)
    return figure


def band(axes, x, values, label):
    """Plots the mean of the values at each x, and their range."""
    (line,) = axes.plot(x, [sum(y) / len(y) for y in values], marker="o", label=label)
    low, high = [min(y) for y in values], [max(y) for y in values]
    axes.fill_between(x, low, high, color=line.get_color(), alpha=0.2)


def main(folder):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    for draw in (speed, peers, decoding, memory, quality, decoders, long_documents):
        figure = draw(plt)
        figure.tight_layout()
        figure.savefig(folder / f"{draw.__name__}.png", dpi=80)
        print(folder / f"{draw.__name__}.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = pathlib.Path(__file__).parent.parent / "docs/pages/images"
    parser.add_argument("--folder", type=pathlib.Path, default=default)
    main(parser.parse_args().folder)
