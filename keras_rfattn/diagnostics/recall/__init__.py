"""Tests of what a language model recalls of its context, and their scores.

Linear attention keeps a state of constant size, which limits how much of a long context
it can recall. The tests are generated from a seed: texts that hide a detail (`passkey`,
`needle`, `variable_tracking`), and key-value pairs for small models (`mqar`).
"""

from keras_rfattn.diagnostics.recall.pairs import mqar
from keras_rfattn.diagnostics.recall.scores import (
    accuracy,
    evaluate,
    log_likelihood,
    metric,
    perplexity_by_position,
    relative_score,
    win_and_tie_rate,
)
from keras_rfattn.diagnostics.recall.texts import (
    Example,
    needle,
    passkey,
    variable_tracking,
)

__all__ = [
    "Example",
    "accuracy",
    "evaluate",
    "log_likelihood",
    "metric",
    "mqar",
    "needle",
    "passkey",
    "perplexity_by_position",
    "relative_score",
    "variable_tracking",
    "win_and_tie_rate",
]
