"""The flags of a recipe and the file of its results; not a recipe itself.

Importing this file also chooses JAX, unless `KERAS_BACKEND` names another backend.
Recipes import Keras, which reads that variable, after they have parsed their flags.
"""

import argparse
import json
import os
import pathlib
import shlex
import sys

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def make_parser(description, **defaults):
    """Returns an argument parser with a flag for each default, and `--results`.

    A default also determines the type of its flag. A type in its place makes the flag
    required. A flag takes several values if its default is a sequence, and only names
    from the default if that holds names. The description is the first line.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    results = f"{pathlib.Path(sys.argv[0]).stem}.jsonl"
    for name, default in ({"results": results} | defaults).items():
        options = {"type": type(default), "default": default}
        if isinstance(default, type):
            options = {"type": default, "required": True}
        if isinstance(default, (list, tuple, range)):
            options |= {"type": type(default[0]), "nargs": "+"}
            if isinstance(default[0], str):
                options |= {"choices": default, "metavar": "NAME"}
                options["help"] = ", ".join(default)
        if name == "results":
            options["help"] = "file that results are appended to"
        parser.add_argument(f"--{name.replace('_', '-')}", **options)
    return parser


class Smoke(argparse.Action):
    """Sets other flags to the values in `const`; flags after it override these."""

    def __call__(self, parser, namespace, values, option_string=None):
        for name, value in self.const.items():
            setattr(namespace, name, value)


def parse(parser, **smoke):
    """Adds `--smoke`, which gives other flags the values `smoke`, and parses flags."""
    text = "run a short version: "
    text += ", ".join(f"{name} {value}" for name, value in smoke.items())
    parser.add_argument("--smoke", nargs=0, action=Smoke, const=smoke, help=text)
    return parser.parse_args()


def command():
    """Returns the command line of the running recipe, without its folder."""
    return shlex.join([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]])


def tell(args, row):
    """Prints a dict, and appends it to `args.results` with command and backend."""
    import keras

    print(row, flush=True)
    row = {"command": command(), "backend": keras.backend.backend(), **row}
    with open(args.results, "a") as file:
        file.write(json.dumps(row) + "\n")
