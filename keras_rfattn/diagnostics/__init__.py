"""Measures how well random features approximate softmax attention on real data."""

from keras_rfattn.diagnostics.parts import (
    Attribution,
    Part,
    Sensitivity,
    attribute,
    sensitivity,
)
from keras_rfattn.diagnostics.report import ApproximationReport, approximation_report

__all__ = [
    "ApproximationReport",
    "Attribution",
    "Part",
    "Sensitivity",
    "approximation_report",
    "attribute",
    "sensitivity",
]
