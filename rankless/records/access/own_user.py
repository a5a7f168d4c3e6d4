"""Whether the other end of a Unix socket belongs to this process's user.

A socket whose name is in no folder has no permissions: every local user may connect to it.
"""

import os
import socket
import struct

_CREDENTIALS = struct.Struct("iII")


def is_own_user(connection: socket.socket) -> bool:
    """Return whether a process of this user has connected. The system says so, and no process can pretend it."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(data)[1]
    return user == os.geteuid()
