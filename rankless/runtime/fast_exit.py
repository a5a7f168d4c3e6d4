"""Ends a forked worker: does all that Python does for the script's own objects, and nothing for those of the parent.

Note [ending]: a forked worker shares thousands of modules with its parent. At exit the interpreter tears them down
last. That copies nearly every page of them, which costs a fifth of a second of CPU per worker. So the worker ends in
the atexit callback that was registered first. That one runs last, after the script's threads and all other callbacks.
"""

import atexit
import contextlib
import ctypes
import gc
import os
import sys
import threading
import weakref
from types import ModuleType
from typing import Any

AGENT_LISTENER = "rankless elastic rounds"
"""The thread that waits for messages of the agent. It needs no module of the script, so a worker may end beside it."""


class FastExit:
    """Ends the process early at exit, if it is armed.

    It must be constructed before anything else is imported. It does nothing until a forked worker arms it.
    """

    def __init__(self) -> None:
        self._process_id = 0
        self._exit_code = 0
        self._inherited_modules: frozenset[int] = frozenset()
        self._has_threads = True
        """Whether other threads may still need the script's modules."""
        atexit.register(self._end)

    def arm(self) -> None:
        """Arm this process: all modules that are loaded now count as the parent's.

        A forked worker calls it before its script, and the fork server calls it at its own end.
        """
        self._process_id = os.getpid()
        self._inherited_modules = frozenset(id(module) for module in sys.modules.values())
        # Torch would unregister each of its operators, which takes 24 ms in each worker. And a worker must not remove
        # what the parent has created, such as a temporary folder.
        for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # no public way to them
            finalizer.atexit = False

    def take_process(self) -> None:
        """End this process early in any case: C++ libraries would wait for threads that it does not have."""
        self._process_id, self._has_threads = os.getpid(), False

    def set_exit_code(self, exit_code: int) -> None:
        """Set the code with which the process exits."""
        self._exit_code = exit_code

    def _end(self) -> None:
        # Daemon threads would run on in modules that are being emptied. The interpreter can stop them, this cannot.
        others = [each for each in threading.enumerate() if each.name != AGENT_LISTENER]
        if os.getpid() != self._process_id or (self._has_threads and len(others) > 1):
            return
        new = {name: module for name, module in sys.modules.items() if id(module) not in self._inherited_modules}
        users = [module for name, module in new.items() if _is_users_module(name, module)]
        for module in reversed(users):
            _clear_globals(module)
        gc.collect()  # the parent has frozen its objects: these are the script's
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        ctypes.CDLL(None).fflush(None)
        os._exit(self._exit_code)


def _is_users_module(name: str, module: ModuleType) -> bool:
    # Libraries stay whole: their destructors, such as those of torch's storages, may still need their globals.
    if name == "__main__":
        return True
    file = _get_globals(module).get("__file__")
    if not isinstance(file, str) or name.partition(".")[0] == "rankless":
        return False
    return "site-packages" not in file and not file.startswith((sys.prefix, sys.base_prefix))


def _get_globals(module: object) -> dict[str, Any]:
    """Return a module's globals, or an empty dict for another object that stands in `sys.modules`."""
    # Other ways to read an attribute would import a lazily loaded module now, or call the script's `__getattr__`.
    try:
        names = object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}
    return names if isinstance(names, dict) else {}


def _clear_globals(module: ModuleType) -> None:
    """Set a module's globals to None in the interpreter's order: names with one leading underscore first."""
    names = _get_globals(module)
    for private in (True, False):
        for name in list(names):
            is_private = name.startswith("_") and not name.startswith("__")
            if name != "__builtins__" and is_private == private:
                names[name] = None
