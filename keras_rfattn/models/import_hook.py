"""Registers library adapters once both the library and this package are imported.

Keras finds a saved class by its registered name only if the code that registers it has
run. Importing KerasHub takes seconds and must not be forced on users. Its adapters are
therefore registered when KerasHub is imported, before or after this package.
"""

import functools
import importlib
import importlib.abc
import sys

_installed = set()


# Library -> its adapter module, which is imported only after the library.
ADAPTERS = {"keras_hub": "keras_rfattn.models.adapters.keras_hub"}


class _AfterImport(importlib.abc.MetaPathFinder):
    """Import finder that registers a library's adapter right after its import."""

    def find_spec(self, name, path=None, target=None):
        if name not in ADAPTERS or name in _installed:
            return None
        finders = [x for x in sys.meta_path if x is not self]
        for finder in [x for x in finders if hasattr(x, "find_spec")]:
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader.exec_module = _registering(spec.loader.exec_module)
                return spec
        return None


def _registering(exec_module):
    """Wraps a loader's `exec_module`, which then registers adapters at its end."""

    @functools.wraps(exec_module)
    def exec_and_register(module):
        exec_module(module)
        register()

    return exec_and_register


def register() -> None:
    """Registers the adapters of every supported library that is imported.

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
    for name, file in ADAPTERS.items():
        if sys.modules.get(name) is None:
            continue
        adapter = importlib.import_module(file)
        if name not in _installed:
            _installed.add(name)
            adapter.install()
        else:
            adapter.register_all()


def watch():
    """Registers adapters of imported libraries now, and of others on their import."""
    if not any(isinstance(f, _AfterImport) for f in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())
    register()
