"""Measures how well random features approximate softmax attention on real data.

`diagnostics.recall` has tests of what a language model recalls of a long context.
"""

from keras_rfattn.diagnostics import recall
from keras_rfattn.diagnostics.budget import Allotment
from keras_rfattn.diagnostics.errors import log_moment, predicted_variance
from keras_rfattn.diagnostics.memory import softmax_layers_within
from keras_rfattn.diagnostics.parts import (
    Attribution,
    Part,
    Sensitivity,
    attribute,
    sensitivity,
)
from keras_rfattn.diagnostics.recommend import recommend
from keras_rfattn.diagnostics.report import ApproximationReport, approximation_report
from keras_rfattn.diagnostics.shares import LayerShares, WeightShares, weight_shares

__all__ = [
    "Allotment",
    "ApproximationReport",
    "Attribution",
    "LayerShares",
    "Part",
    "Sensitivity",
    "WeightShares",
    "approximation_report",
    "attribute",
    "log_moment",
    "predicted_variance",
    "recall",
    "recommend",
    "sensitivity",
    "softmax_layers_within",
    "weight_shares",
]
