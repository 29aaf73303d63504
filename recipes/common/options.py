"""Other options for layers that are linear already; not a recipe itself."""

import dataclasses

import keras_rfattn
from keras_rfattn.models.survey import survey


def change(model, **changes):
    """Changes options of linear layers that maps do not depend on: a window."""
    for site in survey(model):
        if site.is_linear:
            site.layer.options = dataclasses.replace(site.layer.options, **changes)


def restore(model, kept):
    """Makes heads softmax, in a model of which whole layers may be softmax already."""
    rest = dict(kept)
    for site in survey(model):
        if site.is_linear or site.linear_class is None or site.reason or site.window:
            continue
        heads = rest.pop(site.path, [])
        if len(heads) < site.linear_class._kv_shape(site.layer)[0]:
            raise SystemExit(
                f"Loaded maps must have linear heads in {site.path}. Received: maps "
                f"of softmax heads alone, where {heads} stay softmax."
            )
    keras_rfattn.restore_attention(model, include=rest)
