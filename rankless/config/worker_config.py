"""The configuration of a host's processes: of each worker, of the workers' parent, and of a fork server."""

from typing import Literal

import msgspec

from rankless.config.run_config import Precision, Program, RunObservation


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that one worker is told. It travels in one environment variable, beside torchrun's own."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: str
    threads: int
    backend: Literal["gloo", "nccl"]
    master_address: str
    master_port: int
    run_id: str
    seed: int | None
    log_file: str
    error_log_file: str | None = None
    """Where standard error goes, if not to the log file too."""
    recording: str | None = None
    perturbation_seed: int | None = None
    dtype: Precision | None = None
    observation: RunObservation = RunObservation()
    progress: bool = True
    """Send progress records up."""
    records_descriptor: int | None = None
    """The inherited socket on which records go up."""
    store_descriptor: int | None = None
    """Rank 0 only: an inherited socket that listens already, on which it serves the store that all ranks
    meet at.
    """
    interface: str | None = None
    """The network interface by which other hosts are reached; None where all workers are on this one."""
    host: int = 0
    """The place of its host among the job's."""
    host_count: int = 1
    store_address: str = "127.0.0.1"
    store_port: int | None = None
    status_descriptor: int | None = None
    """The inherited memory in which it writes its steps, and, asked, its stacks; None where nobody looks."""
    rounds_descriptor: int | None = None
    """The inherited socket to the driver of an elastic job."""
    process_id: int | None = None
    """The worker's own; a child of it inherits the environment but is not the worker."""


class WorkerLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as its parent starts it."""

    config: WorkerConfig
    environment: dict[str, str | None]
    """Variables to set, or to remove, on top of the parent's own."""


class HostConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that the parent of the workers is told. It comes in through its standard input, as JSON."""

    program: Program
    warm: bool
    workers: tuple[WorkerLaunch, ...]
    other_hosts: tuple[str, ...] = ()
    """The addresses of the job's other hosts, where they are known."""
    control_descriptor: int
    records_descriptor: int
    store_descriptor: int | None
    launches_descriptor: int | None = None
    """The socket on which further workers are ordered, in an elastic job."""

    def descriptors(self) -> list[int]:
        """Those that the parent is to inherit, under these numbers."""
        pages = (launch.config.status_descriptor for launch in self.workers)
        sockets = (self.control_descriptor, self.records_descriptor, self.store_descriptor, self.launches_descriptor)
        return [descriptor for descriptor in (*sockets, *pages) if descriptor is not None]


class ForkServerPoolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that a fork server is told at its start, as `HostConfig` is."""

    connection_descriptor: int
    with_jobs: bool
    """Whether the programs of its runs call jobs."""
