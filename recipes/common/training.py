"""Builds a Transformer++, and trains it on tasks; not a recipe itself."""

import time

import common.control_maps  # noqa: F401 (registers "window_alone")
import keras
import numpy as np
from common.results import record
from keras import ops

from keras_rfattn import feature_maps
from keras_rfattn.models import transformer_pp

BATCH, SOLVED = 64, 0.999
SHORTEST, EVERY = 16, 100


def build(mechanism, seed, vocabulary_size, args):
    """Builds a Transformer++.

    `mechanism` is `(name of a map or "softmax", its arguments, window)`.
    """
    keras.utils.set_random_seed(seed)
    name, arguments, window = mechanism
    options = {"vocabulary_size": vocabulary_size, **sizes(args)}
    if name == "softmax":
        return transformer_pp(**options)
    feature_map = feature_maps.get(name, seed=seed, **arguments)
    return transformer_pp(attention=feature_map, window=window, **options)


def sizes(args):
    names = ("num_layers", "num_heads", "head_dim")
    return {name: getattr(args, name) for name in names}


def solve(
    examples, count, mechanisms, vocabulary_size, args, learning_rate=1e-3,
    enough=SOLVED,
):  # fmt: skip
    """Trains every mechanism on a task whose answer is the last tokens.

    The context grows by the same rule for every mechanism. It starts with 16 tokens,
    and doubles whenever a share `enough` of held-out examples is right, up to
    `args.context`. Training ends when 99.9 % are right at that context twice in a row,
    or after `args.steps` steps in all.

    Args:
        examples: Function `(generator, number, context) -> (tokens, answers)`.
        count: Number of tokens in an answer; all must be right.
        mechanisms: Dict from names to mechanisms, as `build` takes them.
        vocabulary_size: Number of different tokens.
        args: Parsed flags, including `context`, `steps`, `examples` and sizes.
        learning_rate: Learning rate of Adam, a number or a schedule.
        enough: Share of right examples at which the context grows.
    """
    print(f"context {args.context}, batches of {BATCH}, at most {args.steps} steps")
    for seed in args.seeds:
        for name in args.mechanisms:
            start = time.time()
            model = build(mechanisms[name], seed, vocabulary_size, args)
            steps = _fit(model, examples, count, args, seed, learning_rate, enough)
            share = _accuracy(
                model, examples, count, args.context, 10_000 + seed, args.examples
            )
            minutes = (time.time() - start) / 60
            print(
                f"{name:28} seed {seed}: {share:7.2%} after {steps} steps, "
                f"{minutes:.1f} min",
                flush=True,
            )
            row = {
                "mechanism": name,
                "seed": seed,
                "context": args.context,
                "window": mechanisms[name][2],
                **sizes(args),
                "steps": steps,
                "accuracy": share,
                "minutes": round(minutes, 2),
            }
            record(args, row)


def _fit(model, examples, count, args, seed, learning_rate, enough):
    def loss(answers, logits):
        return keras.losses.sparse_categorical_crossentropy(
            answers, logits[:, -count:], from_logits=True
        )

    model.compile(keras.optimizers.Adam(learning_rate, clipnorm=1.0), loss)
    generator, context, solved = np.random.default_rng(seed), SHORTEST, 0

    def batches(context):
        while True:
            yield examples(generator, BATCH, context)

    every, number = min(EVERY, args.steps), min(1024, args.examples)
    for steps in range(every, args.steps + 1, every):
        history = model.fit(batches(context), steps_per_epoch=every, verbose=0).history
        share = _accuracy(model, examples, count, context, 20_000 + seed, number)
        last = history["loss"][-1]
        print(
            f"  {steps} steps, context {context}: loss {last:.3f}, {share:.2%}",
            flush=True,
        )
        if context < args.context:
            context = min(2 * context, args.context) if share >= enough else context
            continue
        solved = solved + 1 if share >= SOLVED else 0
        if solved == 2:
            break
    return steps


def _accuracy(model, examples, count, context, seed, number):
    tokens, answers = examples(np.random.default_rng(seed), number, context)
    found = [
        ops.convert_to_numpy(
            model.predict_on_batch(tokens[i : i + 256])[:, -count:]
        ).argmax(-1)
        for i in range(0, number, 256)
    ]
    return float(np.mean(np.all(np.concatenate(found) == answers, axis=1)))
