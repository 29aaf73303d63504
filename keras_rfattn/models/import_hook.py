"""Registers KerasHub's adapter once both KerasHub and this package are imported.

Keras finds a saved class by its registered name only if the code that registers it has
run. Importing KerasHub takes seconds and must not be forced on users. Its adapter is
therefore registered when KerasHub is imported, before or after this package.
"""

import functools
import importlib
import importlib.abc
import sys

LIBRARY, ADAPTER = "keras_hub", "keras_rfattn.models.adapters.keras_hub"


class _AfterImport(importlib.abc.MetaPathFinder):
    """Import finder that registers the adapter right after the library's import."""

    def find_spec(self, name, path=None, target=None):
        if name != LIBRARY:
            return None
        for finder in [x for x in sys.meta_path if x is not self]:
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader.exec_module = self.registering(spec.loader.exec_module)
                return spec
        return None

    def registering(self, exec_module):
        """Wraps a loader's `exec_module`, which then registers the adapter."""

        @functools.wraps(exec_module)
        def exec_and_register(module):
            exec_module(module)
            register()
            if self in sys.meta_path:
                sys.meta_path.remove(self)

        return exec_and_register


def register() -> None:
    """Registers the adapter of KerasHub, if KerasHub is imported.

    It runs automatically on `import keras_rfattn` or `import keras_hub`, whichever
    comes last. If you define KerasHub classes of your own, call it again before you
    load a model of these classes that was saved with linear attention.

    Examples:
        >>> import keras_hub
        >>> @keras.saving.register_keras_serializable("my_project")
        ... class MyBackbone(keras_hub.models.BertBackbone):
        ...     pass
        >>> keras_rfattn.register()
    """
    if sys.modules.get(LIBRARY) is not None:
        adapter = importlib.import_module(ADAPTER)
        adapter.install()
        adapter.register_all()


def watch():
    """Registers the adapter now or, if the library is not imported yet, after that."""
    if sys.modules.get(LIBRARY) is None:
        sys.meta_path.insert(0, _AfterImport())
    register()
