"""Which parameter servers of a run are lost: a byte for each in memory that the agent of a host and its workers share.

A worker that waits for a server looks there, so the agent never waits for a worker.
"""

import os

from rankless.records.shared_record import open_shared_file

NAME = "rankless-lost-servers"
_LOST = b"\1"


def open_lost_servers(count: int) -> int | None:
    """Return the descriptor of new memory for `count` servers, of which none is lost; None outside Linux."""
    return open_shared_file(NAME, count)


def mark_lost(descriptor: int, server: int) -> None:
    """Note that a server, by its index, is lost for good."""
    os.pwrite(descriptor, _LOST, server)


def is_server_lost(descriptor: int | None, server: int) -> bool:
    """Return whether a server, by its index, is lost for good. Without a descriptor none is."""
    return descriptor is not None and os.pread(descriptor, 1, server) == _LOST
