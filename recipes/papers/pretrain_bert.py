"""Train a masked language model with softmax and linear attention, also uptrained.

Chefs' Random Tables, table 2 (Likhosherstov et al., 2022), at a size for one core: a
BERT of KerasHub learns to predict masked characters. Each mechanism is trained from
scratch for as many steps as softmax, from scratch for a tenth of them, and from the
softmax model for a tenth of the steps, half of them by `uptrain`.

    python recipes/papers/pretrain_bert.py --data-dir DIR --seeds 0 1 2

DIR holds `wikitext2/{valid,test}.txt` (WikiText-2): valid is for training. FAVOR++
takes its A from the current sequence, as in the paper, because it is never calibrated.
Controls are uniform attention (the mean of V) and no attention, trained in the same
way, and in place of each model's own.
Cost: 15 minutes a seed on one core (PyTorch). Seen: docs/pages/reproductions/crt.md.
"""

import pathlib
import sys
import time

sys.path.append(str(pathlib.Path(__file__).parents[1]))  # where `common` is

from common.program import make_parser, parse, tell

WIDTH = {"num_features": 256}
MECHANISMS = {
    "softmax": None,
    "favorpp": ("favorpp", WIDTH, {}),
    "favorplus": ("favorplus", WIDTH, {}),
    "uniform": None,
    "no_attention": None,
}
STARTS = ("scratch", "scratch, a tenth", "uptrained")
SIZES = {"num_layers": 2, "num_heads": 2, "hidden_dim": 128, "intermediate_dim": 512}
TINY = {"num_layers": 1, "num_heads": 1, "hidden_dim": 8, "intermediate_dim": 8}
BATCH, RATE, WEIGHT_DECAY, MASKED = 8, 1e-3, 0.05, 0.15

parser = make_parser(
    __doc__, data_dir=pathlib.Path, mechanisms=list(MECHANISMS), seeds=[0],
)  # fmt: skip
parser.set_defaults(context=128, tested=2048, steps=1600, model=SIZES)
args = parse(parser, context=16, tested=16, steps=40, model=TINY)

import keras
import keras_hub
import numpy as np
from common import characters, controls

import keras_rfattn
from keras_rfattn import diagnostics
from keras_rfattn.uptraining import Stage

TRAINING = [Stage(x, trainable="query_key") for x in ("attention", "features")]


def main(args):
    text = characters.load(args.data_dir)
    starts = np.arange(args.tested) * args.context
    rows = text.test[starts[:, None] + np.arange(args.context)]
    test = masked(rows, text.vocabulary, np.random.default_rng(0))
    for seed in args.seeds:
        # Softmax comes first, because all other arms are uptrained from it.
        names = ["softmax", *(x for x in args.mechanisms if x != "softmax")]
        weights = None
        for name in names:
            for start in STARTS:
                began = time.time()
                model = bert(args, text.vocabulary, seed)
                if start == "uptrained":
                    model.set_weights(weights)
                row = {"mechanism": name, "start": start, "seed": seed}
                row |= trained(model, name, start, args, text, test, seed)
                if weights is None:
                    weights = model.get_weights()
                row["minutes"] = round((time.time() - began) / 60, 2)
                tell(args, row)


def masked(rows, vocabulary, generator):
    """Masks inputs as BERT does: 80 % of the chosen are masked, 10 % are random.

    Returns:
        `(inputs, labels)`.
    """
    count = max(1, round(MASKED * rows.shape[1]))
    chosen = np.argsort(generator.random(rows.shape), axis=1)[:, :count]
    chosen = np.sort(chosen, axis=1).astype("int32")
    labels = np.take_along_axis(rows, chosen, axis=1)
    draws, tokens = generator.random(labels.shape), rows.copy()
    others = generator.integers(vocabulary, size=draws.shape)
    given = np.where(draws < 0.9, others, labels)
    np.put_along_axis(tokens, chosen, np.where(draws < 0.8, vocabulary, given), axis=1)
    inputs = {"token_ids": tokens, "mask_positions": chosen}
    inputs |= {"segment_ids": 0 * rows, "padding_mask": 0 * rows + 1}
    return inputs, labels


def bert(args, vocabulary, seed):
    """Builds a masked language model; the last token of the vocabulary is the mask."""
    keras.utils.set_random_seed(seed)
    backbone = keras_hub.models.BertBackbone(
        vocabulary + 1, max_sequence_length=args.context, dropout=0.0, **args.model
    )
    model = keras_hub.models.BertMaskedLM(backbone)
    positions = backbone.get_layer("position_embedding")
    characters.prepare(model, backbone.hidden_dim, positions, args.context)
    return model


def trained(model, name, start, args, text, test, seed):
    """Trains an arm, and returns its results on the test text."""
    generator = np.random.default_rng([seed, STARTS.index(start)])
    steps = args.steps if start == "scratch" else args.steps // 10
    rows = characters.pieces(text.train, steps * BATCH, args.context, generator)
    inputs, labels = masked(rows, text.vocabulary, generator)
    controls.set_attention(model, name, MECHANISMS[name], seed)
    first = 0
    if start == "uptrained" and MECHANISMS[name] is not None:
        first = steps // 2
        some = {k: x[: first * BATCH] for k, x in inputs.items()}
        report = keras_rfattn.uptrain(
            model, some, steps=first, batch_size=BATCH, seed=seed,
            stages=TRAINING, verbose=2,
        )  # fmt: skip
        print(report, flush=True)
    left = steps - first
    warmup = max(1, left // 20)
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, left - warmup, warmup_target=RATE, warmup_steps=warmup
    )
    model.compile(
        keras.optimizers.AdamW(rate, WEIGHT_DECAY, clipnorm=1.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    some = {k: x[first * BATCH :] for k, x in inputs.items()}
    model.fit(some, labels[first * BATCH :], batch_size=BATCH, verbose=2)
    loss, accuracy = model.evaluate(*test, batch_size=32, verbose=0)
    row = {"steps": steps, "loss": loss, "accuracy": accuracy}
    if MECHANISMS[name] is not None:
        row["parts"] = vars(diagnostics.attribute(model, test, accuracy_of))
    return row


def accuracy_of(model, test):
    return model.evaluate(*test, batch_size=32, verbose=0)[1]


if __name__ == "__main__":
    main(args)
