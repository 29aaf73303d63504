"""Records results, and tells whether claims hold; not a recipe itself."""

import json
import pathlib
import shlex
import sys

import keras
import numpy as np
from scipy import stats


def command():
    """Returns the command line of the running recipe, without its folder."""
    return shlex.join([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]])


def record(args, row):
    """Appends a line to `args.results`: the command, the backend and a dict."""
    row = {"command": command(), "backend": keras.backend.backend(), **row}
    with open(args.results, "a") as file:
        file.write(json.dumps(row) + "\n")


def tell(args, row):
    """Prints a dict, and records it."""
    print(row, flush=True)
    record(args, row)


def report(text, holds):
    """Prints whether a claim holds."""
    print(f"check: {text}: {'yes' if holds else 'no'}")


def interval(values):
    """Returns the mean and half the width of its 95 % interval (Student's t)."""
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1)
    return np.mean(values), half / np.sqrt(len(values))
