"""The configuration of a whole run: what is asked for, what the agent runs, and what host 0 decides."""

from collections.abc import Mapping
from typing import Literal

import msgspec

from rankless.config.elastic import Elastic
from rankless.config.hosts import DEFAULT_PORT, Host
from rankless.config.launcher import LauncherChoice

ProgramKind = Literal["script", "module", "code", "command"]
ShowChoice = Literal["first", "all"]
Precision = Literal["float64"]
UNKNOWN_HOST = -1
AgentStart = Literal["ssh", "manual", "script"]


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """The user's program: a script's path, a module's name (`-m`), code (`-c`), or any command that is no Python."""

    kind: ProgramKind
    target: str
    arguments: tuple[str, ...] = ()
    has_macros: bool = False
    """Whether `${local_rank}` in an argument means the worker's number."""


class InspectedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A job call of which every value is to be written down: the `call`-th of the job, from 1."""

    job: str
    call: int


class RunObservation(msgspec.Struct, frozen=True, kw_only=True):
    """What a run leaves behind, beside its recording, for those who look at it; and how soon it ends."""

    stop_after_steps: int | None = None
    """End the script, as `sys.exit(0)` would, after so many training steps."""
    programs: str | None = None
    """A folder into which the jobs' programs are written (for `rankless plan`), or None."""
    inspected: InspectedCall | None = None
    is_reference: bool = False
    """The script is plain PyTorch, and recorded by its optimizers' steps instead of by jobs."""


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """The hosts of a job that has several, and how they come together."""

    hosts: tuple[Host, ...]
    """In the order of their ranks; host 0 plans, shows and saves."""
    host_index: int
    """This host's; UNKNOWN_HOST until host 0 has numbered it."""
    port: int = DEFAULT_PORT
    """On which host 0's agent listens."""
    agent_start: AgentStart = "ssh"
    """How the agents of the other hosts are started: by ssh from host 0; or each by hand, and the token is in a file
    that each has, or (by script) is brought to them by ssh from host 0.
    """
    is_listed: bool = True
    """Whether every host knows all the others' addresses; else only host 0's, and how many there are."""
    insecure: bool = False
    """Let whoever reaches the port join: there is no token."""
    join_timeout_seconds: float = 60.0
    copies: bool = False
    """Send the script to hosts that have another one."""
    variables: Mapping[str, str] = {}
    """Of the environment, on every host; by ssh only."""
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    """None leaves both to ssh."""


class JobStart(msgspec.Struct, frozen=True, kw_only=True):
    """What host 0 decides once all hosts are there, the same for all of them."""

    run_id: str
    seed: int | None
    workers: tuple[int, ...]
    """On each host."""
    backend: Literal["gloo", "nccl"]
    master_address: str
    master_port: int
    store_address: str
    store_port: int
    addresses: tuple[str, ...] = ()
    """Of each host, the numeric one by which its way to host 0 leads; none if there is only one host."""
    launcher_variables: Mapping[str, str | None] = {}
    """Environment variables of every worker, from the services of the launcher's profile; None removes one."""
    recording: str | None = None
    perturbation_seed: int | None = None
    dtype: Precision | None = None
    observation: RunObservation = RunObservation()

    @property
    def world_size(self) -> int:
        """How many workers the job has."""
        return sum(self.workers)

    def first_rank(self, place: int) -> int:
        """The rank of a host's first worker."""
        return sum(self.workers[:place])

    def host_of(self, rank: int) -> int:
        """The place of the host on which a rank runs."""
        return next(place for place in range(len(self.workers)) if rank < self.first_rank(place + 1))


class RunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a user asks for; `config.validation.make_run_config` makes a `RunConfig` of it."""

    worker_count: int
    devices: str | None = None
    """"cpu", or GPU numbers as "0,1"; without it each worker gets a GPU if the host has any, else the CPU."""
    threads: int | None = None
    """Per worker; without it the cores are shared out evenly."""
    seed: int | None = None
    """Without it one is drawn."""
    separate_seeds: bool = False
    """Without `seed`, let each process seed its generators itself, even if the program names Rankless."""
    log_folder: str = "log"
    show: ShowChoice = "first"
    warm: bool = True
    progress: bool = True
    recording: str | None = None
    perturbation_seed: int | None = None
    dtype: Precision | None = None
    observation: RunObservation = RunObservation()
    launcher: LauncherChoice | None = None
    """The launcher whose conventions the run follows; None for a plain `rankless run`."""
    master_address: str = "127.0.0.1"
    """MASTER_ADDR of a job on one host."""
    master_port: int | None = None
    """MASTER_PORT of a job on one host; None takes a free one."""
    cluster: Cluster | None = None
    """None: this host alone."""
    elastic: Elastic | None = None
    """Workers may come and go, also whole hosts; None: they stay, and the first that fails ends the job."""
    hang_timeout_seconds: float | None = None
    """How long the job may stand still before it is ended: None learns it, 0 never ends it for that."""


class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
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
    seed: int | None
    """Every worker's generators start from it; None: from seeds of their own, as separate processes' do."""
    recording: str | None = None
    """A folder into which each worker records its job results (for `rankless verify`), or None."""
    perturbation_seed: int | None = None
    """Set only for `verify`'s noise-floor run: gradients are disturbed in their last bit, drawn from this
    seed.
    """
    dtype: Precision | None = None
    """What jobs compute in, whatever the script says; None leaves it to the script."""
    observation: RunObservation = RunObservation()
    progress: bool = True
    launcher: LauncherChoice | None = None
    """The launcher whose conventions the run follows; None for a plain `rankless run`."""
    master_address: str = "127.0.0.1"
    """MASTER_ADDR of a job on one host."""
    master_port: int | None = None
    """MASTER_PORT of a job on one host; None takes a free one."""
    cluster: Cluster | None = None
    """None: this host alone."""
    elastic: Elastic | None = None
    """Workers may come and go, also whole hosts; None: they stay, and the first that fails ends the job."""
    hang_timeout_seconds: float | None = None
    """How long the job may stand still before it is ended: None learns it, 0 never ends it for that."""
    request: RunRequest
    """What was asked for: each host makes a plan of its own of it."""
