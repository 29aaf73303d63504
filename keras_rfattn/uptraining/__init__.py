"""Calibration from data, and training towards the softmax checkpoint."""

from keras_rfattn.uptraining.calibrate import calibrate
from keras_rfattn.uptraining.gates import select_heads
from keras_rfattn.uptraining.head_selection import HeadSelection
from keras_rfattn.uptraining.recall import recall_rows
from keras_rfattn.uptraining.report import UptrainingReport
from keras_rfattn.uptraining.uptrain import Stage, uptrain

__all__ = [
    "HeadSelection",
    "Stage",
    "UptrainingReport",
    "calibrate",
    "recall_rows",
    "select_heads",
    "uptrain",
]
