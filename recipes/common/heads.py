"""Which heads stay softmax in a comparison of choices; not a recipe itself."""

import numpy as np

CHOICES = "selected", "random", "layers"


def kept(selection, share, choice, seed):
    """Returns a dict from paths of layers to the key/value heads that stay softmax.

    Args:
        selection: What `keras_rfattn.select_heads` returned.
        share: Share of all key/value heads.
        choice: `"selected"`, or a control: heads at `"random"`, or those of whole
            `"layers"`, by the sum of their scores.
        seed: Seed of the random heads.
    """
    if choice == "selected":
        return dict(selection.with_share(share))
    scores = selection.scores
    every = [(path, i) for path in scores for i in range(len(scores[path]))]
    count = round(share * len(every))
    if choice == "random":
        order = np.random.default_rng(seed).permutation(len(every))
        pairs = [every[i] for i in order[:count]]
    else:
        best = sorted(scores, key=lambda path: -sum(scores[path]))
        pairs = [(path, i) for path in best for i in range(len(scores[path]))][:count]
    found = {}
    for path, i in pairs:
        found.setdefault(path, []).append(i)
    return found
