"""Measures how well random features approximate softmax attention on real data."""

from keras_rfattn.diagnostics.attribute import Attribution, attribute
from keras_rfattn.diagnostics.budget import Allotment
from keras_rfattn.diagnostics.predict import log_moment, predicted_variance
from keras_rfattn.diagnostics.recommend import recommend
from keras_rfattn.diagnostics.report import ApproximationReport, approximation_report
from keras_rfattn.diagnostics.sensitivity import Part, Sensitivity, sensitivity

__all__ = [
    "Allotment",
    "ApproximationReport",
    "Attribution",
    "Part",
    "Sensitivity",
    "approximation_report",
    "attribute",
    "log_moment",
    "predicted_variance",
    "recommend",
    "sensitivity",
]
