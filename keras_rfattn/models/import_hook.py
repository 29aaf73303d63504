"""Registers KerasHub's adapter once both KerasHub and this package are imported.

KerasHub finds the class of a preset by its registered name only if the code that
registers it has run. Importing KerasHub takes seconds and must not be forced on users,
who may import it before or after this package.
"""

import functools
import importlib
import importlib.abc
import sys

import keras

from keras_rfattn.layers.checks import check_model
from keras_rfattn.layers.recording import linear_layers
from keras_rfattn.models.holders import holders
from keras_rfattn.models.saving import follow

LIBRARY, ADAPTER = "keras_hub", "keras_rfattn.models.adapters.keras_hub"


class _AfterImport(importlib.abc.MetaPathFinder):
    """Registers the adapter right after the library's import, and removes itself."""

    def find_spec(self, name, path=None, target=None):
        """Returns what the other finders return for the library."""
        if name != LIBRARY:
            return None
        others = [x for x in sys.meta_path if x is not self]
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((x for x in specs if x is not None), None)
        if spec is not None and spec.loader is not None:
            # The attribute of this one loader lasts until it runs.
            run = functools.partial(self.run, spec.loader)
            spec.loader.exec_module = run
        return spec

    def run(self, loader, module):
        """Imports the library, then registers the adapter."""
        del loader.exec_module
        loader.exec_module(module)
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        register()


def register(model: keras.Model | None = None) -> None:
    """Registers the adapter of KerasHub, if KerasHub is imported.

    It runs automatically on `import keras_rfattn` or `import keras_hub`, whichever
    comes last. Call it in two cases:

    - You define KerasHub classes of your own, and load a model of these classes that
      was saved with linear attention.
    - You make a task or another model around a backbone whose attention is linear
      already. Pass this model: it is then saved and generates as if its attention had
      been replaced after it was made.

    Args:
        model: A model made around layers with linear attention, or `None`.
    """
    if sys.modules.get(LIBRARY) is not None:
        adapter = importlib.import_module(ADAPTER)
        adapter.install()
        adapter.register_all()
    if model is not None:
        check_model(model)
        layers = linear_layers(model)
        follow([], holders(layers, among=model._flatten_layers()))


def watch():
    """Registers the adapter now or, if the library is not imported yet, after that."""
    if sys.modules.get(LIBRARY) is None:
        sys.meta_path.insert(0, _AfterImport())
    register()
