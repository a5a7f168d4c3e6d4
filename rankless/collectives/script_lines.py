"""Where in the user's script a collective was called."""

import sys

NOT_THE_SCRIPT = ("rankless", "torch", "contextlib")


def line_of_the_script() -> str:
    """The file and line of the innermost frame that is neither ours nor PyTorch's, nor a context manager's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in NOT_THE_SCRIPT:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
