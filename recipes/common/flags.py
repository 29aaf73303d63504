"""Flags that the `train_*.py` recipes share; not a recipe itself."""

import argparse
import pathlib
import sys


def make_parser(description, mechanisms, sizes):
    """Flags of every training; tables as `training.build` takes them."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    name = pathlib.Path(sys.argv[0]).stem
    parser.add_argument("--results", default=f"{name}.jsonl", help="appended to")
    parser.add_argument(
        "--mechanisms", nargs="+", default=list(mechanisms), choices=list(mechanisms),
        metavar="NAME", help=", ".join(mechanisms),
    )  # fmt: skip
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    for name, default in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    return parser
