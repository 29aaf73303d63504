"""Measures how well random features approximate softmax attention on real data."""

from keras_rfattn.diagnostics.parts import Attribution, attribute
from keras_rfattn.diagnostics.report import ApproximationReport, approximation_report

__all__ = ["ApproximationReport", "Attribution", "approximation_report", "attribute"]
