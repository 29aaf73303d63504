"""Compare peak memory of uptraining with ordinary fine-tuning of the same variables.

    python benchmarks/uptraining_memory.py [--trainable query_key] [--tokens 128]

Each case is a separate process. It runs a BERT of MiniLM's size with replaced attention
for two steps of a stage, or two steps of `fit` towards random targets with the same
variables trainable. The benchmark prints the growth of the process's peak memory since
before the first step, and the ratio.
"""

import argparse
import json
import os
import resource
import subprocess
import sys

CASES = ("fine-tuning", "attention", "features")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mechanism", default="hedgehog")
    parser.add_argument("--num-features", type=int)
    parser.add_argument("--trainable", default="maps")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--results", default="uptraining_memory.jsonl")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":  # parse before the slow imports
    args = parse_arguments()

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def main(args):
    if args.case is not None:
        print(measure(args))
        return
    found = {}
    for case in CASES:
        command = [sys.executable, *sys.argv, "--case", case]
        output = subprocess.run(command, capture_output=True, text=True, check=True)
        found[case] = int(output.stdout.splitlines()[-1])
        ratio = found[case] / found["fine-tuning"]
        print(f"{case:<12} {found[case] / 2**20:8.0f} MiB  {ratio:.2f}", flush=True)
    with open(args.results, "a") as file:
        file.write(json.dumps({**vars(args), **found}) + "\n")


def measure(args):
    import keras
    import keras_hub
    import numpy as np

    import keras_rfattn
    from keras_rfattn.layers.recording import linear_layers
    from keras_rfattn.uptraining import Stage
    from keras_rfattn.uptraining.weights import only_training, variables_to_train

    model = keras_hub.models.BertBackbone(
        vocabulary_size=30522, num_layers=6, num_heads=12, hidden_dim=384,
        intermediate_dim=1536,
    )  # fmt: skip
    keras_rfattn.replace_attention(
        model, args.mechanism, num_features=args.num_features, seed=0
    )
    rows = 2 * args.batch
    tokens = np.random.default_rng(0).integers(1, 30522, (rows, args.tokens))
    x = {"token_ids": tokens, "padding_mask": 0 * tokens + 1, "segment_ids": 0 * tokens}
    before = peak()
    if args.case != "fine-tuning":
        stage = Stage(args.case, trainable=args.trainable)
        keras_rfattn.uptrain(
            model, x, steps=2, stages=stage, verbose=0, batch_size=args.batch, seed=0
        )
        return peak() - before
    stage = Stage("features", trainable=args.trainable)
    selected = variables_to_train(model, linear_layers(model), [stage])
    output = model.output["sequence_output"]
    trained = keras.Model(model.input, output)
    y = np.zeros((rows, args.tokens, 384), "float32")
    with only_training(trained, selected[stage.name]):
        trained.compile("adam", "mse")
        trained.fit(x, y, batch_size=args.batch, verbose=0)
    return peak() - before


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main(args)
