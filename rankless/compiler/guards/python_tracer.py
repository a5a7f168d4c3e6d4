"""Trace the user's Python during capture: which code runs, with which objects, which environment variables it reads.

Note [python tracer]: reading bytecode (`guard_discovery`) misses functions that code reaches without their names: a
function in a table, a method with a computed name, a property, a callable object. A profile function sees every call.
PyTorch's own Python makes thousands of calls per operator, so `SourceLineMode` turns the profiler off inside each.
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

from rankless.compiler.tracing.impure_calls import find_user_frame, refuse_file_write, refuse_impure_call
from rankless.compiler.tracing.value_snapshots import PLAIN_TYPES
from rankless.user_code import display_name, is_user_code

ENVIRON_GETITEM_CODE = type(os.environ).__getitem__.__code__
LOGGER_LOG_CODE = logging.Logger._log.__code__


class PythonTracer:
    """Records what one pass of a capture runs."""

    def __init__(self) -> None:
        self.codes: dict[CodeType, dict[str, Any]] = {}
        """The user's code objects that ran, with their globals."""
        self.objects: dict[tuple[int, CodeType], tuple[str, Any]] = {}
        """The objects in the variables of that code, with the variables' names."""
        self.environment: set[str] = set()
        """The environment variables that the code read."""
        self.print_line: str | None = None
        """The first line that prints or logs."""
        self._user_file_cache: dict[str, bool] = {}

    @contextlib.contextmanager
    def trace(self) -> Iterator[None]:
        """Within the context, profile the calls on this thread; another profiler pauses.

        Garbage collection pauses too: finalizers and callbacks of any library would run at arbitrary moments.
        """
        before: Any = sys.getprofile()
        collects = gc.isenabled()
        gc.disable()
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            if collects:
                gc.enable()
            # For cProfile, `before` is the profiler object, not a function.
            if hasattr(before, "enable"):
                before.enable()
            else:
                sys.setprofile(before)

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            owner = getattr(argument, "__self__", None)
            if argument is print or owner is sys.stdout or owner is sys.stderr:
                self._record_print(frame)
            else:
                refuse_file_write(argument, frame)
            refuse_impure_call(argument, frame)
        elif event in ("call", "return"):
            code = frame.f_code
            if self._is_user_frame(frame):
                self.codes[code] = frame.f_globals
                for name, value in frame.f_locals.items():
                    self._record_object(name, value, code)
                caller = frame.f_back
                if event == "return" and caller is not None and self._is_user_frame(caller):
                    self._record_object(code.co_name, argument, caller.f_code)
            elif event == "call" and code is LOGGER_LOG_CODE:
                self._record_print(frame.f_back)
            elif event == "call" and code is ENVIRON_GETITEM_CODE and find_user_frame(frame) is not None:
                self.environment.add(frame.f_locals["key"])

    def _record_print(self, frame: FrameType | None) -> None:
        """Record the first line that prints or logs."""
        while frame is not None and self.print_line is None and not self._is_user_frame(frame):
            frame = frame.f_back
        if frame is not None and self.print_line is None:
            self.print_line = f"{display_name(frame.f_code.co_filename)}:{frame.f_lineno}"

    def _is_user_frame(self, frame: FrameType) -> bool:
        file = frame.f_code.co_filename
        if file.startswith("<"):
            # Generated code, such as a dataclass's methods, belongs to the module of its globals.
            module = frame.f_globals.get("__name__", "__main__")
            file = getattr(sys.modules.get(module), "__file__", None) or ("<frozen" if module != "__main__" else file)
        is_user = self._user_file_cache.get(file)
        if is_user is None:
            is_user = self._user_file_cache[file] = is_user_code(file)
        return is_user

    def _record_object(self, name: str, value: Any, code: CodeType) -> None:
        if not isinstance(value, PLAIN_TYPES) and not isinstance(value, Tensor):
            self.objects.setdefault((id(value), code), (name, value))

    def drop_temporaries(self) -> None:
        """Drop objects that nothing else refers to: the pass created them."""
        count = -1
        while count != len(self.objects):
            count = len(self.objects)
            references = Counter(identity for identity, _ in self.objects)
            # Besides the tuples in `objects`, only getrefcount's argument refers to the object.
            temporary = [
                key for key, entry in self.objects.items() if sys.getrefcount(entry[1]) <= references[key[0]] + 1
            ]
            for key in temporary:
                del self.objects[key]
