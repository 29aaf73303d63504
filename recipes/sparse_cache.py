"""Keep the keys exact that the state of a linear decoder recalls worst.

In "LoLA: Low-Rank Linear Attention With Sparse Caching" (McDermott, Heath and Parhi,
2025), keys that leave the window compete with those that were kept before. A number of
keys of each head, those with the largest self-recall error `‖v - φ(k)ᵀH / φ(k)ᵀs‖²`,
stay exact, beside the window and the sinks, and all others are added to the state
`(H, s)`. Nothing trains.

    KERAS_BACKEND=torch python recipes/sparse_cache.py --data-dir DIR --speeches 0 \
        --load smollm2_heads_20 --selection recipes/results/smollm2_heads.json \
        --rows 5 --lengths 2048 --tests positions passkey "needle 1"

All flags but `--arms` and `--check` are those of `uptrain_decoder.py`. The arms are the
set as it is; 128 or 64 kept keys; and controls: a uniform sample of all keys that left
the window, a window with as many bytes as 128 kept keys, and more softmax heads. All
arms see one example before the next one. `--check` compares no kept keys with the
library's own attention, and only kept keys with softmax.

When it happens. A block of `window` keys leaves at once, as in the library, when no
later query has it in its own window or the one before. At that time the error of all
candidates is measured, also of those kept before, against the state that would hold
every key that has left so far, the candidates included. A state without them would be
empty for the first block, and a state with one candidate alone would recall that one
exactly. φ(k) are the features of keys, although the maps have others for queries. All
query heads of a key/value head share the kept keys.
"""

import argparse
import sys

# What differs from the set as it is: keys of a head that stay exact, whether these are
# drawn at random, the window, and the number of key/value heads that are softmax.
ARMS = {
    "as it is": {},
    "128 keys": {"kept": 128},
    "64 keys": {"kept": 64},
    "128 random keys": {"kept": 128, "random": True},
    "window 304": {"window": 304},
    "22 heads": {"heads": 22},
    "24 heads": {"heads": 24},
}

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
parser.add_argument("--check", action="store_true",
                    help="compare with the library and with softmax")  # fmt: skip
flags, sys.argv[1:] = parser.parse_known_args()

import dataclasses

import numpy as np
import uptrain_decoder as decoder
from common import options, recall
from common.program import tell
from keras import ops

import keras_rfattn
from keras_rfattn.layers.attention import Attention
from keras_rfattn.layers.recording import linear_layers, recording, run
from keras_rfattn.models.survey import survey
from keras_rfattn.ops import sums
from keras_rfattn.ops.kernel_attention import read_exactly
from keras_rfattn.ops.layout import heads_first, merge_heads, split_heads

LENGTHS = 2048, 8192  # tokens for which a state's bytes are counted


def main(args):
    model, encode = decoder.load(args)
    if args.load:
        keras_rfattn.load_maps(model, args.load)
    else:
        decoder.linear(args, model, 0, args.mechanism, args.num_features)
    options.change(model, window=args.window)
    selection = decoder.selected(args, model, encode, 0)
    if flags.check:
        tell(args, {"test": "check", **check(args, model, encode)})
    layers = [(site.path, site.layer, site.layer.options) for site in survey(model)]
    arms = {name: ARMS[name] for name in flags.arms}
    for test in args.tests:
        found = {name: [] for name in arms}
        caches = {name: SparseCache(**arm) for name, arm in arms.items()}
        for prompt, answer in examples_of(args, encode, test):
            ids = np.concatenate([prompt, answer])[None]
            for name, arm in arms.items():
                change(layers, selection, **arm)
                with hooked(model, caches[name] if caches[name].kept else None):
                    found[name].append(recall.score(model, ids, len(prompt)))
                log_probs, is_right = found[name][-1]
                print(test, name, log_probs.mean(), is_right.all(), flush=True)
        for name, arm in arms.items():
            change(layers, selection, **arm)
            about = {"test": test, "arm": name, "examples": len(found[name])}
            tell(args, about | bytes_of(model, **arm) | summary(found[name]))


def examples_of(args, encode, test):
    """Returns pairs of a prompt and an answer; in a text, all but a token is answer."""
    if test == "positions":
        texts = [decoder.wikitext(args, "test")]
        rows = decoder.rows_of(texts, encode, args.tested, args.rows)
        return [(row[:1], row[1:]) for row in rows]
    examples = decoder.recall_test(args, encode, test, args.lengths[0])
    # Not by depth, so that those of a run that is stopped are a fair sample.
    return [examples[i] for i in np.random.default_rng(0).permutation(len(examples))]


def summary(scores):
    """Returns what the results have of all examples together."""
    log_probs = np.concatenate([x.ravel() for x, _ in scores]).astype("float64")
    return {
        "accuracy": float(np.mean([is_right.all() for _, is_right in scores])),
        "log_likelihood": float(log_probs.mean()),
        "perplexity": float(np.exp(-log_probs.mean())),
    }


def change(layers, selection, window=None, heads=None, **others):
    """Gives `layers`, `(path, layer, options)`, the window and the heads of an arm."""
    share = heads and heads / sum(map(len, selection.scores.values()))
    chosen = selection.with_share(share).heads if heads else {}
    for path, layer, first in layers:
        kept = chosen.get(path, ()) if heads else first.softmax_heads
        layer.options = dataclasses.replace(
            first, window=window or first.window, softmax_heads=kept
        )


def bytes_of(model, kept=0, **others):
    """Returns the softmax heads, and bytes of a state relative to softmax's cache."""
    row, numbers = {"softmax heads": 0}, 0
    for layer in linear_layers(model):
        (num_heads, head_dim), exact = layer._kv_shape(), layer.options.softmax_heads
        row["softmax heads"] += len(exact)
        numbers += (num_heads - len(exact)) * kept * 2 * head_dim
    for length in LENGTHS:
        about = keras_rfattn.describe_attention(model, length=length)
        # Keys and values are float32.
        total = about.state_bytes + 4 * numbers
        row[f"bytes at {length}"] = round(total / about.cache_bytes, 4)
    return row


def hooked(model, function):
    """Context manager in which a function computes what linear heads compute."""
    return recording([(layer, function) for layer in linear_layers(model)])


def check(args, model, encode):
    """Returns the largest differences of the last states from what they must equal."""
    ids = decoder.rows_of([decoder.wikitext(args, "test")], encode, args.tested, 1)

    def difference(*functions):
        states = []
        for function in functions:
            with hooked(model, function):
                x = run(model.backbone, decoder.inputs(ids))
            states.append(ops.convert_to_numpy(x))
        return float(np.abs(states[0] - states[1]).max())

    return {
        "from the library": difference(SparseCache(0), None),
        "from softmax": difference(SparseCache(args.tested), Attention.softmax),
    }


class SparseCache:
    """Computes the attention of linear heads with some kept keys.

    Shapes use B for the batch, K for key/value heads, G for query heads of each, T for
    tokens, and S for some of the keys.
    """

    def __init__(self, kept=0, random=False, **others):
        self.kept = kept
        self.generator = np.random.default_rng(0) if random else None

    def __call__(self, call):
        """Returns the output `(B, T, K · G, V)` of an `Attention`."""
        query, key, bound = call.prepared()
        local, num_kv_heads = call.local(query, key, bound), key.shape[2]
        if call.mask.key_mask is not None or not (call.mask.causal and local.sliding):
            raise SystemExit("Needs causal attention, a sliding window, no padding.")
        features = bound.query_features(query), bound.key_features(key)
        features, key_features = (
            heads_first(x, num_kv_heads).compute() for x in features
        )
        tokens = local.query, local.key, call.value
        query, key, value = (split_heads(x, num_kv_heads) for x in tokens)
        (batch, length, num_heads), size = call.query.shape[:3], local.window
        groups, lead = num_heads // num_kv_heads, (batch, num_kv_heads)

        def places(*bounds):
            return ops.broadcast_to(ops.arange(*bounds), (*lead, bounds[1] - bounds[0]))

        far, kept = sums.no_sums_of(key_features, lead, value), places(0, 0)
        outputs, scores = [], None
        if self.generator is not None:
            # One for each key, so that those that are kept are a uniform sample.
            scores = self.generator.random((*lead, length, 1), "float32")
            scores = ops.convert_to_tensor(scores)
        for start in range(0, length, size):
            stop = min(start + size, length)
            exact = [places(max(start - size, 0), stop)]
            if start >= 2 * size:
                first = max(start - 2 * size, local.sinks)
                leaving = ops.concatenate([kept, places(first, start - size)], axis=2)
                far, kept = self.keep(far, leaving, key_features, value, scores)
                exact += [places(0, local.sinks), kept]
            exact = ops.concatenate(exact, axis=2)
            rows = ops.repeat(ops.arange(start, stop), groups)
            visible = exact[:, :, None] <= rows[:, None]
            row = slice(start * groups, stop * groups)
            near = query[:, :, row], taken(key, exact), taken(value, exact), visible
            near = read_exactly(local.kernel, *near)
            own = features.of_tokens(lambda x, row=row: x[:, :, row])
            reading = sums.combine(sums.read(far, own, value.dtype), near)
            outputs.append(sums.normalize(reading, own))
        return merge_heads(ops.concatenate(outputs, axis=2), num_heads, length)

    def keep(self, far, places, features, value, scores):
        """Returns the next sums of far keys, and the places of kept keys."""
        if scores is None:
            error = self_recall_error(far, places, features, value)
        else:
            error = taken(scores, places)[..., 0]
        order = ops.argsort(-error, axis=-1)
        places = ops.take_along_axis(places, order, axis=2)
        kept, added = places[:, :, : self.kept], places[:, :, self.kept :]
        if added.shape[2]:
            far = with_keys(far, added, features, value)
        return far, kept


def self_recall_error(far, places, features, value):
    """Returns the error `(B, K, S)` of values that a state with them recalls."""
    whole = with_keys(far, places, features, value)
    asked = features.of_tokens(lambda x: taken(x, places))
    recalled = sums.normalize(sums.read(whole, asked, value.dtype), asked)
    return ops.sum(ops.square(taken(value, places) - recalled), axis=-1)


def with_keys(far, places, features, value):
    """Returns the sums of far keys with the keys at some places added."""
    features = features.of_tokens(lambda x: taken(x, places))
    return sums.merge_sums(far, sums.summarize(features, taken(value, places)))


def taken(x, places):
    """Returns the tokens of `(B, K, T, ·)` at the places `(B, K, S)`."""
    return ops.take_along_axis(x, places[..., None], axis=2)


if __name__ == "__main__":
    main(decoder.args)
