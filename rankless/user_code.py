"""Tells user code from library code, and finds the line of the user's script or notebook that made a call.

Errors, warnings, recordings and stack dumps all use it. It imports no torch, because the agent uses it too.

Note [names of files]: a file's name is relative to the folder that Python found it in: the script's own folder, or a
folder of `sys.path`. The same script has the same lines on two hosts that keep it in different folders, and ranks can
compare what names them. `linecache` resolves such names as Python does.
"""

import functools
import importlib.util
import os
import sys
import sysconfig
from types import FrameType
from typing import Any

PACKAGE_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep
"""The folder of Rankless itself."""
STANDARD_FOLDER = sysconfig.get_path("stdlib") + os.sep
INSTALLED_FOLDERS = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")})
_STANDARD_FOLDERS = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
_PACKAGE_FOLDERS = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_GENERATED = ("<frozen", "<rankless")


@functools.cache
def _framework_folders() -> tuple[str, ...]:
    """Return the folders of PyTorch, and of the packages with which PyTorch computes symbolic sizes."""
    torch = importlib.util.find_spec("torch")
    folders = () if torch is None or torch.origin is None else (os.path.dirname(torch.origin) + os.sep,)
    symbolic = tuple(folder + name + os.sep for folder in INSTALLED_FOLDERS for name in ("sympy", "mpmath"))
    return (*folders, PACKAGE_FOLDER, *_GENERATED, *symbolic)


def is_user_code(file: str | None) -> bool:
    """Return whether a file belongs to neither PyTorch, Rankless nor Python. Installed packages are user code."""
    if file is None or file.startswith(_framework_folders()):
        return False
    return file.startswith(INSTALLED_FOLDERS) or not file.startswith(STANDARD_FOLDER)


def is_library(file: str) -> bool:
    """Return whether a file belongs to Python, to an installed package or to Rankless."""
    if file.startswith((PACKAGE_FOLDER, *_GENERATED, *_STANDARD_FOLDERS, *INSTALLED_FOLDERS)):
        return True
    return any(folder in file for folder in _PACKAGE_FOLDERS)


def is_standard(file: str) -> bool:
    """Return whether a file belongs to Python itself."""
    standard = file.startswith((*_GENERATED, *_STANDARD_FOLDERS))
    return standard and not any(folder in file for folder in _PACKAGE_FOLDERS)


def running_ipython() -> Any:
    """Return the IPython shell in which this process runs what its user types, a notebook's too, or None.

    A script may import IPython, for example to display a table, without being a session of it.
    """
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return None if get_ipython is None else get_ipython()


def cell_name(file: str) -> str | None:
    """Return the notebook's name of a cell whose code is in `file`, such as "Cell In[3]"; None for any other file."""
    format_code_name = getattr(getattr(running_ipython(), "compile", None), "format_code_name", None)
    cell = None if format_code_name is None else format_code_name(file)
    return None if cell is None else " ".join(cell)


def display_name(file: str) -> str:
    """Return the name of a file of code for messages and records; see Note [names of files].

    A cell of a notebook is "Cell In[3]". A file that lies below no folder of Python's path keeps its whole path.
    """
    return cell_name(file) or _relative_name(file, getattr(sys.modules.get("__main__"), "__file__", None) or "")


@functools.cache
def _relative_name(file: str, script: str) -> str:
    """Return a file's path from the innermost folder of Python's path, or of the script, that it lies below."""
    folders = [os.path.dirname(os.path.abspath(script))] if script else []
    folders += [os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)]
    beginnings = [folder + os.sep for folder in folders if folder != os.sep]
    return file.removeprefix(max(filter(file.startswith, beginnings), key=len, default=""))


def shorten_path(path: str, folder: str = "") -> str:
    """Return a path relative to the script's folder, or to the working directory, if it lies below one of them.

    Stacks of ranks are compared, and hosts may keep the same script in different folders.
    """
    if folder and path.startswith(folder + os.sep):
        return path.removeprefix(folder + os.sep)
    if not os.path.isabs(path):
        return path
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def user_line(frame: FrameType | None) -> str:
    """Return the innermost line of user code from `frame` outwards, as "model.py:12", or "" if there is none."""
    while frame is not None and not is_user_code(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{display_name(frame.f_code.co_filename)}:{frame.f_lineno}"


def script_line(frame: FrameType | None) -> str:
    """Return the innermost line of the user's own files, outside installed packages, or "" if there is none."""
    while frame is not None:
        file = frame.f_code.co_filename
        name = display_name(file)
        if not name.startswith("<") and not is_library(file):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def caller_line() -> str:
    """Return the line of user code that called Rankless, or this thread's outermost line if no user code did."""
    frame = outermost = sys._getframe(1)
    while outermost.f_back is not None:
        outermost = outermost.f_back
    return user_line(frame) or f"{display_name(outermost.f_code.co_filename)}:{outermost.f_lineno}"
