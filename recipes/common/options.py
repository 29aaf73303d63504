"""Other options for layers that are linear already; not a recipe itself."""

import dataclasses

from keras_rfattn.models.survey import survey


def change(model, **changes):
    """Changes options of linear layers that maps do not depend on: a window."""
    for site in survey(model):
        if site.is_linear:
            site.layer.options = dataclasses.replace(site.layer.options, **changes)
