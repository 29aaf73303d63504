"""Time the first training step of a small causal model by kind of attention.

    KERAS_BACKEND=jax python benchmarks/compile_time.py [--repeats 3]

Every measurement is a separate process without a cache of compiled programs. The kinds
of attention take turns, so that other load on the machine affects all of them. The
benchmark prints the minimum over turns of wall-clock and processor seconds, and the
same relative to softmax.
"""

import argparse
import os
import subprocess
import sys
import time

import numpy as np

MECHANISMS = [
    ("softmax", None),
    ("favorplus", None),
    ("favorpp_learned", None),
    ("hedgehog", None),
    ("favorpp", None),
    ("polysketch", None),
    ("favorplus", 64),
]


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="turns")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--length", type=int, default=256, help="tokens")
    parser.add_argument("--jit", choices=["auto", "on", "off"], default="auto")
    parser.add_argument("--generate", action="store_true", help="time `generate`")
    parser.add_argument("--mechanisms", nargs="+", help="mechanisms to time")
    parser.add_argument("--one", nargs=2, metavar=("MECHANISM", "WINDOW"))
    return parser.parse_args()


def timed(function):
    """Returns the wall-clock and processor seconds that a function takes."""
    clock, processor = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - clock, time.process_time() - processor


def first_fit(args, mechanism, window):
    """Times the first training step of a model with the given mechanism."""
    import keras

    import keras_rfattn

    keras.utils.set_random_seed(0)
    inputs = keras.Input((args.length, 64))
    x = inputs
    for _ in range(args.layers):
        layer = keras.layers.MultiHeadAttention(4, 16)
        x = x + layer(x, x, use_causal_mask=True)
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    if mechanism != "softmax":
        keras_rfattn.replace_attention(model, mechanism, window=window, seed=0)
    jit = {"auto": "auto", "on": True, "off": False}[args.jit]
    model.compile("adam", "mse", jit_compile=jit)
    data = np.random.default_rng(0).normal(size=(2, args.length, 64)).astype("float32")
    return timed(lambda: model.fit(data, data[..., :1], batch_size=2, verbose=0))


def first_generate(args, mechanism, window):
    """Times the first `generate` of a small GPT-2 with the given mechanism."""
    import keras
    import keras_hub

    import keras_rfattn

    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=100, num_layers=args.layers, num_heads=4, hidden_dim=64,
        intermediate_dim=128, max_sequence_length=args.length,
    )  # fmt: skip
    model = keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)
    if mechanism != "softmax":
        keras_rfattn.replace_attention(model, mechanism, window=window, seed=0)
    tokens = np.ones((1, args.length), "int32")
    mask = np.arange(args.length)[None] < args.length // 2
    prompt = {"token_ids": tokens, "padding_mask": mask.astype("int32")}
    return timed(lambda: model.generate(prompt, stop_token_ids=None))


def main():
    args = parse_arguments()
    if args.one:
        mechanism, window = args.one
        measure = first_generate if args.generate else first_fit
        print(*measure(args, mechanism, int(window) or None))
        return
    # Softmax is what the others are compared with.
    chosen = "softmax", *(args.mechanisms or [name for name, _ in MECHANISMS])
    found = {x: [] for x in MECHANISMS if x[0] in chosen}
    for _ in range(args.repeats):
        for mechanism, window in found:
            command = [sys.executable, *sys.argv, "--one", mechanism, str(window or 0)]
            env = {k: x for k, x in os.environ.items() if "COMPILATION_CACHE" not in k}
            done = subprocess.run(
                command, env=env, check=True, stdout=subprocess.PIPE, text=True
            )
            pair = [float(x) for x in done.stdout.split()[-2:]]
            found[mechanism, window].append(pair)
    least = {x: np.min(pairs, axis=0) for x, pairs in found.items()}
    for (mechanism, window), (wall, processor) in least.items():
        name = mechanism if window is None else f"{mechanism}, window {window}"
        ratios = least[mechanism, window] / least["softmax", None]
        print(f"{name:22} {wall:6.1f} s, {ratios[0]:5.2f} of softmax; "
              f"processor {processor:6.1f} s, {ratios[1]:5.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
