"""Command-line flags that recipes share; not a recipe itself."""

import argparse
import pathlib
import sys

# Sizes that `--smoke` gives to a `train_*.py`.
TINY = {"steps": 2, "context": 16, "num_layers": 1}


def make_parser(description, mechanisms, sizes):
    """Returns the argument parser that every `train_*.py` shares.

    Args:
        description: Text whose first line describes the recipe.
        mechanisms: Dict from names to mechanisms, as `training.build` takes them.
        sizes: Dict from names of integer flags to their defaults.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    name = pathlib.Path(sys.argv[0]).stem
    parser.add_argument("--results", default=f"{name}.jsonl", help="output file")
    parser.add_argument(
        "--mechanisms", nargs="+", default=list(mechanisms), choices=list(mechanisms),
        metavar="NAME", help=", ".join(mechanisms),
    )  # fmt: skip
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    for name, default in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    return parser


class Smoke(argparse.Action):
    """Sets other flags to the values in `const`; flags after it override these."""

    def __call__(self, parser, namespace, values, option_string=None):
        for name, value in self.const.items():
            setattr(namespace, name, value)


def add_smoke(parser, **values):
    """Adds `--smoke`, which runs the smallest recipe by setting other flags."""
    text = "run a short version: "
    text += ", ".join(f"{name} {value}" for name, value in values.items())
    parser.add_argument("--smoke", nargs=0, action=Smoke, const=values, help=text)
