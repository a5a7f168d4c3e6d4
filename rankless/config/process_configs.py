"""The configuration of a host's processes: of each worker, of the workers' parent, and of a fork server."""

from collections.abc import Mapping
from typing import Any

import msgspec

from rankless.config.run_config import Backend, PlanFile, Precision, Program, RunObservation
from rankless.records.parallel_plan import PlannedAxis, ZeroLevel


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that one worker needs. It travels in one environment variable, besides torchrun's."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: str
    threads: int
    backend: Backend
    master_address: str
    master_port: int
    run_id: str
    seed: int | None
    log_file: str
    error_log_file: str | None = None
    """The file for standard error; None if it goes to `log_file` too."""
    recording: str | None = None
    perturbation_seed: int | None = None
    dtype: Precision | None = None
    plan: PlanFile | None = None
    mesh: tuple[PlannedAxis, ...] = ()
    """The axes of the mesh from the outermost; none for one axis `data` of all workers."""
    observation: RunObservation = RunObservation()
    is_logical: bool = False
    """Whether the script runs in the logical view: it knows no ranks, and its batches are divided."""
    zero: ZeroLevel | None = None
    """The training state that is sharded in the logical view."""
    replaces_workers: bool = False
    """Whether a copy of another worker takes the place of a killed one."""
    hosts_of_copies: tuple[int, ...] = ()
    """The index of each worker's host, if workers keep copies of others' shards; else none."""
    progress: bool = True
    """Whether the worker sends progress records to the agent."""
    records_descriptor: int | None = None
    """The inherited socket on which the worker sends records to the agent."""
    interface: str | None = None
    """The network interface that leads to the other hosts; None if all workers are on this one."""
    host: int = 0
    """The index of its host."""
    host_count: int = 1
    store_address: str = "127.0.0.1"
    store_port: int | None = None
    store_token: str = ""
    """What the store of all ranks asks for. See Note [store access] in `records.store_authentication`."""
    status_descriptor: int | None = None
    """The inherited memory to which it writes its steps and, on request, its stacks; None without a watchdog."""
    rounds_descriptor: int | None = None
    """The inherited socket to the driver of an elastic job."""
    recovery_descriptor: int | None = None
    """The inherited socket to the agent, which tells survivors how to continue; None: a lost worker ends the run."""
    roles: Mapping[str, Any] = {}
    """What the run's processes beside its workers are for a worker, by the name of their extension: plain values."""
    options: Mapping[str, Mapping[str, Any]] = {}
    """The settings of extensions whose options the user gives, by the name of the extension."""
    inherited: tuple[int, ...] = ()
    """Descriptors that workers inherit for those processes."""
    terminal: tuple[int, ...] = ()
    """Inherited descriptors of the agent's standard input, output and error; of the input alone; or none."""
    is_debugged: bool = False
    """Whether some rank of the run has the terminal for a debugger, so that this rank waits for it."""
    process_id: int | None = None
    """The worker's process id. A child inherits the environment but is not the worker."""


class WorkerLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration and environment of a worker to start."""

    config: WorkerConfig
    environment: dict[str, str | None]
    """Variables to set, or to remove where None, on top of the parent's."""


class HostConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that the parent of a host's workers needs. It reads it from standard input, as JSON."""

    program: Program
    warm: bool
    preload: tuple[str, ...] = ()
    """Modules to import before the workers are forked."""
    workers: tuple[WorkerLaunch, ...]
    other_hosts: tuple[str, ...] = ()
    """The addresses of the job's other hosts, as far as they are known."""
    control_descriptor: int
    records_descriptor: int
    launches_descriptor: int | None = None
    """The socket on which the driver of an elastic job requests more workers."""

    def descriptors(self) -> list[int]:
        """Return the descriptors that the parent inherits under the same numbers."""
        configs = [launch.config for launch in self.workers]
        pages = [each for config in configs for each in (config.status_descriptor, config.recovery_descriptor)]
        sockets = (self.control_descriptor, self.records_descriptor, self.launches_descriptor)
        shared = {descriptor for config in configs for descriptor in config.inherited}
        terminal = [each for config in configs for each in config.terminal]
        return [descriptor for descriptor in (*sockets, *pages, *shared, *terminal) if descriptor is not None]


class ForkServerPoolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that a fork server needs at its start. It reads it from standard input, as JSON."""

    connection_descriptor: int
    with_jobs: bool
    """Whether the programs of its runs call jobs, so that it imports what jobs need."""
