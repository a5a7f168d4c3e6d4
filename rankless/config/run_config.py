"""The configuration of a whole run: the request, what the agent runs, and what host 0 decides."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from rankless.config.elastic import Elastic
from rankless.config.hosts import DEFAULT_PORT, Host
from rankless.config.launcher_spec import LauncherSpec
from rankless.records.parallel_plan import PlannedAxis

ProgramKind = Literal["script", "module", "code", "command"]
ShowChoice = Literal["first", "all"]
AgentOutput = Literal["quiet", "table", "summary"]
"""What the agent prints of a run that succeeds: nothing, the table of workers, or that and a line at the end."""
Precision = Literal["float64"]
Backend = Literal["gloo", "nccl", "shared_memory", "hierarchical"]
"""A backend of `torch.distributed`."""
UNKNOWN_HOST = -1
AgentStart = Literal["ssh", "manual", "script", "slurm"]


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """The user's program: a script's path, a module's name (`-m`), code (`-c`), or any command."""

    kind: ProgramKind
    target: str
    arguments: tuple[str, ...] = ()
    has_macros: bool = False
    """Whether `${local_rank}` in an argument stands for the worker's local rank."""

    @property
    def text(self) -> str:
        """The program as on the command line, without its arguments: "train.py", "-m package.train" or "-c CODE"."""
        return {"module": "-m ", "code": "-c "}.get(self.kind, "") + self.target


class PlanFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file with a parallel plan, as the command has read it."""

    path: str
    sha256: str
    """The digest of the file, which every worker compares."""
    axes: tuple[PlannedAxis, ...]
    """The mesh of the plan."""


class InspectedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A job call whose values are all recorded: the `call`-th of the job, from 1."""

    job: str
    call: int


class RunObservation(msgspec.Struct, frozen=True, kw_only=True):
    """What a run writes for later inspection besides its recording, and after how many steps it ends."""

    stop_after_steps: int | None = None
    """End the script after this many training steps, as `sys.exit(0)` would."""
    programs: str | None = None
    """The folder that gets the jobs' programs (for `rankless plan`), or None."""
    inspected: InspectedCall | None = None
    inputs: bool = False
    """Record digests of what the models get as input in each step, to compare them with those of another script."""
    is_reference: bool = False
    """The script is the plain one of `--against`, so its optimizers' steps are recorded instead of jobs."""
    is_foreign: bool = False
    """The script calls no job, as one of DDP. Its optimizers' steps are recorded on every rank."""


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """The hosts of a job on several hosts, and how their agents find each other."""

    hosts: tuple[Host, ...]
    """In the order of their ranks. Host 0 decides, shows the training and saves."""
    host_index: int
    """This host's index in `hosts`; UNKNOWN_HOST until host 0 assigns it."""
    port: int = DEFAULT_PORT
    """The port on which host 0's agent listens."""
    agent_start: AgentStart = "ssh"
    """How the agents of other hosts start: host 0 starts them by ssh ("ssh"), or the user starts each. Then each host
    has the token in a file ("manual"), or host 0 sends it by ssh ("script"), or leaves it in the user's home folder for
    the other tasks of Slurm's `srun` ("slurm").
    """
    is_listed: bool = True
    """Whether every host knows all addresses; if not, it knows host 0's and the number of hosts."""
    insecure: bool = False
    """Let any process that reaches the port join, without a token."""
    join_timeout_seconds: float = 60.0
    copies: bool = False
    """Send the script to hosts whose copy differs."""
    variables: Mapping[str, str] = {}
    """Environment variables for every host; with ssh only."""
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    """None: ssh chooses both the port and the file."""

    @property
    def workers(self) -> int:
        """The number of workers of all hosts."""
        return sum(host.workers for host in self.hosts)

    @property
    def heterogeneous_workers(self) -> int:
        """How many workers of all hosts are heterogeneous."""
        return sum(host.heterogeneous for host in self.hosts)

    @property
    def worker_host_count(self) -> int:
        """The number of hosts that have workers. The others have processes of roles alone, and come last."""
        return sum(host.workers > 0 for host in self.hosts)


class AgreedProcesses(msgspec.Struct, frozen=True, kw_only=True):
    """The processes beside the workers, of one kind, on which all hosts of a run have agreed. It has no secret."""

    addresses: tuple[str, ...]
    """The address of each process, in their order, as its kind writes addresses."""
    hosts: tuple[int, ...]
    """The index of each process's host."""
    role: str
    """What one of them is called, as in "server 1"."""
    replicas: int = 0
    """How many copies each process has. They are among the addresses, after all processes that are no copies."""
    salt: str = ""
    """Random text. With the job's token, which no host sends, it gives the token of these processes."""

    def on_host(self, host_index: int) -> list[int]:
        """Return the numbers of the processes of a host."""
        return [number for number, host in enumerate(self.hosts) if host == host_index]


class AgreedJobConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What host 0 decides for all hosts once they have joined."""

    run_id: str
    seed: int | None
    workers: tuple[int, ...]
    """The number of workers on each host."""
    backend: Backend
    master_address: str
    master_port: int
    store_address: str
    store_port: int
    addresses: tuple[str, ...] = ()
    """Each host's numeric address on its route to host 0; empty for a single host."""
    launcher_variables: Mapping[str, str | None] = {}
    """Environment variables of every worker, from the services of the launcher's profile; None removes one."""
    recording: str | None = None
    perturbation_seed: int | None = None
    dtype: Precision | None = None
    plan: PlanFile | None = None
    mesh: tuple[PlannedAxis, ...] = ()
    observation: RunObservation = RunObservation()
    roles: Mapping[str, AgreedProcesses] = {}
    """The processes of the run beside its workers, by the name of the extension that they belong to."""
    most_lost_workers: int = 0
    """How many killed workers the run tolerates."""

    @property
    def world_size(self) -> int:
        """The number of workers of the job."""
        return sum(self.workers)

    def has_roles(self, host_index: int) -> bool:
        """Return whether a host has processes beside its workers."""
        return any(host_index in processes.hosts for processes in self.roles.values())

    def list_lone_processes(self) -> list[tuple[str, int]]:
        """Return the roles and numbers of the processes beside the workers that are on hosts without workers."""
        return [
            (processes.role, number)
            for processes in self.roles.values()
            for number, host in enumerate(processes.hosts)
            if not self.workers[host]
        ]

    def list_processes(self, host_index: int) -> list[tuple[str, int]]:
        """Return the roles and numbers of a host's processes beside its workers."""
        return [
            (processes.role, number) for processes in self.roles.values() for number in processes.on_host(host_index)
        ]

    def first_rank(self, host_index: int) -> int:
        """Return the rank of a host's first worker."""
        return sum(self.workers[:host_index])

    @property
    def worker_host_count(self) -> int:
        """The number of hosts that have workers. The others have processes of roles alone, and come last."""
        return sum(count > 0 for count in self.workers)

    def host_of(self, rank: int) -> int:
        """Return the index of a rank's host."""
        return next(host for host in range(len(self.workers)) if rank < self.first_rank(host + 1))


class RunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a user requests. `config.validation.make_run_config` makes a `RunConfig` from it."""

    worker_count: int
    devices: str | None = None
    """"cpu", or GPU numbers as "0,1"; None gives each worker a GPU if the host has any, else the CPU."""
    backend: str | None = None
    """The backend of the default process group; None leaves it to RANKLESS_BACKEND, else to the devices."""
    threads: int | None = None
    """Threads per worker; None divides the cores evenly."""
    seed: int | None = None
    """None draws one."""
    separate_seeds: bool = False
    """Without `seed`, let each process seed its generators itself, even if the program names Rankless."""
    log_folder: str = "log"
    show: ShowChoice = "first"
    warm: bool = True
    preload: tuple[str, ...] = ()
    """Modules that the fork server imports besides torch; RANKLESS_PRELOAD adds others."""
    progress: bool = True
    agent_output: AgentOutput = "table"
    command: tuple[str, ...] = ()
    """The command line that requests the run."""
    recording: str | None = None
    perturbation_seed: int | None = None
    dtype: Precision | None = None
    plan: PlanFile | None = None
    mesh: tuple[PlannedAxis, ...] = ()
    """The axes of the mesh from the outermost; none for that of the plan, else one axis `data` of all workers."""
    observation: RunObservation = RunObservation()
    launcher: LauncherSpec | None = None
    """The launcher whose conventions the run follows; None for a plain `rankless run`."""
    master_address: str = "127.0.0.1"
    """MASTER_ADDR of a job on one host."""
    master_port: int | None = None
    """MASTER_PORT of a job on one host; None takes a free one."""
    cluster: Cluster | None = None
    """None: this host only."""
    elastic: Elastic | None = None
    """Workers and hosts may join and leave; None fixes them, and the first failure ends the job."""
    hang_timeout_seconds: float | None = None
    """Seconds without progress after which the job ends; None learns them, 0 never ends it."""
    debug_rank: int | None = None
    """The rank that gets the terminal, for a debugger; None for none."""
    grace_seconds: float | None = None
    """Seconds that workers have to end after a signal to an agent; None takes what the cluster manager gives, or 30."""
    heterogeneous_workers: int = 0
    """How many of the workers of this host compute the dense part of models, with GPUs if the host has any. The others
    look rows up, on the CPU. With a `cluster` its hosts have these numbers."""
    options: Mapping[str, Mapping[str, Any]] = {}
    """The settings of extensions whose options the user gives, by the name of the extension, as their `RunOptions.read`
    returns them."""


class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that the agent needs to run a job on this host."""

    program: Program
    worker_count: int
    devices: tuple[str, ...]
    """One torch device name per worker, as "cpu" or "cuda:0"; two workers may share one."""
    backend: Backend | None = None
    """The backend that the user requests for the default process group; None leaves the choice to the devices."""
    threads_per_worker: int
    log_folder: str
    """The folder that gets a new folder for each run."""
    show: ShowChoice = "first"
    warm: bool = True
    """Fork the workers from a process that has imported torch; False starts plain processes."""
    preload: tuple[str, ...] = ()
    """Modules that this process imports besides torch."""
    seed: int | None
    """The seed of every worker's generators; None lets each process seed itself."""
    recording: str | None = None
    """A folder into which each worker records its job results (for `rankless verify`), or None."""
    perturbation_seed: int | None = None
    """The seed of random changes to the last bit of gradients, for `verify`'s noise-floor run; else None."""
    dtype: Precision | None = None
    """The dtype in which jobs compute instead of the script's; None keeps the script's."""
    plan: PlanFile | None = None
    """The parallel plan of the run; None lets each job choose its own."""
    mesh: tuple[PlannedAxis, ...] = ()
    """The axes of the mesh from the outermost; none for one axis `data` of all workers."""
    observation: RunObservation = RunObservation()
    progress: bool = True
    agent_output: AgentOutput = "table"
    launcher: LauncherSpec | None = None
    """The launcher whose conventions the run follows; None for a plain `rankless run`."""
    master_address: str = "127.0.0.1"
    """MASTER_ADDR of a job on one host."""
    master_port: int | None = None
    """MASTER_PORT of a job on one host; None takes a free one."""
    cluster: Cluster | None = None
    """None: this host only."""
    elastic: Elastic | None = None
    """Workers and hosts may join and leave; None fixes them, and the first failure ends the job."""
    hang_timeout_seconds: float | None = None
    """Seconds without progress after which the job ends; None learns them, 0 never ends it."""
    debug_rank: int | None = None
    """The rank that gets the terminal. The watchdog is off then, and collectives wait for days."""
    grace_seconds: float
    """Seconds that workers have to end after a signal to an agent."""
    request: RunRequest
    """The request. Each host makes its own `RunConfig` from it."""
    roles: tuple[str, ...] = ()
    """The extensions whose processes the run has beside its workers."""
