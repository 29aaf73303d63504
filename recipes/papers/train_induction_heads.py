"""Train two-layer models to find what followed a token earlier: induction heads.

PolySketchFormer (Kacham et al., 2024), appendix F.2: each position holds one of 16
tokens. One random position (not among the last 3) holds a special token, and so does
the second to last. The last token is the one that followed the first special token. The
models have two layers and 8 heads of 16, and every mechanism sees the same examples.
Paper, context 128: softmax, polynomial and polysketch reach above 99.95 %, after up to
400k steps; guessing gives 6.25 %.

    python recipes/papers/train_induction_heads.py [--context 128] [--steps 2500]

A training run ends early once the task is solved. The accuracy is that of `--examples`
fresh examples. Seen: docs/pages/reproductions/polysketchformer.md.
"""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1]))  # where `common` is

from common.program import make_parser, parse

TOKENS, SPECIAL = 16, 16
MECHANISMS = {
    "softmax": ("softmax", {}, None),
    "polynomial (degree 4)": ("polynomial", {"degree": 4}, None),
    "polynomial (degree 8)": ("polynomial", {"degree": 8}, None),
    "polysketch_learned": ("polysketch_learned", {"num_features": 16}, None),
}

parser = make_parser(
    __doc__, mechanisms=list(MECHANISMS),
    seeds=[0], num_layers=2, num_heads=8, head_dim=16, context=128, steps=2500,
    examples=4096,
)  # fmt: skip
args = parse(
    parser, steps=2, context=16, num_layers=1, examples=64,
    mechanisms=["softmax", "polysketch_learned"],
)  # fmt: skip

import numpy as np
from common import training


def examples(generator, count, context):
    """Returns tokens `(count, context - 1)` and answers `(count, 1)`."""
    rows = generator.integers(0, TOKENS, (count, context))
    place = generator.integers(0, context - 3, count)
    rows[np.arange(count), place] = SPECIAL
    answer = rows[np.arange(count), place + 1]
    rows[:, -2] = SPECIAL
    return rows[:, :-1].astype("int32"), answer[:, None].astype("int32")


if __name__ == "__main__":
    training.solve(examples, 1, MECHANISMS, TOKENS + 1, args)
