"""Saves in forked processes that kill themselves at the n-th point: before a call on the disk, or amid a write."""

import os
import signal
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoint.saved_objects import SOLO, save

from rankless.checkpoint import tensor_file_writer
from rankless.parallel.mesh import Mesh

DISK_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree"}
PIECES = 12
"""The number of pieces in which each tensor is written. A kill may follow each of them."""


class Countdown:
    """Kills this process at the n-th point."""

    def __init__(self, points):
        self.left = points

    def point(self):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def arm(self):
        """Count every call on the disk from now on, and every piece of a file."""
        sync = os.fsync

        def fsync(descriptor):
            self.point()
            sync(descriptor)

        def write_all(descriptor, data, offset):
            size = -(-len(data) // PIECES) or 1
            for start in range(0, len(data), size):
                self.point()
                os.pwrite(descriptor, data[start : start + size], offset + start)

        def write_bytes(file, data):
            self.write(file, data)

        os.fsync = fsync
        tensor_file_writer.write_all = write_all
        Path.write_bytes = write_bytes
        sys.addaudithook(lambda event, _: self.point() if event in DISK_EVENTS else None)

    def write(self, file, data):
        with open(file, "wb", buffering=0) as stream:
            size = -(-len(data) // PIECES)
            for start in range(0, len(data), size):
                self.point()
                stream.write(data[start : start + size])


def save_until_killed(path, objects, *, points, killed_rank=0, ranks=1, save_with=save, **options):
    """Save on `ranks` forked processes, of which `killed_rank` dies at its n-th point. Return whether it survived.

    As a launcher would, this ends the other ranks when that rank has died.
    """
    store = path.with_name(f"{path.name}.store")
    store.unlink(missing_ok=True)
    children = [
        os.fork()
        or _child(path, points, (rank, ranks, killed_rank), lambda mesh: save_with(path, objects, mesh=mesh, **options))
        for rank in range(ranks)
    ]
    killed = _was_killed(children.pop(killed_rank))
    for child in children:
        if killed:
            os.kill(child, signal.SIGKILL)
        # It may have detected the death of the other rank, and failed before the signal.
        assert not _was_killed(child, expected_code=None if killed else 0) or killed
    store.unlink(missing_ok=True)
    return not killed


def _was_killed(child, expected_code=0):
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return True
    assert expected_code is None or os.WEXITSTATUS(status) == expected_code
    return False


def _child(path, points, rank_numbers, save_on):
    rank, ranks, killed_rank = rank_numbers
    code = 1
    try:
        mesh = _mesh(rank, ranks, path.with_name(f"{path.name}.store"))
        if rank == killed_rank:
            Countdown(points).arm()
        save_on(mesh)
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)


def _mesh(rank, ranks, store):
    if ranks == 1:
        return SOLO
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(str(store), ranks), rank=rank, world_size=ranks)
    return Mesh(rank=rank, size=ranks, device=torch.device("cpu"), group=dist.group.WORLD)
