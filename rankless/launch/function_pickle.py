"""Functions that travel to other processes by value, with the names and the source of the notebook's cells.

A cell's code has a name that only its notebook can resolve, such as /tmp/ipykernel_7/123.py. In the other process its
lines are called as the notebook calls them ("Cell In[3]"), and tracebacks show them.
"""

import collections
import io
import linecache
import os
import types
from collections.abc import Callable, MutableMapping
from typing import Any

import cloudpickle  # type: ignore[import-untyped]  # it has no types

from rankless.user_code import cell_name


def pickle_call(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bytes, dict[str, list[str]]]:
    """Return a function and its arguments as bytes, and the source lines of its code that stands in no file."""
    with io.BytesIO() as buffer:
        pickler = _CodePickler(buffer)
        pickler.dump((function, args))
        return buffer.getvalue(), pickler.sources


class _CodePickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    def __init__(self, file: io.BytesIO) -> None:
        self.sources: dict[str, list[str]] = {}
        self._reduce = cloudpickle.Pickler.dispatch_table[types.CodeType]
        # Before the constructor, which reads it.
        self.dispatch_table: MutableMapping[type, Any] = collections.ChainMap(
            {types.CodeType: self._reduce_code}, cloudpickle.Pickler.dispatch_table
        )
        super().__init__(file)

    def _reduce_code(self, code: types.CodeType) -> Any:
        file, name = code.co_filename, cell_name(code.co_filename) or code.co_filename
        if name not in self.sources and not os.path.exists(file) and (lines := linecache.getlines(file)):
            self.sources[name] = lines
        return self._reduce(code.replace(co_filename=name))
