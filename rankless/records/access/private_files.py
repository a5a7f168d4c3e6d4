"""Files and folders that Rankless makes for itself: only the user who starts a run may read them.

The log of a script may show data, and the paths and the environment of its user. Files that the user names, and
checkpoints, get the modes that the user's umask gives.
"""

import os
from pathlib import Path

FOLDER_MODE = 0o700
FILE_MODE = 0o600


def private_opener(path: str, flags: int) -> int:
    """Open a file, as the argument `opener` of `open`: a new file is private."""
    return os.open(path, flags, FILE_MODE)


def make_private_folder(path: str | Path, *, may_exist: bool = True) -> None:
    """Make a folder that is private, and its parents, which are not, where they are missing.

    Raises FileExistsError if the folder exists and may not.
    """
    os.makedirs(path, mode=FOLDER_MODE, exist_ok=may_exist)
