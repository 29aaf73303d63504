"""Uptrain a softmax GPT-2 to a linear one with 8 % of its training tokens.

Chefs' Random Tables, table 2 ("Uptrain", Likhosherstov et al., 2022) and Hedgehog
(Zhang et al., 2024) for a causal model. A GPT-2 of KerasHub is trained on characters
with softmax, and `replace_attention` makes it linear. Then 4 % of the softmax model's
training tokens go to `uptrain`, and 4 % to training all weights on the next token.

    python recipes/uptrain_gpt2.py --data-dir DIR --seeds 0 1 2

DIR holds `wikitext2/{valid,test}.txt` (WikiText-2): valid is for training. Controls are
softmax before and after as many more tokens, `one_feature` (weights that do not depend
on the query, trained in the same way), the mean of V, zero attention, and, for windows,
the window and the features alone. Cost: 9 minutes a seed for softmax and 3 a mechanism,
on one core. Expected (docs/pages/results/quality.md): perplexity is 1 to 3 % above that
of softmax with a window, and 9 to 13 % without.
"""

import pathlib
import time

from common.program import make_parser, parse, tell

# From name to feature map, its arguments, and window.
MECHANISMS = {
    "softmax": (None, {}, None),
    "favorpp_learned": ("favorpp_learned", {"num_features": 64}, None),
    "favorpp_learned + local": ("favorpp_learned", {"num_features": 64}, 64),
    "one_feature": ("one_feature", {}, None),
}
SIZES = {"num_layers": 3, "num_heads": 2, "hidden_dim": 128, "intermediate_dim": 512}
TINY = {"num_layers": 1, "num_heads": 1, "hidden_dim": 8, "intermediate_dim": 8}
BATCH, TUNE_BATCH, RATE, WEIGHT_DECAY = 4, 2, 1e-3, 0.05
UPTRAIN, TUNE = 0.04, 0.04  # shares of the softmax model's training tokens

parser = make_parser(
    __doc__, data_dir=pathlib.Path, mechanisms=list(MECHANISMS), seeds=[0],
)  # fmt: skip
parser.set_defaults(context=512, tested=131_072, steps=1300, model=SIZES)
args = parse(parser, context=16, tested=256, steps=50, model=TINY)

import keras
import keras_hub
import numpy as np
from common import characters, controls  # noqa: F401 (registers "one_feature")

import keras_rfattn
from keras_rfattn import diagnostics, feature_maps


def main(args):
    text = characters.load(args.data_dir)
    starts = np.arange(0, args.tested, args.context)
    test = text.test[starts[:, None] + np.arange(args.context + 1)]
    for seed in args.seeds:
        start, generator = time.time(), np.random.default_rng([seed, 0])
        model = gpt2(args, text.vocabulary, seed)
        count = args.steps * BATCH
        fit(model, pieces(args, text, count, generator), BATCH)
        weights, softmax = model.get_weights(), perplexity(model, test)
        row = {"mechanism": "softmax, pretraining", "seed": seed}
        tell(args, row | {"perplexity": softmax, "minutes": minutes(start)})
        for name in args.mechanisms:
            start, generator = time.time(), np.random.default_rng([seed, 1])
            model = gpt2(args, text.vocabulary, seed)
            model.set_weights(weights)
            counts = [
                round(share * count / TUNE_BATCH) * TUNE_BATCH
                for share in (UPTRAIN, TUNE)
            ]
            first, second = (pieces(args, text, n, generator) for n in counts)
            if name == "softmax":
                second = np.concatenate([first, second])
            else:
                uptrain(model, name, first, seed)
            fit(model, second, TUNE_BATCH)
            found = perplexity(model, test)
            row = {"mechanism": name, "seed": seed, "softmax before": softmax}
            row |= {"perplexity": found, "gap": found / softmax - 1}
            if name != "softmax":
                row |= vars(diagnostics.attribute(model, test, perplexity))
            tell(args, row | {"minutes": minutes(start)})


def minutes(start):
    return round((time.time() - start) / 60, 2)


def pieces(args, text, count, generator):
    return characters.pieces(text.train, count, args.context + 1, generator)


def gpt2(args, vocabulary, seed):
    """Builds a GPT-2 whose positions are fixed sinusoids."""
    keras.utils.set_random_seed(seed)
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary, max_sequence_length=args.context, dropout=0.0, **args.model
    )
    positions, width = backbone.position_embedding, backbone.hidden_dim
    characters.prepare(backbone, width, positions, args.context)
    return keras_hub.models.GPT2CausalLM(backbone)


def uptrain(model, name, rows, seed):
    """Replaces attention and trains the maps."""
    feature_map, arguments, window = MECHANISMS[name]
    feature_map = feature_maps.get(feature_map, seed=seed, **arguments)
    keras_rfattn.replace_attention(model, feature_map, window=window, seed=seed)
    report = keras_rfattn.uptrain(
        model, inputs(rows), steps=len(rows) // TUNE_BATCH, seed=seed,
        batch_size=TUNE_BATCH, verbose=2,
    )  # fmt: skip
    print(report, flush=True)


def inputs(rows):
    """Returns model inputs from rows whose last token is the one to predict."""
    return {"token_ids": rows[:, :-1], "padding_mask": np.ones_like(rows[:, :-1])}


def fit(model, rows, batch):
    """Trains all weights on the next token."""
    steps = len(rows) // batch
    warmup = max(1, steps // 20)
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, steps - warmup, warmup_target=RATE, warmup_steps=warmup
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.AdamW(rate, WEIGHT_DECAY, clipnorm=1.0)
    model.compile(optimizer, loss, weighted_metrics=[])
    model.fit(inputs(rows), rows[:, 1:], batch_size=batch, verbose=2)


def perplexity(model, rows):
    """Returns the perplexity per character."""
    batch = max(1, 4096 // rows.shape[1])
    loss = model.evaluate(inputs(rows), rows[:, 1:], batch_size=batch, verbose=0)
    return float(np.exp(loss))


if __name__ == "__main__":
    main(args)
