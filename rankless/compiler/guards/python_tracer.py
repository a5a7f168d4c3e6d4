"""Watches the user's Python while a job is captured: which of its code runs, with which objects, and what it asks for.

Note [watching]: reading code (`reading`) misses what is reached by other ways than names: a function in a table, a
method chosen by a computed name, a property, a callable object. A profile function sees every call. PyTorch's own
Python is thousands of calls per operator, so the profile is switched off inside each (`unwatched`).
"""

import contextlib
import gc
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from torch import Tensor

from rankless.compiler.tracing.impure_calls import require_not_frozen, require_nothing_written, user_asking
from rankless.compiler.tracing.plain_values import SIMPLE
from rankless.user_code import is_user_code

ENVIRONMENT_READ = type(os.environ).__getitem__.__code__
LOGGING = logging.Logger._log.__code__


class Watch:
    """What one pass of a capture has run."""

    def __init__(self) -> None:
        self.codes: dict[CodeType, dict[str, Any]] = {}
        """The user's code that ran, with its globals."""
        self.objects: dict[tuple[int, CodeType], tuple[str, Any]] = {}
        """The objects that it had in its variables, under their names."""
        self.environment: set[str] = set()
        """The environment variables that it asked for."""
        self.printed: str | None = None
        """The first line that prints or logs."""
        self._is_users: dict[str, bool] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within, calls on this thread are watched; another profiler pauses.

        So does looking for garbage: finalizers and callbacks of it, of any library, run at moments that mean nothing.
        """
        before: Any = sys.getprofile()
        collects = gc.isenabled()
        gc.disable()
        sys.setprofile(self._called)
        try:
            yield
        finally:
            sys.setprofile(None)
            if collects:
                gc.enable()
            # cProfile shows itself here, which is no function.
            if hasattr(before, "enable"):
                before.enable()
            else:
                sys.setprofile(before)

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            owner = getattr(argument, "__self__", None)
            if argument is print or owner is sys.stdout or owner is sys.stderr:
                self._says(frame)
            else:
                require_nothing_written(argument, frame)
            require_not_frozen(argument, frame)
        elif event in ("call", "return"):
            code = frame.f_code
            if self._users(frame):
                self._note(code, frame)
                caller = frame.f_back
                if event == "return" and caller is not None and self._users(caller):
                    self._keep(code.co_name, argument, caller.f_code)
            elif event == "call" and code is LOGGING:
                self._says(frame.f_back)
            elif event == "call" and code is ENVIRONMENT_READ and user_asking(frame) is not None:
                self.environment.add(frame.f_locals["key"])

    def _says(self, frame: FrameType | None) -> None:
        """Note the first line that prints or logs."""
        while frame is not None and self.printed is None and not self._users(frame):
            frame = frame.f_back
        if frame is not None and self.printed is None:
            self.printed = f"{frame.f_code.co_filename}:{frame.f_lineno}"

    def _users(self, frame: FrameType) -> bool:
        file = frame.f_code.co_filename
        if file.startswith("<"):
            # Code made at run time, as a dataclass's methods are, belongs to the module that it works in.
            module = frame.f_globals.get("__name__", "__main__")
            file = getattr(sys.modules.get(module), "__file__", None) or ("<frozen" if module != "__main__" else file)
        known = self._is_users.get(file)
        if known is None:
            known = self._is_users[file] = is_user_code(file)
        return known

    def _note(self, code: CodeType, frame: FrameType) -> None:
        self.codes[code] = frame.f_globals
        for name, value in frame.f_locals.items():
            self._keep(name, value, code)

    def _keep(self, name: str, value: Any, code: CodeType) -> None:
        if not isinstance(value, SIMPLE) and not isinstance(value, Tensor):
            self.objects.setdefault((id(value), code), (name, value))

    def forget_passing(self) -> None:
        """Let go of objects that nobody else holds: they were made in the pass."""
        count = -1
        while count != len(self.objects):
            count = len(self.objects)
            held = Counter(identity for identity, _ in self.objects)
            # Besides the tuples in `objects`, only getrefcount's argument holds it.
            passing = [key for key, entry in self.objects.items() if sys.getrefcount(entry[1]) <= held[key[0]] + 1]
            for key in passing:
                del self.objects[key]
