"""Runs the user's program as plain Python does: `__main__`, `sys.argv`, `sys.path[0]` and tracebacks are the same."""

import builtins
import importlib.machinery
import importlib.util
import os
import signal
import string
import sys
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import NoReturn

import msgspec

from rankless.config.run_config import Program

_IGNORED_BY_PYTHON = ("SIGPIPE", "SIGXFZ", "SIGXFSZ")

LOADED_AT_START = frozenset(
    (
        *("_collections_abc", "_sitebuiltins", "abc", "codecs", "encodings", "genericpath", "io"),
        *("linecache", "os", "posixpath", "site", "sitecustomize", "stat", "usercustomize"),
    )
)
"""The modules that Python itself imports before any script. No script can shadow them."""


def expand_local_rank(program: Program, local_rank: int) -> Program:
    """Replace `${local_rank}` in the program's arguments by the worker's own."""
    if not program.has_macros:
        return program
    arguments = (string.Template(text).safe_substitute(local_rank=local_rank) for text in program.arguments)
    return msgspec.structs.replace(program, arguments=tuple(arguments))


def exec_command(program: Program) -> NoReturn:
    """Replace this process by the command. Raises OSError if the command cannot be executed."""
    for name in _IGNORED_BY_PYTHON:
        number = getattr(signal, name, None)
        if number is not None:
            signal.signal(number, signal.SIG_DFL)
    os.execvp(program.target, [program.target, *program.arguments])


def prepare_main(program: Program) -> Callable[[], None]:
    """Set up `__main__`, arguments and path for `program`, and return the function that runs it."""
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:  # multiprocessing sets this name for `__main__` when it is imported
        sys.modules["__mp_main__"] = main
    if program.kind == "script":
        compiled = _prepare_script(main, program)
    elif program.kind == "module":
        compiled = _prepare_module(main, program)
    else:
        sys.argv = ["-c", *program.arguments]
        _put_first_on_path("")
        main.__loader__ = importlib.machinery.BuiltinImporter
        compiled = lambda: compile(program.target, "<string>", "exec", dont_inherit=True)  # noqa: E731
    return lambda: exec(compiled(), main.__dict__)


def _prepare_script(main: ModuleType, program: Program) -> Callable[[], CodeType]:
    path = os.path.abspath(program.target)
    sys.argv = [program.target, *program.arguments]
    _put_first_on_path(os.path.dirname(os.path.realpath(path)))
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    main.__dict__["__cached__"] = None

    def compiled() -> CodeType:
        with open(path, "rb") as script:
            return compile(script.read(), path, "exec", dont_inherit=True)

    return compiled


def _prepare_module(main: ModuleType, program: Program) -> Callable[[], CodeType]:
    sys.argv = ["-m", *program.arguments]
    _put_first_on_path(os.getcwd())

    def compiled() -> CodeType:
        name = program.target
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(name + ".__main__")
        if spec is None or spec.loader is None or not hasattr(spec.loader, "get_code"):
            raise ModuleNotFoundError(f"No module named {name}", name=name)
        code = spec.loader.get_code(spec.name)
        if not isinstance(code, CodeType):
            raise ImportError(f"No code object available for {spec.name}", name=name)
        main.__spec__ = spec
        main.__package__ = spec.parent
        main.__loader__ = spec.loader
        main.__file__ = spec.origin
        main.__dict__["__cached__"] = spec.cached
        sys.argv[0] = spec.origin or name
        return code

    return compiled


def _put_first_on_path(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)
        unload_shadowed(folder or os.getcwd())


def unload_shadowed(folder: str) -> None:
    """Unload modules that files in `folder` shadow, so that a script imports its own `queue.py`, for example."""
    try:
        entries = os.listdir(folder)
    except OSError:
        return
    for entry in entries:
        name, extension = os.path.splitext(entry)
        path = os.path.join(folder, entry)
        file = path if extension else os.path.join(path, "__init__.py")
        is_module = extension == ".py" or os.path.isfile(os.path.join(path, "__init__.py"))
        if not is_module or name not in sys.modules or name in LOADED_AT_START | {"rankless"}:
            continue
        origin = getattr(sys.modules[name], "__file__", None)
        # Modules without a file are the interpreter's own. In plain Python no script can shadow them either.
        if origin is None or os.path.realpath(origin) == os.path.realpath(file):
            continue
        for key in [key for key in sys.modules if key.partition(".")[0] == name]:
            del sys.modules[key]
