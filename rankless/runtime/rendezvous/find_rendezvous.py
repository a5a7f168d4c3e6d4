"""Find the rendezvous of this process with the ranks of its job, whichever launcher has started them."""

import sys
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from rankless.config import environment
from rankless.config.environment import TorchrunWorker
from rankless.config.hosts_and_addresses import LOOPBACK
from rankless.config.process_configs import WorkerConfig
from rankless.errors import JoinError
from rankless.records.elastic_driver_protocol import RankAssignment
from rankless.runtime.rendezvous.connect_to_run_store import open_worker_store
from rankless.runtime.rendezvous.init_address_and_rank import RendezvousParameters
from rankless.runtime.rendezvous.join_at_tcp_address import join_tcp_rendezvous

JOIN_TIMEOUT_SECONDS = 1800.0
OTHER_LAUNCHERS = {
    "mpirun": "start the job by `rankless horovodrun -np {size} …`, also instead of mpirun; or ",
    "srun": "start the job by `rankless run` on each host, with one task per host; or ",
}
"""What to type instead of a launcher that sets no address."""


@dataclass(frozen=True, kw_only=True)
class RendezvousInfo:
    """What one process needs to communicate with the other ranks of its job."""

    rank: int
    size: int
    store: Any
    """The `torch.distributed.Store` of all ranks."""
    address: str = LOOPBACK
    """The address at which all ranks reach rank 0's host."""
    assignment: RankAssignment | None = None
    """The ranks within the host and across hosts too; None if the launcher does not say them."""


def find_rendezvous_info() -> RendezvousInfo:
    """Find rank, size and store of this process, and wait for the other ranks if that takes a rendezvous.

    Reads what the launcher says: Rankless, an extension's, torchrun, mpirun, srun or Kubernetes. Without a launcher,
    uses the default group of torch.distributed; without that, returns a job of one. Raises JoinError if some ranks do
    not join.
    """
    config = environment.read_worker_config()
    if config is not None:
        return _from_worker_config(config)
    launched = environment.read_launched_worker()
    if launched is not None:
        # Before torchrun's variables: a pod may set those as a whole, and a launcher may pass them to all its workers.
        info: RendezvousInfo = launched.join(print_notice)
        return info
    torchrun = environment.read_torchrun()
    has_group = dist.is_available() and dist.is_initialized() and not environment.is_child_of_worker()
    if torchrun is not None and torchrun.world_size != 1 and not (has_group and prefers_group(torchrun)):
        return _join_by_torchrun(torchrun)
    if has_group:
        store = dist.distributed_c10d._get_default_store()
        return RendezvousInfo(rank=dist.get_rank(), size=dist.get_world_size(), store=store)
    return RendezvousInfo(rank=0, size=1, store=dist.HashStore())  # type: ignore[attr-defined]  # missing in the stubs


def prefers_group(torchrun: TorchrunWorker) -> bool:
    """Return whether a process group of the script says more than the launcher's variables."""
    return torchrun.master_address is None or torchrun.launcher in ("srun", "Kubernetes") or not torchrun.is_complete


def parameters_from_torchrun(torchrun: TorchrunWorker) -> RendezvousParameters:
    """Return where torchrun, or a similar launcher, has its processes rendezvous.

    Raises JoinError if it does not say.
    """
    if torchrun.launcher == "Kubernetes" and not torchrun.is_complete:
        raise JoinError(
            expected="a job whose number of processes is known",
            found=f"JOB_COMPLETION_INDEX={torchrun.rank}, and no WORLD_SIZE above it",
            fix="set WORLD_SIZE to the completions of the Kubernetes job, MASTER_ADDR to the name of the pod with "
            "index 0, and MASTER_PORT to a port; with WORLD_SIZE=1 each pod trains alone",
        )
    if not torchrun.is_complete:
        there, missing = ("WORLD_SIZE", "RANK") if torchrun.world_size else ("RANK", "WORLD_SIZE")
        raise JoinError(
            expected="RANK and WORLD_SIZE beside MASTER_ADDR",
            found=f"{there}, and no {missing}",
            fix="set RANK to a number of its own for each process, from 0, and WORLD_SIZE to the number of processes; "
            "or unset these variables for a process that trains alone",
        )
    if torchrun.master_address is None or torchrun.master_port == 0:
        missing = "MASTER_ADDR" if torchrun.master_address is None else "MASTER_PORT"
        raise JoinError(
            expected="a launcher that sets the address at which the ranks rendezvous",
            found=f"rank {torchrun.rank} of {torchrun.world_size}, and no {missing}",
            fix=OTHER_LAUNCHERS.get(torchrun.launcher, "").format(size=torchrun.world_size)
            + "set MASTER_ADDR to an address of rank 0's host, and MASTER_PORT to a free port there; "
            "with RANK=0 WORLD_SIZE=1 a process trains alone",
        )
    return RendezvousParameters(
        kind="tcp",
        host=torchrun.master_address,
        port=torchrun.master_port,
        rank=torchrun.rank,
        world_size=torchrun.world_size,
        timeout_seconds=JOIN_TIMEOUT_SECONDS,
        served_by_launcher=torchrun.has_store,
    )


def _from_worker_config(config: WorkerConfig) -> RendezvousInfo:
    return RendezvousInfo(
        rank=config.rank,
        size=config.world_size,
        store=open_worker_store(config),
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


def _join_by_torchrun(torchrun: TorchrunWorker) -> RendezvousInfo:
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


def print_notice(text: str) -> None:
    """Print a notice to standard error, in a process without an agent that would show it."""
    print(f"rankless: {text}", file=sys.stderr, flush=True)
