"""Ends process groups in shared memory from another process, so that a rank that waits in a collective raises.

A rank that waits looks at its group's memory at least every 50 ms. The parent of the ranks writes there that the run
ends. It finds the memory among the open files of the ranks, as files of the launcher's own user.
"""

import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress

from rankless.records.group_failures import (
    FAILURE_OFFSET,
    GROUP_MARK,
    MARK_OFFSET,
    WORD_BYTES,
    FailureKind,
    encode_failure,
)
from rankless.runtime.process_tree import descendants

_WORD = struct.Struct("=Q")
_NAME_PART = "rankless-"
"""In the name of every memory that processes of a run share."""


def end_shared_groups(process_ids: Iterable[int]) -> None:
    """End the groups in shared memory of these processes and their descendants. Their waits raise `CollectiveError`."""
    for process_id in process_ids:
        for each in (process_id, *descendants(process_id)):
            for path in _find_memory(each):
                with suppress(OSError):  # the process has ended, or has closed the group
                    _end_group(path)


def _find_memory(process_id: int) -> Iterator[str]:
    with suppress(OSError):
        for name in os.listdir(f"/proc/{process_id}/fd"):
            path = f"/proc/{process_id}/fd/{name}"
            with suppress(OSError):
                if _NAME_PART in os.readlink(path):
                    yield path


def _end_group(path: str) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        head = os.pread(descriptor, MARK_OFFSET + WORD_BYTES, FAILURE_OFFSET)
        if len(head) == MARK_OFFSET + WORD_BYTES:
            (word,), (mark,) = _WORD.unpack_from(head, FAILURE_OFFSET), _WORD.unpack_from(head, MARK_OFFSET)
            if mark == GROUP_MARK and not word:
                os.pwrite(descriptor, _WORD.pack(encode_failure(FailureKind.RUN_ENDED, 0)), FAILURE_OFFSET)
    finally:
        os.close(descriptor)
