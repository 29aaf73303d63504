"""For mkdocstrings: a package's `causal` is the function, not the file of that name."""

import griffe


class Exported(griffe.Extension):
    """Puts what a package exports where a submodule of the same name hides it."""

    def on_package(self, *, pkg, loader, **kwargs):
        """Called once the package and all its submodules are read."""
        self._visit(pkg, loader.modules_collection)

    def _visit(self, module, modules):
        own = [x for x in module.modules.values() if not x.is_alias]
        for submodule in own:
            self._visit(submodule, modules)
        for name in module.exports or ():
            path = module.imports.get(name)
            if path in (None, f"{module.path}.{name}"):
                continue
            parent, imported = path.rsplit(".", 1)
            target = modules[parent].members[imported]
            if module.members[name].is_module and not target.is_module:
                target = target.final_target if target.is_alias else target
                module.members[name] = griffe.Alias(name, target, parent=module)
