"""The line of the user's script from which a call came, found by where its file lies."""

import sysconfig
from types import FrameType

_LIBRARIES = (*{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}, "<")


def is_library(file: str) -> bool:
    """Whether a file of Python code is Python's own or an installed package's; so is code that has no file."""
    return file.startswith(_LIBRARIES)


def script_line(frame: FrameType | None) -> str:
    """The innermost line, from `frame` outwards, that is neither a library's nor ours; "" if there is none."""
    while frame is not None:
        file = frame.f_code.co_filename
        ours = frame.f_globals.get("__name__", "").partition(".")[0] == "rankless"
        if not ours and not is_library(file):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
