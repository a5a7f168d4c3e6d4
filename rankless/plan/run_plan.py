"""The two plans: one for a whole run, one for each of its workers."""

from typing import Literal

import msgspec

ProgramKind = Literal["script", "module", "code"]
ShowChoice = Literal["first", "all"]


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """The user's program as given to `rankless run`: a script's path, a module's name (`-m`) or code (`-c`)."""

    kind: ProgramKind
    target: str
    arguments: tuple[str, ...] = ()


class RunPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All that the agent needs to run one job on this host."""

    program: Program
    worker_count: int
    devices: tuple[str, ...]
    """One torch device name per worker, as "cpu" or "cuda:0"; two workers may share one."""
    threads_per_worker: int
    log_folder: str
    """The folder under which a new folder per run is made."""
    show: ShowChoice = "first"
    warm: bool = True
    """Fork the workers from a parent that has imported torch; False starts plain processes."""
    seed: int
    """Every worker's generators start from it; drawn anew for each run unless given."""
    recording: str | None = None
    """A folder into which each worker records its job results (for `rankless verify`), or None."""
    perturbation_seed: int | None = None
    """Set only for `verify`'s noise-floor run: gradients are disturbed in their last bit, drawn from this seed."""
    progress: bool = True


class WorkerPlan(msgspec.Struct, frozen=True, kw_only=True):
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
    seed: int
    log_file: str
    recording: str | None = None
    perturbation_seed: int | None = None
    progress: bool = True
    """Send progress records up."""
