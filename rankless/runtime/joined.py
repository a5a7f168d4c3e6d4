"""A process that has joined its world: group, device, the way up. The only maker of process groups."""

import atexit
import contextlib
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rankless.collectives.mesh import Mesh
from rankless.plan import environment
from rankless.plan.run_plan import WorkerPlan
from rankless.records.channel import send_record
from rankless.records.events import AnyRecord, Said
from rankless.views.progress import ProgressMeter
from rankless.views.recording import Recorder
from rankless.views.world import World

STORE_TIMEOUT = timedelta(minutes=5)

Observer = Callable[[AnyRecord], None]


class Runtime:
    """What one process is in its job, from joining to leaving."""

    def __init__(
        self,
        *,
        mesh: Mesh,
        local_rank: int,
        up: Observer,
        plan: WorkerPlan | None,
        progress: bool,
        owns_group: bool,
    ) -> None:
        self.local_rank = local_rank
        self.process_id = os.getpid()
        self._up = up
        self._rank = mesh.rank
        self._said: set[str] = set()
        self._owns_group = owns_group
        self.world = World(
            mesh=mesh,
            say=self.say,
            record=up,
            recorder=Recorder(plan.recording, mesh.rank) if plan is not None and plan.recording is not None else None,
            perturbation_seed=plan.perturbation_seed if plan is not None else None,
            dtype=getattr(torch, plan.dtype) if plan is not None and plan.dtype is not None else None,
            meter=ProgressMeter(rank=mesh.rank, record=up) if progress and mesh.rank == 0 else None,
        )
        atexit.register(self.leave)

    def say(self, text: str) -> None:
        """Tell the user something, once; the ranks say the same things, so rank 0 speaks for all."""
        if self._rank == 0 and text not in self._said:
            self._said.add(text)
            self._up(Said(rank=0, time_ns=time.monotonic_ns(), text=text))

    def leave(self) -> None:
        """Finish what is being recorded, and destroy the group that joining made."""
        if os.getpid() != self.process_id:
            return
        self.world.passes.leave(self.say)
        if self.world.recorder is not None:
            self.world.recorder.finish()
        if self._owns_group and dist.is_initialized():
            self._owns_group = False
            dist.destroy_process_group()


def join(*, observer: Callable[[], Observer]) -> Runtime:
    """Join the world that this process was started for, or one of its own if it was started alone.

    `observer` makes what takes the records of a process that has no agent above it.
    """
    plan = environment.read_worker_plan()
    if plan is not None:
        return _join_as_worker(plan)
    torchrun = environment.read_torchrun()
    # A worker's forked child has inherited a group that is the worker's own, and must not touch it.
    may_join = not environment.is_child_of_worker()
    if may_join and (torchrun is not None or (dist.is_available() and dist.is_initialized())):
        return _join_existing(torchrun, observer)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    up = observer()
    return Runtime(mesh=Mesh.solo(device), local_rank=0, up=up, plan=None, progress=True, owns_group=False)


def _join_as_worker(plan: WorkerPlan) -> Runtime:
    device = _use_device(plan.device)
    owns_group = plan.world_size > 1 and not dist.is_initialized()
    if owns_group:
        dist.init_process_group(
            plan.backend,
            store=_meet(plan),
            rank=plan.rank,
            world_size=plan.world_size,
            device_id=_bound(plan, device),
        )
    descriptor = plan.records_descriptor

    def up(record: AnyRecord) -> None:
        if descriptor is not None:
            send_record(record, descriptor=descriptor, patient=isinstance(record, Said))

    return Runtime(
        mesh=_mesh_of_world(device),
        local_rank=plan.local_rank,
        up=up,
        plan=plan,
        progress=plan.progress,
        owns_group=owns_group,
    )


def _join_existing(torchrun: environment.Torchrun | None, observer: Callable[[], Observer]) -> Runtime:
    local_rank = torchrun.local_rank if torchrun is not None else 0
    own_gpu = torch.cuda.is_available() and local_rank < torch.cuda.device_count()
    device = _use_device(f"cuda:{local_rank}" if own_gpu else "cpu")
    owns_group = torchrun is not None and torchrun.world_size > 1 and not dist.is_initialized()
    if owns_group:
        dist.init_process_group("nccl" if own_gpu else "gloo")
    mesh = _mesh_of_world(device)
    up = observer() if mesh.rank == 0 else _drop
    return Runtime(mesh=mesh, local_rank=local_rank, up=up, plan=None, progress=True, owns_group=owns_group)


def _meet(plan: WorkerPlan) -> Any:
    """The store at which ranks meet; rank 0 serves it on the local socket that the agent has opened."""
    if plan.store_port is None:
        raise RuntimeError("a worker plan without a store")
    listening = None
    if plan.store_descriptor is not None:
        with contextlib.suppress(OSError):
            listening = socket.socket(fileno=plan.store_descriptor).detach()
    return dist.TCPStore(  # type: ignore[attr-defined]  # public, missing in the stubs
        plan.master_address,
        plan.store_port,
        plan.world_size,
        plan.rank == 0,
        timeout=STORE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listening,
    )


def _mesh_of_world(device: torch.device) -> Mesh:
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return Mesh.solo(device)
    return Mesh(rank=dist.get_rank(), size=dist.get_world_size(), device=device, group=dist.group.WORLD)


def _use_device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _bound(plan: WorkerPlan, device: torch.device) -> torch.device | None:
    return device if plan.backend == "nccl" else None


def _drop(_record: AnyRecord) -> None:
    """For ranks whose records nobody reads."""
