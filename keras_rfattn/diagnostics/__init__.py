"""How well random features approximate softmax attention, on real activations."""

from keras_rfattn.diagnostics.predict import predicted_variance
from keras_rfattn.diagnostics.recommend import recommend
from keras_rfattn.diagnostics.report import ApproximationReport
from keras_rfattn.diagnostics.report import approximation_report

__all__ = [
    "ApproximationReport",
    "approximation_report",
    "predicted_variance",
    "recommend",
]
