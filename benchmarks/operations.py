"""Count the operations of an attention layer on PyTorch, as a GPU would run them.

    KERAS_BACKEND=torch python benchmarks/operations.py [--tokens 512] [--width 64]

No GPU is needed: the path of a GPU is selected by hand. The benchmark prints, for each
mechanism, the operations that compute something, and those that only give a view of a
tensor, which no GPU sees. The layer has 3 heads of 64 and no mask.
"""

import argparse
import collections
import json
import os

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--tokens", type=int, default=512)
parser.add_argument("--width", type=int, default=64, help="number of features")
parser.add_argument(
    "--mechanisms", nargs="+", default=["favorplus", "favorpp", "favorpp_learned"]
)

if __name__ == "__main__":  # parse before the slow imports
    args = parser.parse_args()

os.environ["KERAS_BACKEND"] = "torch"

import keras
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import keras_rfattn
from keras_rfattn.backend import torch as backend
from keras_rfattn.fused import torch_cpu

HEADS, DIM = 3, 64
# Operations that move no memory, beside those whose result PyTorch marks as a view.
VIEWS = ("detach", "lift_fresh", "_unsafe_view", "alias")


class Counter(TorchDispatchMode):
    """Counts operations while it is active."""

    def __init__(self):
        super().__init__()
        self.found = collections.Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.name().split("::")[1].split(".")[0]
        results = operation._schema.returns
        is_view = name in VIEWS or any(
            x.alias_info is not None and not x.alias_info.is_write for x in results
        )
        self.found["view" if is_view else "computing"] += 1
        return operation(*args, **(kwargs or {}))


def as_on_a_gpu():
    """Selects what PyTorch runs on a GPU, where no value is read."""
    backend._modes = lambda: ()
    backend.are_values_at_hand = lambda *arrays: False
    backend._is_on_gpu = lambda arrays: True
    torch_cpu.attention = lambda *arrays: None


def counted(args, mechanism, is_causal):
    inputs = keras.Input((None, HEADS * DIM))
    layer = keras.layers.MultiHeadAttention(HEADS, DIM)
    model = keras.Model(inputs, layer(inputs, inputs))
    if mechanism != "softmax":
        keras_rfattn.replace_attention(
            model, mechanism, num_features=args.width, seed=0
        )
    layer = model.layers[-1]
    x = torch.randn(1, args.tokens, HEADS * DIM)
    with torch.no_grad(), Counter() as counter:
        layer(x, x, use_causal_mask=is_causal)
    return counter.found


def main(args):
    as_on_a_gpu()
    for is_causal in (False, True):
        for mechanism in ("softmax", *args.mechanisms):
            found = counted(args, mechanism, is_causal)
            row = {"mechanism": mechanism, "causal": is_causal, **found}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(args)
