"""Train two-layer models to copy the colored tokens of a long context, in order.

PolySketchFormer (Kacham et al., 2024), appendix F.1, after Gu and Dao (2023): 16 color
tokens stand at random places among blanks. After the context come as many marks, at
which the model must output the colors in order. The models have two layers and 8 heads
of 16, and every mechanism sees the same examples. An example counts only if all of its
tokens are right. Paper, context 4k: softmax 99.73 %, polynomial 99.90 %, polysketch
(learned + local) 99.16 %.

    python recipes/papers/train_selective_copying.py [--context 32] [--steps 1400]

A training run ends early once the task is solved. The accuracy is that of `--examples`
fresh examples. Seen: docs/pages/reproductions/polysketchformer.md.
"""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1]))  # where `common` is

from common.program import make_parser, parse

COLORS, COUNT = 14, 16
BLANK, MARK = COLORS, COLORS + 1
# The first contexts of training exceed the window, so features learn from the start.
SKETCH, WINDOW = {"num_features": 16}, 16
MECHANISMS = {
    "softmax": ("softmax", {}, None),
    "polynomial (degree 4)": ("polynomial", {"degree": 4}, None),
    "polysketch_learned + local": ("polysketch_learned", SKETCH, WINDOW),
    "polysketch + local": ("polysketch", SKETCH, WINDOW),
    # Control: softmax in windows of the same size, and no attention beyond.
    "local": ("window_alone", {}, WINDOW),
}

parser = make_parser(
    __doc__, mechanisms=list(MECHANISMS),
    seeds=[0], num_layers=2, num_heads=8, head_dim=16, context=32, steps=1400,
    examples=4096,
)  # fmt: skip
args = parse(
    parser, steps=2, context=16, num_layers=1, examples=64,
    mechanisms=["softmax", "local"],
)  # fmt: skip

import numpy as np
from common import training
from keras.optimizers.schedules import PolynomialDecay


def examples(generator, count, context):
    """Returns tokens `(count, context + COUNT)` and answers `(count, COUNT)`."""
    places = np.argsort(generator.random((count, context)), axis=1)[:, :COUNT]
    answers = generator.integers(0, COLORS, (count, COUNT))
    rows = np.full((count, context + COUNT), BLANK)
    rows[:, context:] = MARK
    np.put_along_axis(rows, np.sort(places, axis=1), answers, axis=1)
    return rows.astype("int32"), answers.astype("int32")


if __name__ == "__main__":
    training.solve(
        examples, COUNT, MECHANISMS, COLORS + 2, args,
        learning_rate=PolynomialDecay(2e-3, args.steps, 0.0), enough=0.5,
    )  # fmt: skip
