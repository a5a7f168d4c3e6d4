"""Files and folders that Rankless makes for itself: only the user who starts a run may read them.

The log of a script may show data, and the paths and the environment of its user. Files that the user names, and
checkpoints, get the modes that the user's umask gives.

A Unix socket whose name is in no folder has no permissions: every local user may connect to it. So its server asks
whose process has connected.
"""

import os
import socket
import struct
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


_CREDENTIALS = struct.Struct("iII")


def is_own_user(connection: socket.socket) -> bool:
    """Return whether a process of this user has connected. The system says so, and no process can pretend it."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(data)[1]
    return user == os.geteuid()
