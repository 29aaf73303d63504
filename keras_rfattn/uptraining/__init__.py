"""Bringing a replaced model back to the quality of its softmax original."""

from keras_rfattn.uptraining.calibrate import calibrate

__all__ = ["calibrate"]
