"""Which heads stay softmax in a comparison of choices; not a recipe itself."""

import numpy as np

CHOICES = "selected", "random", "layers"


def kept(selection, share, choice, seed):
    """Returns a dict from paths to heads: as selected, or a control of equal size."""
    if choice == "selected":
        return dict(selection.with_share(share))
    scores = selection.scores
    every = [(path, i) for path in scores for i in range(len(scores[path]))]
    count = round(share * len(every))
    if choice == "random":
        order = np.random.default_rng(seed).permutation(len(every))
        pairs = [every[i] for i in order[:count]]
    else:
        # Whole layers, by the sum of their scores.
        best = sorted(scores, key=lambda path: -sum(scores[path]))
        pairs = [(path, i) for path in best for i in range(len(scores[path]))][:count]
    found = {}
    for path, i in pairs:
        found.setdefault(path, []).append(i)
    return found
