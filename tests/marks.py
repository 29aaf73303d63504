"""Marks of tests that are slow everywhere and need run on one backend alone."""

import pytest

# What JAX and TensorFlow compile for minutes without meeting what other tests do not.
ONE_BACKEND = (pytest.mark.full, pytest.mark.once)
