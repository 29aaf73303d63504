"""Registers library adapters once both the library and this package are imported.

Keras finds a saved class by its registered name only if the code that registers it has
run. Importing KerasHub takes seconds and must not be forced on users. Its adapters are
therefore registered when KerasHub is imported, before or after this package.
"""

import importlib
import importlib.abc
import importlib.util
import sys

_installed = set()


# Library -> its adapter module, which is imported only after the library.
ADAPTERS = {"keras_hub": "keras_rfattn.models.adapters.keras_hub"}


class _AfterImport(importlib.abc.MetaPathFinder):
    """Import finder that registers a library's adapter right after its import."""

    def find_spec(self, name, path=None, target=None):
        if name not in ADAPTERS or name in _installed:
            return None
        finders = [f for f in sys.meta_path if f is not self]
        for finder in finders:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find else None
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    def __init__(self, loader):
        self.loader = loader

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        register()

    def __getattr__(self, name):
        return getattr(self.loader, name)


def register():
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
