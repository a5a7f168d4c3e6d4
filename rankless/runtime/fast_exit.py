"""The end of a forked worker: all that Python does for the script's own objects, nothing for the parent's.

Note [ending]: a forked worker shares thousands of modules with its parent. Tearing them down, as the interpreter
does last, copies nearly every page of them, a fifth of a second of CPU per worker. So the worker ends in the atexit
callback that was registered first and therefore runs last, after the script's threads and all other callbacks.
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


class FastExit:
    """Made before anything else is imported; does nothing until a forked worker arms it."""

    def __init__(self) -> None:
        self._process_id = 0
        self._exit_code = 0
        self._parents_modules: frozenset[int] = frozenset()
        atexit.register(self._end)

    def arm(self) -> None:
        """Call in a forked worker, before its script, and in the parent at its end: the modules of now are the
        parent's.
        """
        self._process_id = os.getpid()
        self._parents_modules = frozenset(id(module) for module in sys.modules.values())
        # Torch would take back every operator it has registered: 24 ms in each worker. And what the parent made,
        # as a temporary folder, is not a worker's to take away.
        for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # no public way to them
            finalizer.atexit = False

    def remember(self, exit_code: int) -> None:
        """Note what the process is to exit with."""
        self._exit_code = exit_code

    def _end(self) -> None:
        # Daemon threads would run on in modules that are being emptied; the interpreter knows how to hold them.
        if os.getpid() != self._process_id or threading.active_count() > 1:
            return
        new = {name: module for name, module in sys.modules.items() if id(module) not in self._parents_modules}
        users = [module for name, module in new.items() if _is_the_users(name, module)]
        for module in reversed(users):
            _clear(module)
        gc.collect()  # the parent has frozen its objects: these are the script's
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        ctypes.CDLL(None).fflush(None)
        os._exit(self._exit_code)


def _is_the_users(name: str, module: ModuleType) -> bool:
    # Libraries are left whole: their destructors, as torch's for storages, may still need their globals.
    if name == "__main__":
        return True
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or name.partition(".")[0] == "rankless":
        return False
    return "site-packages" not in file and not file.startswith((sys.prefix, sys.base_prefix))


def _clear(module: ModuleType) -> None:
    """Let go of a module's globals in the interpreter's order: those with one leading underscore first."""
    names = module.__dict__
    for private in (True, False):
        for name in list(names):
            is_private = name.startswith("_") and not name.startswith("__")
            if name != "__builtins__" and is_private == private:
                names[name] = None
