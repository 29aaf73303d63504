"""Marks of tests that are many of a kind."""

import os

import keras
import pytest

# What JAX and TensorFlow compile for minutes without meeting what other tests do not.
RUNS_ALL = keras.backend.backend() == "torch" or bool(os.environ.get("ALL_FAMILIES"))
on_torch = pytest.mark.skipif(not RUNS_ALL, reason="run on PyTorch; set ALL_FAMILIES")
