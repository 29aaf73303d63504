"""Uptrain a softmax GPT-2 to a linear one with a tenth of its training tokens.

Chefs' Random Tables, table 2 ("Uptrain", Likhosherstov et al., 2022) and Hedgehog
(Zhang et al., 2024) for a causal model. A GPT-2 of KerasHub is trained on characters
with softmax attention, and `replace_attention` makes it linear. Then three phases
follow, each with a share of the softmax model's training tokens: 4 % go to `uptrain`
(stages "calibrate", "attention" and "features"), 4 % to training the whole model on the
next token, and 2 % to the same at a context of 4096, eight times as long.

    python recipes/uptrain_gpt2.py --data-dir DIR --seeds 0 1 2

DIR holds `wikitext2/{valid,test}.txt` (WikiText-2). The first 90 % of valid are for
training, and test is for perplexity: the same 131,072 characters at every context.
Positions are sinusoids that are not trained, because a context of 512 would train only
512 rows of a table of 4096.

Each perplexity is compared with softmax before and after as many more tokens,
`one_feature` (weights that do not depend on the query, trained in the same way), the
mean of V, zero attention, and, for windows, the window and the features alone. Softmax
is trained once a seed and kept in `--checkpoints`. Cost: 9 minutes a seed for softmax
and 4 a mechanism, on one core. Seen (docs/pages/lab/uptraining.md): perplexity is 1
to 4 % above that of softmax with a window, and 9 % and more without.
"""

import pathlib
import time

from common.flags import make_parser, parse

# From name to feature map, its arguments, and window.
MECHANISMS = {
    "softmax": (None, {}, None),
    "favorpp_learned": ("favorpp_learned", {"num_features": 64}, None),
    "hedgehog": ("hedgehog", {"num_features": 64}, None),
    "favorpp": ("favorpp", {"num_features": 256}, None),
    "favorplus": ("favorplus", {"num_features": 256}, None),
    "polysketch_learned": ("polysketch_learned", {"num_features": 16}, None),
    "elu": ("elu", {}, None),
    "relu": ("relu", {"num_features": 256}, None),
    "favorpp_learned + local": ("favorpp_learned", {"num_features": 64}, 64),
    "hedgehog + local": ("hedgehog", {"num_features": 64}, 64),
    "one_feature": ("one_feature", {}, None),
}
# Maps whose weights train in stage "attention"; for others, queries and keys train.
TRAINED = ("favorpp_learned", "hedgehog", "polysketch_learned", "one_feature")
FULL = {
    "context": 512, "long": 4096, "tested": 131_072, "steps": 1300,
    "model": {"num_layers": 3, "num_heads": 2, "hidden_dim": 128,
              "intermediate_dim": 512},
}  # fmt: skip
SMOKE = {
    "context": 16, "long": 64, "tested": 256, "steps": 50,
    "model": {"num_layers": 1, "num_heads": 1, "hidden_dim": 8, "intermediate_dim": 8},
}  # fmt: skip
BATCH, RATE, WEIGHT_DECAY = 4, 1e-3, 0.05
# Shares of the softmax model's training tokens for the three phases, and settings.
UPTRAIN, TUNE, TUNE_LONG = 0.04, 0.04, 0.02
TUNE_BATCH, TUNE_RATE, POINTS = 2, 1e-3, 4

# Flags are parsed before the slow imports.
parser = make_parser(
    __doc__, data_dir=pathlib.Path, mechanisms=list(MECHANISMS), seeds=[0],
    results="uptrain_gpt2.jsonl",
)  # fmt: skip
parser.add_argument("--checkpoints", type=pathlib.Path, default="checkpoints",
                    help="folder for the softmax models")  # fmt: skip
parser.set_defaults(**FULL)
args = parse(parser, **SMOKE)

import common.control_maps  # noqa: F401 (registers "one_feature")
import keras
import keras_hub
import numpy as np
from common import characters, narrow
from common.results import record

import keras_rfattn
from keras_rfattn import diagnostics, feature_maps


def main(args):
    args.tokens = args.steps * BATCH * args.context
    text = characters.load(args.data_dir)
    tests = [pieces_of_test(args, text, n) for n in (args.context, args.long)]
    for seed in args.seeds:
        weights, softmax = pretrained(args, text, tests, seed)
        for name in args.mechanisms:
            row = converted(args, name, text, tests, seed, weights)
            row |= softmax | {"gap": row["perplexity"] / softmax["softmax"] - 1}
            record(args, row)
            print_row(row)


def pieces_of_test(args, text, length):
    """Cuts the same test characters into rows, each with the character that follows."""
    starts = np.arange(0, args.tested, length)
    return text.test[starts[:, None] + np.arange(length + 1)]


def gpt2(args, text, seed):
    """Builds a GPT-2 whose positions are fixed sinusoids."""
    keras.utils.set_random_seed(seed)
    backbone = keras_hub.models.GPT2Backbone(
        text.vocabulary, max_sequence_length=args.long, dropout=0.0, **args.model
    )
    positions = backbone.position_embedding
    narrow.prepare(backbone, backbone.hidden_dim, positions, args.context)
    return compiled(keras_hub.models.GPT2CausalLM(backbone))


def compiled(model, optimizer="sgd"):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, weighted_metrics=[])
    return model


def pretrained(args, text, tests, seed):
    """Returns `(weights, perplexities)` of softmax, from a file if there is one."""
    model = gpt2(args, text, seed)
    name = f"gpt2_{seed}_{args.steps}x{BATCH}x{args.context}.weights.h5"
    if not (args.checkpoints / name).exists():
        start, generator = time.time(), np.random.default_rng([seed, 0])
        count = args.steps * BATCH
        rows = characters.pieces(text.train, count, args.context + 1, generator)
        points = fit(model, rows, BATCH, RATE, tests[0])
        row = {"mechanism": "softmax, pretraining", "seed": seed, "points": points}
        minutes = round((time.time() - start) / 60, 2)
        record(args, row | {"minutes": minutes})
        args.checkpoints.mkdir(parents=True, exist_ok=True)
        model.save_weights(args.checkpoints / name)
    model.load_weights(args.checkpoints / name)
    found = [perplexity(model, test) for test in tests]
    return model.get_weights(), {"softmax": found[0], "softmax long": found[1]}


def converted(args, name, text, tests, seed, weights):
    """Makes attention linear, uptrains and tunes; returns a row of results."""
    start, generator = time.time(), np.random.default_rng([seed, 1])
    model = gpt2(args, text, seed)
    model.set_weights(weights)

    def some(share, batch, length):
        count = max(2, round(share * args.tokens / (batch * length))) * batch
        return characters.pieces(text.train, count, length + 1, generator)

    first, second = (some(x, TUNE_BATCH, args.context) for x in (UPTRAIN, TUNE))
    row = {"mechanism": name, "seed": seed, "softmax tokens": args.tokens}
    points, seen = [], 0
    if name == "softmax":
        second = np.concatenate([first, second])
    else:
        replace(model, name, seed)
        points.append((0, perplexity(model, tests[0])))
        report = keras_rfattn.uptrain(
            model, inputs(first), steps=len(first) // TUNE_BATCH, seed=seed,
            trainable="maps" if MECHANISMS[name][0] in TRAINED else "query_key",
            batch_size=TUNE_BATCH, verbose=2,
        )  # fmt: skip
        print(report, flush=True)
        seen = first[:, 1:].size
        points.append((seen, perplexity(model, tests[0])))
    points += fit(model, second, TUNE_BATCH, TUNE_RATE, tests[0], seen)
    row |= {"points": points, "perplexity": points[-1][1]}
    row["long before"] = perplexity(model, tests[1])
    if name != "softmax":
        row["parts"] = vars(diagnostics.attribute(model, tests[0], perplexity))
    rows = some(TUNE_LONG, 1, args.long)
    row["long after"] = fit(model, rows, 1, TUNE_RATE, tests[1], parts=1)[-1][1]
    if name != "softmax":
        # Evaluates only 8 rows, as quadratic attention is slow at this length.
        row["long parts"] = vars(diagnostics.attribute(model, tests[1][:8], perplexity))
    return row | {"minutes": round((time.time() - start) / 60, 2)}


def replace(model, name, seed):
    feature_map, arguments, window = MECHANISMS[name]
    feature_map = feature_maps.get(feature_map, seed=seed, **arguments)
    keras_rfattn.replace_attention(model, feature_map, window=window, seed=seed)


def inputs(rows):
    """Returns model inputs from rows whose last token is the one to predict."""
    return {"token_ids": rows[:, :-1], "padding_mask": np.ones_like(rows[:, :-1])}


def fit(model, rows, batch, rate, test, seen=0, parts=POINTS):
    """Trains on the next token; returns `(tokens seen, perplexity)` along the way."""
    steps, points = len(rows) // batch, []
    warmup = max(1, steps // 20)
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, steps - warmup, warmup_target=rate, warmup_steps=warmup
    )
    compiled(model, keras.optimizers.AdamW(schedule, WEIGHT_DECAY, clipnorm=1.0))
    for some in np.array_split(rows.reshape(steps, batch, -1), parts):
        some = some.reshape(-1, rows.shape[-1])
        model.fit(inputs(some), some[:, 1:], batch_size=batch, verbose=2)
        seen += some[:, 1:].size
        points.append((seen, perplexity(model, test)))
    return points


def perplexity(model, rows):
    """Returns the perplexity per character."""
    batch = max(1, 4096 // rows.shape[1])
    loss = model.evaluate(inputs(rows), rows[:, 1:], batch_size=batch, verbose=0)
    return float(np.exp(loss))


def print_row(row):
    print(
        f"{row['mechanism']:24} seed {row['seed']} perplexity {row['perplexity']:.3f} "
        f"{row['gap']:+.1%}, at the long context {row['long before']:.3f}, tuned "
        f"{row['long after']:.3f}; {row['minutes']:.1f} min",
        flush=True,
    )
    for key in ("parts", "long parts"):
        found = row.get(key, {}).items()
        print(f"  {key}:", ", ".join(f"{k} {x:.3f}" for k, x in found), flush=True)


if __name__ == "__main__":
    main(args)
