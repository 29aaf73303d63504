"""Learning-rate schedules that recipes share; not a recipe itself."""

import keras


def cosine(rate, steps):
    """Returns a rise to `rate` in a tenth of the steps, then a cosine to 0."""
    return keras.optimizers.schedules.CosineDecay(
        0.0, steps, warmup_target=rate, warmup_steps=steps // 10 + 1
    )
