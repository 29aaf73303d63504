"""Measure hybrids on a checkpoint, with and without normalized queries and keys.

Hybrid Random Features (Choromanski et al., 2022) are precise if all queries and keys
have one length, as in the paper's robotics models, which normalize them. On MiniLM, for
several maps and temperatures, this recipe measures the fraction of estimated kernel
values that are negative, and the relative error of attention outputs against the
checkpoint's softmax. Controls are the mean of V, and the softmax of the normalized
vectors itself, which the maps estimate. Maps have equal numbers of vectors, so hybrids
are far wider. Compare each map with and without normalization, not different maps.

    python recipes/papers/normalize_attention.py --data-dir DIR

DIR holds `wikitext2/test.txt`. The recipe needs the packages of
replace_bert_attention.py. Cost: see the results file.
"""

import pathlib
import sys
import warnings

sys.path.append(str(pathlib.Path(__file__).parents[1]))  # where `common` is

from common.flags import make_parser, parse

# Flags are parsed before the slow imports.
parser = make_parser(
    __doc__, data_dir=pathlib.Path, num_features=256, temperatures=[0.1, 0.2, 0.4],
    seeds=2, results="normalize_attention.jsonl",
)  # fmt: skip
parser.add_argument("--tokens", type=int, default=128, help="sequence length")
parser.add_argument(
    "--mechanisms", nargs="+",
    default=["hybrid_angular", "hybrid_gaussian", "favor", "favorplus", "favorpp"],
)  # fmt: skip
args = parse(
    parser, tokens=32, num_features=8, seeds=1, temperatures=[0.5],
    mechanisms=["hybrid_angular"],
)  # fmt: skip

import numpy as np
from common import results
from common.sentences import chunks, load
from scipy import special

import keras_rfattn
from keras_rfattn import diagnostics
from keras_rfattn.layers import record


def main(args):
    model, tokenizer = load()
    data = [chunks(args.data_dir, tokenizer, "test", args.tokens, 1)]
    print(f"{args.tokens} tokens, {args.num_features} features, {args.seeds} seeds")
    print(f"{'':<18}{'temperature':>12}{'negative':>10}{'output error':>14}{'±':>8}")
    for temperature in (None, *args.temperatures):
        shown = "-" if temperature is None else f"{temperature:g}"
        for name in args.mechanisms:
            rows = []
            for seed in range(args.seeds):
                with warnings.catch_warnings():
                    # Hybrids warn about vectors that are not normalized; this recipe
                    # measures that case on purpose.
                    warnings.simplefilter("ignore")
                    keras_rfattn.replace_attention(
                        model, name, num_features=args.num_features, seed=seed,
                        temperature=temperature,
                    )  # fmt: skip
                mean = diagnostics.approximation_report(model, data, verbose=0).mean
                rows.append((mean.negative, mean.output))
                sequences = record(model, data)
                keras_rfattn.restore_attention(model)
            (negative, output), spread = np.mean(rows, axis=0), np.std(rows, axis=0)
            line = f"{name:<18}{shown:>12}{negative:>10.3f}{output:>14.3f}"
            print(f"{line}{spread[1]:>8.3f}", flush=True)
            write(args, name, temperature, negative, output, spread[1])
        exact = np.mean([error(s) for *_, found in sequences for s in found])
        print(f"{'its softmax':<18}{shown:>12}{0:>10.3f}{exact:>14.3f}", flush=True)
        write(args, "its softmax", temperature, 0.0, exact, 0.0)
    write(args, "mean of V", None, 0.0, mean.mean_of_values, 0.0)
    print(f"{'mean of V':<18}{'':>22}{mean.mean_of_values:>14.3f}")
    print(f"{'zero':<18}{'':>22}{1:>14.3f}")


def write(args, name, temperature, negative, output, spread):
    results.record(args, {
        "mechanism": name, "temperature": temperature, "negative": negative,
        "output error": output, "spread": spread,
    })  # fmt: skip


def error(sequence):
    """Returns the error of softmax on the features' vectors, to the checkpoint's."""
    query, key = sequence.softmax or (sequence.query, sequence.key)
    found, wanted = (
        special.softmax(q @ np.swapaxes(k, -1, -2), -1) @ sequence.value
        for q, k in ((sequence.query, sequence.key), (query, key))
    )
    norms = [np.linalg.norm(x, axis=(-1, -2)) for x in (found - wanted, wanted)]
    return np.mean(norms[0] / norms[1])


if __name__ == "__main__":
    main(args)
