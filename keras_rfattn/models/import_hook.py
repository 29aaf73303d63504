"""Registers library adapters as soon as both that library and this one are loaded.

Keras finds a saved class by its registered name only if the code that registers
it has run. Importing KerasHub costs seconds and must not be forced on anyone, so
that its adapters are registered when it is imported, before or after this package.
"""

import importlib
import importlib.abc
import importlib.util
import sys

_installed = set()


# Library -> the file that adapts it, imported only once the library is.
ADAPTERS = {"keras_hub": "keras_rfattn.models.adapters.keras_hub"}


class _AfterImport(importlib.abc.MetaPathFinder):
    """Runs an adapter right after its library has been executed."""

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

    Called by itself on `import keras_rfattn` and on `import keras_hub`, whichever
    comes last. Call it again after defining KerasHub classes of your own, before
    loading a model that was saved with linear attention in them.
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
    """Registers what is imported, and waits for what is not."""
    if not any(isinstance(f, _AfterImport) for f in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())
    register()
