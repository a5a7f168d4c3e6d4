"""Runs an action when a script first imports torch or numpy, and hides a copy that the fork server has loaded.

Note [hidden torch]: a script may set OMP_NUM_THREADS and the like before its own `import torch`. A forked worker has
torch loaded already. So the worker removes torch's modules from `sys.modules`. The script's first import puts them back
and applies what the script has set. In a worker that starts as a plain process, the same finder acts once the real
import is done.

Note [asking is not importing]: libraries call `importlib.util.find_spec("torch")` to see whether torch is installed. So
the finder answers any number of searches. The action runs, once, when the module is loaded.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class FirstImportHook(MetaPathFinder):
    """Calls an action after the first import of each of some top-level modules."""

    def __init__(self, actions: dict[str, Callable[[], None]]) -> None:
        self._actions = actions
        self._hidden: dict[str, dict[str, ModuleType]] = {}
        self._searching = False

    def hide(self, name: str) -> None:
        """Remove a loaded module and its submodules from `sys.modules` until the script imports it."""
        modules = {key: module for key, module in sys.modules.items() if key.partition(".")[0] == name}
        for key in modules:
            del sys.modules[key]
        self._hidden[name] = modules

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        """Return a spec whose loading ends with the module's action, or None for all other modules."""
        if fullname not in self._actions or self._searching:
            return None
        hidden = self._hidden.get(fullname)
        if hidden is not None:
            return _spec_of_loaded(fullname, hidden, lambda: self._on_loaded(fullname))
        self._searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _LoadThenAct(spec.loader, lambda: self._on_loaded(fullname))
        return spec

    def _on_loaded(self, name: str) -> None:
        self._hidden.pop(name, None)
        action = self._actions.pop(name, None)
        if action is not None:
            action()


def _spec_of_loaded(name: str, modules: dict[str, ModuleType], act: Callable[[], None]) -> ModuleSpec:
    """Return a spec that looks like the one of the loaded module `name`, and whose loader returns that module."""
    own = modules[name].__spec__
    spec = ModuleSpec(name, _ReturnLoaded(modules, act), origin=None if own is None else own.origin)
    if own is not None:
        spec.submodule_search_locations = own.submodule_search_locations
    return spec


class _ReturnLoaded(Loader):
    """Puts modules that were loaded before back into `sys.modules`, then acts."""

    def __init__(self, modules: dict[str, ModuleType], act: Callable[[], None]) -> None:
        self._modules = modules
        self._act = act
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        # Not earlier: the import system executes a module that it finds in `sys.modules` after the search anew.
        sys.modules.update(self._modules)
        self._spec = self._modules[spec.name].__spec__
        return self._modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has just replaced it by our spec
        self._act()


class _LoadThenAct(Loader):
    """Loads a module with the module's own loader, then acts."""

    def __init__(self, loader: Loader, act: Callable[[], None]) -> None:
        self._loader = loader
        self._act = act

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._act()
