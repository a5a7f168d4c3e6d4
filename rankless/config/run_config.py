"""The configuration of a whole run: the request, what the agent runs, and what host 0 decides."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from rankless.config.hosts_and_addresses import DEFAULT_PORT, Host
from rankless.errors import ConfigError
from rankless.records.encoding import encode_json
from rankless.records.parallel_plan import PlannedAxis, ZeroLevel

ProgramKind = Literal["script", "module", "code", "command"]
ShowChoice = Literal["first", "all"]
AgentOutput = Literal["quiet", "table", "summary"]
"""What the agent prints of a run that succeeds: nothing, the table of workers, or that and a line at the end."""
Precision = Literal["float64"]
Backend = Literal["gloo", "nccl", "shared_memory", "hierarchical"]
"""A backend of `torch.distributed`."""
UNKNOWN_HOST = -1
ViewChoice = Literal["auto", "logical", "separate"]
"""How several workers run a script that knows no ranks: "logical" is one training on divided batches, "separate" is one
copy on each worker, and "auto" decides by the script's source.
"""
AgentStart = Literal["ssh", "manual", "script", "slurm"]
Settings = TypeVar("Settings", bound=msgspec.Struct)


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


class ScriptView(NamedTuple):
    """How several workers run a program."""

    is_logical: bool = False
    reason: str = ""
    """Why, as in "train.py knows no ranks"; "" if the user need not read it."""
    zero: ZeroLevel | None = None
    """The training state that is sharded in the logical view."""


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
    spares: tuple[Host, ...] = ()
    """Hosts that wait until others are lost; with ssh only."""
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
    replaces_workers: bool = False
    """Whether a copy of another worker of its host takes the place of a killed one."""
    copies_first_worker: bool = False
    """Whether the first worker may be copied, because the script does not name ranks."""
    copies: int = 0
    """How many other workers have a copy of what one worker alone has of states."""
    is_logical: bool = False
    """Whether the script runs in the logical view."""
    zero: ZeroLevel | None = None

    @property
    def world_size(self) -> int:
        """The number of workers of the job."""
        return sum(self.workers)

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
    def hosts_of_copies(self) -> tuple[int, ...]:
        """The index of each worker's host, if workers keep copies of others' shards; else none."""
        return tuple(map(self.host_of, range(self.world_size))) if self.copies else ()

    @property
    def worker_host_count(self) -> int:
        """The number of hosts that have workers. The others have processes of roles alone, and come last."""
        return sum(count > 0 for count in self.workers)

    def host_of(self, rank: int) -> int:
        """Return the index of a rank's host."""
        return next(host for host in range(len(self.workers)) if rank < self.first_rank(host + 1))


class Elastic(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of an elastic job, and its hosts. It begins with `RunRequest.worker_count` workers."""

    min_workers: int
    max_workers: int | None = None
    """None: as many workers as the hosts have slots."""
    discovery_script: str | None = None
    """A command that prints the present hosts, one per line, as `host:slots`; None keeps `hosts`."""
    hosts: tuple[tuple[str, int], ...] = ()
    """Names and slots of the hosts if no command discovers them; without any, this host has all slots."""
    slots_per_host: int | None = None
    """The slots of hosts that the command prints without a number."""
    elastic_timeout_seconds: float = 600.0
    """How long the job waits for enough workers before it ends."""
    reset_limit: int | None = None
    """The most rounds after the first; None sets no limit."""
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    """None: ssh chooses both the port and the file."""
    cooldown_range_seconds: tuple[float, float] | None = None
    """How long a host whose workers fail repeatedly gets no new ones, at first and at most; None: for ever."""
    stall_timeout_seconds: float | None = None
    """After how many seconds a round without progress loses the workers that hold it up; None learns it."""
    has_chosen_interface: bool = False
    """Whether the user's options name the network interface for Gloo, so that rounds do not choose one."""


def check_elastic(elastic: Elastic, worker_count: int) -> None:
    """Raise `ConfigError` if the limits contradict each other or are out of range."""
    least, most = elastic.min_workers, elastic.max_workers
    if least < 1:
        raise ConfigError(expected="--min-np from 1 up", found=least, fix="give the smallest number of workers")
    if worker_count < least or (most is not None and most < worker_count):
        upper = "" if most is None else f", at most --max-np {most}"
        raise ConfigError(
            expected=f"-np of at least --min-np {least}{upper}",
            found=worker_count,
            fix="-np is the number of workers at the start",
        )
    if elastic.slots_per_host is not None and elastic.slots_per_host < 1:
        raise ConfigError(
            expected="--slots-per-host from 1 up", found=elastic.slots_per_host, fix="omit it, or correct it"
        )
    if elastic.reset_limit is not None and elastic.reset_limit < 0:
        raise ConfigError(expected="--reset-limit from 0 up", found=elastic.reset_limit, fix="omit it to set no limit")
    if elastic.elastic_timeout_seconds < 0:
        raise ConfigError(
            expected="--elastic-timeout from 0 seconds up", found=elastic.elastic_timeout_seconds, fix="correct it"
        )
    cooldown = elastic.cooldown_range_seconds
    if cooldown is not None and not 0 < cooldown[0] <= cooldown[1]:
        raise ConfigError(
            expected="--blacklist-cooldown-range MIN MAX, in seconds, with 0 < MIN <= MAX",
            found=f"{cooldown[0]:g} {cooldown[1]:g}",
            fix="as in --blacklist-cooldown-range 10 100",
        )


class LauncherSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A launcher other than `rankless run`, and how its command line sets it up."""

    name: str
    """An extension with a launcher profile."""
    settings: bytes
    """The launcher's own settings as JSON. Only its package reads them."""


def make_launcher_spec(name: str, settings: msgspec.Struct) -> LauncherSpec:
    """Return the spec of the launcher `name` with `settings`."""
    return LauncherSpec(name=name, settings=encode_json(settings))


def decode_settings(settings: bytes, kind: type[Settings]) -> Settings:
    """Return the settings of a `LauncherSpec` as the struct that its launcher defines."""
    return msgspec.json.decode(settings, type=kind)


class RunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a user requests. `config.make_run_config.make_run_config` makes a `RunConfig` from it."""

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
    """The folder that gets a new folder for each run."""
    show: ShowChoice = "first"
    warm: bool = True
    """Fork the workers from a process that has imported torch; False starts plain processes."""
    preload: tuple[str, ...] = ()
    """Modules that the fork server imports besides torch; RANKLESS_PRELOAD adds others."""
    view: ViewChoice = "separate"
    zero: str | None = None
    """The training state to shard in the logical view, as the user says it."""
    progress: bool = True
    agent_output: AgentOutput = "table"
    command: tuple[str, ...] = ()
    """The command line that requests the run."""
    recording: str | None = None
    """A folder into which each worker records its job results (for `rankless verify`), or None."""
    perturbation_seed: int | None = None
    """The seed of random changes to the last bit of gradients, for `verify`'s noise-floor run; else None."""
    dtype: Precision | None = None
    """The dtype in which jobs compute instead of the script's; None keeps the script's."""
    plan: PlanFile | None = None
    """The parallel plan of the run; None lets each job choose its own."""
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
    min_workers: int | None = None
    """How many workers must be left after others were killed; None for one, where it can continue without others."""
    replaces_workers: bool = True
    """Whether a copy of another worker of its host takes the place of a killed one, where it can."""
    copies: int = 0
    """How many other processes have a copy of what one worker, or one server, alone has of the training's state."""
    restarts: int = 0
    """How often the script is started again after a failure."""
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
    """What is decided of a run on this host before any process starts, and the request that it is decided for."""

    program: Program
    worker_count: int
    devices: tuple[str, ...]
    """One torch device name per worker, as "cpu" or "cuda:0"; two workers may share one."""
    backend: Backend | None = None
    """The backend that the user requests for the default process group; None leaves the choice to the devices."""
    threads_per_worker: int
    preload: tuple[str, ...] = ()
    """Modules that the process imports besides torch from which the workers are forked."""
    seed: int | None
    """The seed of every worker's generators; None lets each process seed itself."""
    mesh: tuple[PlannedAxis, ...] = ()
    """The axes of the mesh from the outermost; none for one axis `data` of all workers."""
    cluster: Cluster | None = None
    """None: this host only."""
    hang_timeout_seconds: float | None = None
    """Seconds without progress after which the job ends; None learns them, 0 never ends it."""
    debug_rank: int | None = None
    """The rank that gets the terminal. The watchdog is off then, and collectives wait for days."""
    grace_seconds: float
    """Seconds that workers have to end after a signal to an agent."""
    view: ScriptView = ScriptView()
    """How the workers run the script."""
    request: RunRequest
    """The request, which has all that needs no decision. Each host makes its own `RunConfig` from it."""
    roles: tuple[str, ...] = ()
    """The extensions whose processes the run has beside its workers."""

    @property
    def replaces_hosts(self) -> bool:
        """Whether spare hosts take the places of lost ones, and lost hosts may return."""
        is_by_ssh = self.cluster is not None and self.cluster.agent_start == "ssh"
        return is_by_ssh and self.request.replaces_workers and not self.roles

    @property
    def may_start_again(self) -> bool:
        """Whether the script may be started more than once."""
        return self.request.restarts > 0 or self.replaces_hosts
