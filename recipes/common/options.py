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
    linear = {site.path for site in survey(model) if site.is_linear}
    for site in survey(model):
        is_choice = site.linear_class and not (site.reason or site.window)
        if site.path in linear or not is_choice:
            continue
        if len(kept.get(site.path, ())) < site.linear_class._kv_shape(site.layer)[0]:
            raise SystemExit(
                f"Loaded maps must have linear heads in {site.path}. Received: maps "
                f"of softmax heads alone, where {kept.get(site.path, [])} stay softmax."
            )
    rest = {path: heads for path, heads in kept.items() if path in linear}
    keras_rfattn.restore_attention(model, include=rest)
