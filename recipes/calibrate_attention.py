"""Calibrate linear attention to the softmax of a checkpoint, without training.

`keras_rfattn.calibrate` fits maps to the MiniLM checkpoint of replace_bert_attention.py
on some text. Rows have the mean relative error of attention outputs on other text.
Controls are the mean of V (no attention at all) and zero.

    python recipes/calibrate_attention.py --data-dir DIR

DIR holds `wikitext2/{valid,test}.txt`. Cost: eight minutes on one core. Expected, the
mean of 5 seeds: plain FAVOR+ and FAVOR++ of 256 features do no better than no attention
at all, and `favorpp_dense` (centered, balanced) has an error of about 0.63.
"""

import pathlib

from common.program import make_parser, parse, tell

# For each name: the map, and whether it is calibrated. FAVOR++ takes its parameter A
# from the current sequence, or, if calibrated, from an average over calibration data.
MAPS = {
    "favorplus": ("favorplus", False),
    "favorpp": ("favorpp", False),
    "favorpp, stored": ("favorpp", True),
    "favorpp_dense": ("favorpp_dense", True),
}

parser = make_parser(
    __doc__, data_dir=pathlib.Path, num_features=256, tokens=512, seeds=5,
    maps=list(MAPS),
)  # fmt: skip
args = parse(parser, tokens=32, num_features=16, seeds=1)

import numpy as np
from common.sentences import chunks, load, one_by_one

import keras_rfattn
from keras_rfattn import diagnostics


def main(args):
    model, tokenizer = load()
    calibration = chunks(args.data_dir, tokenizer, "valid", args.tokens, 4)
    evaluation = [chunks(args.data_dir, tokenizer, "test", args.tokens, 1)]
    for label in args.maps:
        name, is_calibrated = MAPS[label]
        errors = []
        for seed in range(args.seeds):
            keras_rfattn.replace_attention(
                model, name, num_features=args.num_features, seed=seed
            )
            if is_calibrated:
                keras_rfattn.calibrate(model, one_by_one(calibration))
            report = diagnostics.approximation_report(model, evaluation, verbose=0)
            keras_rfattn.restore_attention(model)
            errors.append(report.mean.output)
        row = {"map": label, "error": float(np.mean(errors))}
        row |= {"spread": float(np.std(errors)), "zero": 1}
        tell(args, row | {"mean of V": report.mean.mean_of_values})


if __name__ == "__main__":
    main(args)
