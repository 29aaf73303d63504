"""Other options for layers that are linear already; not a recipe itself."""

import dataclasses

import keras_rfattn
from keras_rfattn.models.survey import survey


def change(model, **changes):
    """Changes options of linear layers that maps do not depend on: a window."""
    for site in survey(model):
        if site.is_linear:
            site.layer.options = dataclasses.replace(site.layer.options, **changes)


def restore(model, kept, scores):
    """Makes heads softmax, in a model in which whole layers may be softmax already.

    Args:
        model: A model whose other layers have linear heads alone.
        kept: Dict from paths of layers to the key/value heads that stay softmax.
        scores: Dict from paths of layers to a score of each head.

    Raises:
        SystemExit: If a layer is softmax of which a head must be linear.
    """
    linear = {site.path for site in survey(model) if site.is_linear}
    for path in scores.keys() - linear:
        if len(kept.get(path, ())) < len(scores[path]):
            raise SystemExit(
                f"--load must have linear heads in {path}. Received: maps of a model "
                f"in which all its heads are softmax, but heads {kept.get(path, [])} "
                "stay softmax. Load maps that were trained with fewer softmax heads."
            )
    rest = {path: heads for path, heads in kept.items() if path in linear}
    keras_rfattn.restore_attention(model, include=rest)
