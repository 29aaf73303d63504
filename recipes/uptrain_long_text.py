"""Uptrain a BERT on long running text, up to 4096 tokens, with or without a window.

The positions of MiniLM (see replace_bert_attention.py) are repeated beyond its 512, its
attention is made linear, and it is uptrained on running text. Rows have the cosine of
pooled embeddings to those of softmax, at several lengths on the same amount of text.

    python recipes/uptrain_long_text.py --data-dir DIR --mechanism favorpp_learned \
        --num-features 64 --steps 300 [--window 64]

DIR holds `wikitext2/{valid,test}.txt`; valid is for training. Controls: the model
before uptraining, the mean of V, no attention, and, for windows, the window and the
features alone. Cost: 10 to 25 minutes a seed. Seen: docs/pages/results/quality.md.
"""

import pathlib

from common.program import make_parser, parse, tell

parser = make_parser(
    __doc__, data_dir=pathlib.Path, mechanism="hedgehog", steps=300,
    lengths=[512, 1024, 2048, 4096], seeds=[0],
)  # fmt: skip
parser.add_argument("--num-features", type=int)
parser.add_argument("--window", type=int)
parser.add_argument("--tokens", type=int, default=512, help="of a training text")
parser.set_defaults(tested=16384)  # tokens of test text at each length
args = parse(parser, steps=4, tokens=64, lengths=[64], tested=256)

import numpy as np
from common.sentences import chunks, load, one_by_one, pooled

import keras_rfattn
from keras_rfattn import diagnostics

BATCH = 4  # texts


def main(args):
    for seed in args.seeds:
        model, tokenizer = load()
        longest = max(args.lengths)
        if longest > model.max_sequence_length:
            model = keras_rfattn.extend_positions(model, longest)
        texts = {
            n: chunks(args.data_dir, tokenizer, "test", n, max(1, args.tested // n))
            for n in args.lengths
        }
        softmax = {n: embeddings(model, texts[n]) for n in texts}
        keras_rfattn.replace_attention(
            model, args.mechanism, num_features=args.num_features, window=args.window,
            seed=seed,
        )  # fmt: skip
        before = {n: likeness(model, texts[n], softmax[n]) for n in texts}
        train = chunks(args.data_dir, tokenizer, "valid", args.tokens, None)
        report = keras_rfattn.uptrain(
            model, train, steps=args.steps, batch_size=BATCH, seed=seed, verbose=2
        )
        print(report, flush=True)
        for n in texts:
            after = likeness(model, texts[n], softmax[n])
            row = {"tokens": n, "seed": seed, **vars(after)}
            tell(args, row | {"before": before[n].as_it_is})


def embeddings(model, texts):
    rows = [
        pooled(model.predict_on_batch(row)["sequence_output"], row["padding_mask"])
        for row in one_by_one(texts)
    ]
    return np.concatenate(rows)


def likeness(model, texts, softmax):
    """Returns the `Attribution` of the mean cosine to softmax's embeddings."""

    def cosine(model, texts):
        return float(np.mean(np.sum(embeddings(model, texts) * softmax, -1)))

    return diagnostics.attribute(model, texts, cosine)


if __name__ == "__main__":
    main(args)
