"""Trains a Transformer++ on tasks whose answer is the last tokens; not a recipe."""

import time

import keras
import numpy as np
from common import controls  # noqa: F401 (registers "window_alone")
from common.program import tell
from common.transformer_pp import transformer_pp

from keras_rfattn import feature_maps

BATCH, SOLVED = 64, 0.999
SHORTEST, EVERY = 16, 100


def build(mechanism, seed, vocabulary_size, args):
    """Builds a Transformer++ of the sizes `args`.

    `mechanism` is `(name of a map or "softmax", its arguments, window)`.
    """
    keras.utils.set_random_seed(seed)
    name, arguments, window = mechanism
    sizes = {k: getattr(args, k) for k in ("num_layers", "num_heads", "head_dim")}
    if name == "softmax":
        return transformer_pp(vocabulary_size=vocabulary_size, **sizes)
    feature_map = feature_maps.get(name, seed=seed, **arguments)
    return transformer_pp(
        attention=feature_map, window=window, vocabulary_size=vocabulary_size, **sizes
    )


def solve(
    examples, count, mechanisms, vocabulary_size, args, learning_rate=1e-3,
    enough=SOLVED,
):  # fmt: skip
    """Trains every mechanism on a task, with the same examples.

    The context starts with 16 tokens, and doubles whenever a share `enough` of held-out
    examples is right, up to `args.context`. Training ends when 99.9 % are right at that
    context twice in a row, or after `args.steps` steps in all.

    `examples(generator, number, context)` returns tokens and answers, of which all
    `count` tokens must be right. `mechanisms` is a dict from names to what `build`
    takes.
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
            minutes = round((time.time() - start) / 60, 2)
            row = {"mechanism": name, "seed": seed, "context": args.context}
            tell(args, row | {"steps": steps, "accuracy": share, "minutes": minutes})


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
        model.fit(batches(context), steps_per_epoch=every, verbose=0)
        share = _accuracy(model, examples, count, context, 20_000 + seed, number)
        print(f"  {steps} steps, context {context}: {share:.2%}", flush=True)
        if context < args.context:
            context = min(2 * context, args.context) if share >= enough else context
            continue
        solved = solved + 1 if share >= SOLVED else 0
        if solved == 2:
            break
    return steps


def _accuracy(model, examples, count, context, seed, number):
    tokens, answers = examples(np.random.default_rng(seed), number, context)
    logits = model.predict(tokens, batch_size=256, verbose=0)[:, -count:]
    return float(np.mean(np.all(logits.argmax(-1) == answers, axis=1)))
