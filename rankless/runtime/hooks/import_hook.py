"""Torch is imported already when a worker's script starts, and must not seem so.

Note [hidden torch]: a script may set OMP_NUM_THREADS and the like before its own `import torch`. So the
modules are taken out of `sys.modules`, and the script's first import brings them back and applies what the
script has set. In a process that starts plain the same finder acts when the real import is over.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class Arrival(MetaPathFinder):
    """Calls an action after the first import of each awaited top-level module."""

    def __init__(self, actions: dict[str, Callable[[], None]]) -> None:
        self._actions = actions
        self._hidden: dict[str, dict[str, ModuleType]] = {}

    def hide(self, name: str) -> None:
        """Take a loaded module and its submodules away until their first import."""
        modules = {key: module for key, module in sys.modules.items() if key.partition(".")[0] == name}
        for key in modules:
            del sys.modules[key]
        self._hidden[name] = modules

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        """A module's spec whose loading ends with the action; None for all other modules."""
        action = self._actions.pop(fullname, None)
        if action is None:
            return None
        hidden = self._hidden.pop(fullname, None)
        if hidden is not None:
            return ModuleSpec(fullname, _Return(hidden, action))
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _LoadThenAct(spec.loader, action)
        return spec


class _Return(Loader):
    """Gives back a module that was loaded before."""

    def __init__(self, modules: dict[str, ModuleType], action: Callable[[], None]) -> None:
        self._modules = modules
        self._action = action
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        # Not before: a module found in `sys.modules` after the search would be executed by its own old spec.
        sys.modules.update(self._modules)
        self._spec = self._modules[spec.name].__spec__
        return self._modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has just put ours in its place
        self._action()


class _LoadThenAct(Loader):
    """Loads a module as its own loader does, then acts."""

    def __init__(self, loader: Loader, action: Callable[[], None]) -> None:
        self._loader = loader
        self._action = action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._action()
