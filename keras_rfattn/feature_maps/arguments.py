"""Arguments that maps share: how many vectors, and their seeds."""

import numpy as np


def derive_seed(*entropy):
    """A seed that follows from other integers, unlike those of other integers."""
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def check_num_features(num_features, projection):
    """Raises `ValueError` unless `num_features` fits `projection`."""
    if projection is None:
        if num_features is not None:
            raise ValueError(
                "`num_features` must be `None` without a projection: the width is "
                f"the head dim then. Received: num_features={num_features}. Pass "
                "`projection='orthogonal'` to choose a width."
            )
        return
    is_integer = isinstance(num_features, (int, np.integer))
    if not is_integer or isinstance(num_features, bool) or num_features <= 0:
        raise ValueError(
            "`num_features` must be a positive integer or `None` (256). "
            f"Received: num_features={num_features!r}."
        )
