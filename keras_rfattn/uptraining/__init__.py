"""Calibration from data, and training towards the softmax checkpoint."""

from keras_rfattn.uptraining.calibrate import calibrate
from keras_rfattn.uptraining.report import UptrainingReport
from keras_rfattn.uptraining.uptrain import Stage, uptrain

__all__ = ["Stage", "UptrainingReport", "calibrate", "uptrain"]
