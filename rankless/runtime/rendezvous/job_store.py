"""Where the ranks of a job meet, whoever has started them: this process's place among them, and a store they share."""

import contextlib
import importlib
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from rankless.config import environment
from rankless.config.hosts import interface_towards
from rankless.config.rank_layout import assign_ranks
from rankless.config.worker_config import WorkerConfig
from rankless.errors import JoinError
from rankless.records.elastic_messages import RankAssignment
from rankless.runtime.rendezvous.address import RendezvousParameters
from rankless.runtime.rendezvous.tcp import join_tcp_rendezvous

if TYPE_CHECKING:
    from rankless.config.horovod_variables import HorovodWorker

STORE_TIMEOUT = timedelta(minutes=5)
JOINING_SECONDS = 1800.0
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class RendezvousInfo:
    """One process's place in its job."""

    rank: int
    size: int
    store: Any
    """A `torch.distributed.Store` of all ranks."""
    address: str = LOOPBACK
    """At which rank 0's host is reached by all."""
    assignment: RankAssignment | None = None
    """Also on its host, and its host among the others; None where the launcher has not told."""


def find_rendezvous_info() -> RendezvousInfo:
    """The place that a launcher has told: Rankless, Horovod's own, torchrun or mpirun; or that torch.distributed's
    default group has; a place alone if there is none. Raises JoinError if the ranks do not come together.
    """
    config = environment.read_worker_config()
    if config is not None:
        return _place_of_worker(config)
    horovod = environment.read_horovod_worker()
    if horovod is not None:
        # Before torchrun's: what sets those for a pod as a whole, horovodrun hands on to all of its workers.
        return _place_by_horovod(horovod)
    torchrun = environment.read_torchrun()
    has_group = dist.is_available() and dist.is_initialized() and not environment.is_child_of_worker()
    if torchrun is not None and torchrun.world_size > 1 and (torchrun.master_address is not None or not has_group):
        return _place_by_torchrun(torchrun)
    if has_group:
        store = dist.distributed_c10d._get_default_store()
        return RendezvousInfo(rank=dist.get_rank(), size=dist.get_world_size(), store=store)
    return RendezvousInfo(rank=0, size=1, store=dist.HashStore())  # type: ignore[attr-defined]  # missing in the stubs


def parameters_from_torchrun(torchrun: environment.TorchrunWorker) -> RendezvousParameters:
    """Where torchrun, or a launcher like it, has its processes meet. Raises JoinError where it has not said."""
    if torchrun.master_address is None or torchrun.master_port == 0:
        missing = "MASTER_ADDR" if torchrun.master_address is None else "MASTER_PORT"
        raise JoinError(
            expected="a launcher that tells where the ranks meet",
            found=f"rank {torchrun.rank} of {torchrun.world_size}, and no {missing}",
            fix=f"start the job by `rankless horovodrun -np {torchrun.world_size} …`, also in the place of mpirun; or "
            "set MASTER_ADDR to an address of rank 0's host, and MASTER_PORT to a free port there; "
            "RANK=0 WORLD_SIZE=1 let a process train alone",
        )
    return RendezvousParameters(
        kind="tcp",
        host=torchrun.master_address,
        port=torchrun.master_port,
        rank=torchrun.rank,
        world_size=torchrun.world_size,
        timeout_seconds=JOINING_SECONDS,
        served=torchrun.has_store,
    )


def _place_of_worker(config: WorkerConfig) -> RendezvousInfo:
    return RendezvousInfo(
        rank=config.rank,
        size=config.world_size,
        store=_store_of(config) if config.world_size > 1 else dist.HashStore(),  # type: ignore[attr-defined]  # as above
        address=config.store_address,
        assignment=RankAssignment(
            rank=config.rank,
            size=config.world_size,
            local_rank=config.local_rank,
            local_size=config.local_world_size,
            cross_rank=config.host,
            cross_size=config.host_count,
        ),
    )


def _place_by_torchrun(torchrun: environment.TorchrunWorker) -> RendezvousInfo:
    parameters = parameters_from_torchrun(torchrun)
    rendezvous = join_tcp_rendezvous(parameters, print_notice)
    if rendezvous.is_on_one_host:
        environment.prefer_loopback()
    return RendezvousInfo(
        rank=torchrun.rank,
        size=torchrun.world_size,
        store=rendezvous.store,
        address=LOOPBACK if rendezvous.is_on_one_host else parameters.host,
    )


def _place_by_horovod(told: "HorovodWorker") -> RendezvousInfo:
    if told.world_size == 1:
        return RendezvousInfo(rank=0, size=1, store=dist.HashStore(), assignment=told.assignment)  # type: ignore[attr-defined]  # as above
    # Imported here: only processes of Horovod's own launcher need it.
    horovod = importlib.import_module("rankless.runtime.rendezvous.horovod")
    rendezvous, served = horovod.join_horovod_rendezvous(told, print_notice)
    environment.prefer_interface(told.interface or interface_towards(told.address)[0])
    return RendezvousInfo(
        rank=told.rank,
        size=told.world_size,
        store=rendezvous.store,
        address=served.host,
        assignment=told.assignment or assign_ranks([one.host for one in rendezvous.arrived])[told.rank],
    )


def _store_of(config: WorkerConfig) -> Any:
    """The store at which ranks meet; rank 0 serves it on the local socket that the agent has opened."""
    if config.store_port is None:
        raise RuntimeError("a worker plan without a store")
    listening = None
    if config.store_descriptor is not None:
        with contextlib.suppress(OSError):
            listening = socket.socket(fileno=config.store_descriptor).detach()
    return dist.TCPStore(  # type: ignore[attr-defined]  # public, missing in the stubs
        config.store_address,
        config.store_port,
        config.world_size,
        config.rank == 0,
        timeout=STORE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listening,
    )


def print_notice(text: str) -> None:
    """Tell the user something in a process that has nobody to tell it for it."""
    print(f"rankless: {text}", file=sys.stderr, flush=True)
