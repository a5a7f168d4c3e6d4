"""The one file that reads and writes environment variables.

Workers get torchrun's variables, so that scripts written for torchrun run, and one more that has the `WorkerConfig`.
"""

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from rankless.config.extensions import LaunchedWorker, import_declared, list_extensions
from rankless.config.process_configs import WorkerConfig
from rankless.config.run_config import RunConfig
from rankless.errors import ConfigError
from rankless.records.encoding import encode_json

if TYPE_CHECKING:
    from rankless.config.cluster_variables import ClusterWorker


WORKER_PLAN = "RANKLESS_WORKER_PLAN"
LOG_FOLDER = "RANKLESS_LOG_DIR"
TOKEN_FILE = "RANKLESS_TOKEN_FILE"
HANG_TIMEOUT = "RANKLESS_HANG_TIMEOUT"
BACKEND = "RANKLESS_BACKEND"
PORT_TEST = "RANKLESS_PORT_TEST"
PRELOAD = "RANKLESS_PRELOAD"
AT_START = str(Path(__file__).parents[1] / "runtime" / "hooks" / "at_start")
"""The folder for PYTHONPATH: an interpreter that finds it there has the finder of import aliases from its start."""
_CUDA_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
_TITLE_WITHOUT_ENVIRONMENT = "SPT_NOENV"
_CARRIED = (
    *("RANKLESS_", "PYTHON", "TORCH", "PYTORCH_", "NCCL_", "GLOO_", "OMP_", "MKL_", "OPENBLAS_"),
    *("CUDA_DEVICE", "HF_"),
)
_HOST_SPECIFIC = ("HOME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "HOSTNAME", "TMPDIR", "DISPLAY", "_")
_LOGIN_SPECIFIC = ("SSH_", "XDG_", "DBUS_", "BASH_FUNC_")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_CLUSTER_PREFIXES = ("OMPI_COMM_WORLD_", "PMI_", "SLURM_", "JOB_COMPLETION_INDEX")
_OF_RANKS = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
)
_OF_TORCHELASTIC = ("ROLE_NAME", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
# Torch, or a library that it loads, reads these once, during the import. A change has no effect in a worker that is
# forked after it.
_READ_AT_IMPORT = (
    "TORCH_",
    "PYTORCH_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OMP_",
    "OPENBLAS_",
    "ATEN_",
    "TORCHINDUCTOR_",
)
_SET_BY_COMPILER = ("TORCHINDUCTOR_CACHE_DIR", "KMP_DUPLICATE_LIB_OK")
"""Torch's compiler, which a worker imports when it first compiles, sets these two itself."""
# Exceptions: the worker applies these again, or torch reads them when it needs them.
_READ_LATER = (
    "TORCH_DISTRIBUTED_DEBUG",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "TORCH_NCCL_",
    "TORCH_FR_",
    "TORCH_GLOO_",
    *_SET_BY_COMPILER,
)
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")


class TorchrunWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A process that torchrun, or a launcher like it, has started."""

    launcher: Literal["torchrun", "mpirun", "srun", "Kubernetes"] = "torchrun"
    rank: int
    """-1 if it is not set."""
    world_size: int
    """0 if it is not set."""
    local_rank: int
    threads: int | None
    master_address: str | None
    """None: the launcher sets no address for the rendezvous."""
    master_port: int
    has_store: bool
    """Whether the launcher itself serves the store at that address."""

    @property
    def is_complete(self) -> bool:
        """Whether the launcher sets both rank and world size."""
        return self.rank >= 0 and self.world_size > 0


def parent_environment(config: RunConfig) -> dict[str, str]:
    """Return the environment of the process that starts the workers."""
    environment = dict(os.environ)
    if config.seed is not None:
        environment.setdefault("PYTHONHASHSEED", str(config.seed % 2**32))
    if config.request.warm:
        # If the parent had more than one thread, a forked worker would hang in its first parallel region.
        environment.update(dict.fromkeys(_THREAD_VARIABLES, "1"))
    return environment


def worker_environment(config: WorkerConfig, *, cuda_devices: str | None) -> dict[str, str | None]:
    """Return the variables that one worker sets (or, where None, removes) on top of its parent's."""
    rank, size = str(config.rank), str(config.world_size)
    variables: dict[str, str | None] = {name: os.environ.get(name) for name in _THREAD_VARIABLES}
    variables |= {
        "RANK": rank,
        "LOCAL_RANK": str(config.local_rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": str(config.local_world_size),
        "MASTER_ADDR": config.master_address,
        "MASTER_PORT": str(config.master_port),
        "GROUP_RANK": str(config.host),
        "GROUP_WORLD_SIZE": str(config.host_count),
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
        "TORCHELASTIC_RUN_ID": config.run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "OMP_NUM_THREADS": str(config.threads),
        # With all workers on this host, loopback avoids name servers and firewalls. Otherwise this is the interface
        # that leads to host 0, because Gloo itself may choose a virtual one.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", config.interface or loopback_name()),
    }
    if config.is_logical:  # the script sees one process, which no launcher has started
        variables |= dict.fromkeys((*_OF_RANKS, *_OF_TORCHELASTIC))
    if config.interface is not None:
        variables["NCCL_SOCKET_IFNAME"] = os.environ.get("NCCL_SOCKET_IFNAME", f"={config.interface}")
    if cuda_devices is not None:
        variables["CUDA_VISIBLE_DEVICES"] = cuda_devices
    return variables


def user_token_file() -> str | None:
    """Return the file with the token of a job on several hosts, from RANKLESS_TOKEN_FILE, or None."""
    return os.environ.get(TOKEN_FILE) or None


def default_log_folder() -> str:
    """Return the folder that gets a folder for each run: RANKLESS_LOG_DIR, or "log" if it is not set."""
    return os.environ.get(LOG_FOLDER) or "log"


def user_cache_folder() -> Path:
    """Return the user's folder for caches, `XDG_CACHE_HOME` or ~/.cache. A relative path is ignored, as XDG says."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return Path(root) if os.path.isabs(root) else Path("~/.cache").expanduser()


def user_hang_timeout() -> str | None:
    """Return RANKLESS_HANG_TIMEOUT, for commands without such an option, as `torchrun`; None if it is not set."""
    return os.environ.get(HANG_TIMEOUT) or None


def user_backend() -> str | None:
    """Return RANKLESS_BACKEND, the backend of the default process group; None if it is not set."""
    return os.environ.get(BACKEND) or None


def user_preload() -> str:
    """Return RANKLESS_PRELOAD: modules that the fork server imports, separated by commas."""
    return os.environ.get(PRELOAD, "")


def without_cuda_initialization() -> contextlib.AbstractContextManager[None]:
    """Let torch look for GPUs through NVIDIA's management library, which a later fork does not disturb."""
    return _switched_on(_CUDA_CHECK)


@contextlib.contextmanager
def _switched_on(name: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        apply({name: before})


def wants_port_test() -> bool:
    """Whether hosts try the ports of the ranks before the start: not with RANKLESS_PORT_TEST=0."""
    return os.environ.get(PORT_TEST) != "0"


def carried_variables() -> dict[str, str]:
    """Return the variables that other hosts' agents get: those that torch, its libraries, Python or extensions read."""
    carried = (*_CARRIED, *(prefix for extension in list_extensions() for prefix in extension.variables))
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(carried) and name not in (TOKEN_FILE, WORKER_PLAN)
    }


def exported_variables() -> dict[str, str]:
    """Return all variables except those that belong to one host or one login, for launchers that send them all."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_LOGIN_SPECIFIC) and name not in (*_HOST_SPECIFIC, TOKEN_FILE, WORKER_PLAN)
    }


def alias_choice(variable: str) -> Literal["never", "missing", "always"]:
    """Return when an import name is an extension's: if no real package is installed, or as the variable says (0, 1)."""
    choices: dict[str, Literal["never", "always"]] = {"0": "never", "1": "always"}
    return choices.get(os.environ.get(variable, ""), "missing")


def take(name: str) -> str:
    """Return a variable and remove it, so that child processes do not get it; "" if it is not set."""
    return os.environ.pop(name, "")


def python_path_at_start() -> str:
    """Return PYTHONPATH with the folder `AT_START` first."""
    folders = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each and each != AT_START]
    return os.pathsep.join([AT_START, *folders])


def user_proxies() -> dict[str, str]:
    """Return the variables that name proxies and are not empty, as they are written."""
    return {name: value for name, value in os.environ.items() if name.lower() in _PROXIES and value}


def hosts_without_proxy() -> tuple[str, ...]:
    """Return the names that no_proxy exempts from proxies; "*" stands for all."""
    value = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    return tuple(name.strip() for name in value.split(",") if name.strip())


def user_interfaces() -> dict[str, str]:
    """Return the network interfaces that the user chose for Gloo and NCCL, by variable."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: value for name in names if (value := os.environ.get(name))}


def ssh_addresses() -> tuple[str, str]:
    """Return this host's address and the client's, as the ssh connection that started this process has them."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    return (words[2], words[0]) if len(words) == 4 else ("127.0.0.1", "127.0.0.1")


def variables_without_prefix(prefix: str) -> dict[str, str]:
    """Return the variables whose names begin with the prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in os.environ.items() if name.startswith(prefix)}


def spawned_environment(rank: int, count: int, port: int) -> dict[str, str]:
    """Return the environment of a process of `rankless.spawn`: torchrun's variables, and its share of the cores."""
    threads = str(max(1, (os.cpu_count() or 1) // count))
    return _without_worker_config() | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", loopback_name()),
    }


def spawn_server_environment() -> dict[str, str]:
    """Return the environment of the server of `rankless.spawn`, which must have one thread to fork safely."""
    return _without_worker_config() | dict.fromkeys(_THREAD_VARIABLES, "1")


def _without_worker_config() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != WORKER_PLAN}


def replace(variables: Mapping[str, str]) -> None:
    """Make `variables` the environment of this process."""
    names = os.environ.keys() | variables.keys()
    apply({name: variables.get(name) for name in names if os.environ.get(name) != variables.get(name)})


def loopback_name() -> str:
    """Return the name of the loopback network interface."""
    return "lo" if os.uname().sysname == "Linux" else "lo0"


def kept_in_place() -> contextlib.AbstractContextManager[None]:
    """Let `setproctitle` write a title over the command line only.

    By default it moves the environment to make room. But libraries that torch has loaded may point into that memory.
    """
    return _switched_on(_TITLE_WITHOUT_ENVIRONMENT)


def user_threads() -> int | None:
    """Return OMP_NUM_THREADS, or None if the user has not set it."""
    return whole_number("OMP_NUM_THREADS")


def user_visible_devices() -> list[str] | None:
    """Return the GPUs in CUDA_VISIBLE_DEVICES, or None if it is not set."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if value is None else [name.strip() for name in value.split(",") if name.strip() not in ("", "-1")]


def apply(changes: Mapping[str, str | None]) -> None:
    """Set variables of this process, or remove them where None."""
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def write_worker_config(config: WorkerConfig) -> None:
    """Store `config` where `read_worker_config` finds it."""
    os.environ[WORKER_PLAN] = encode_json(config).decode()


def read_worker_config() -> WorkerConfig | None:
    """Return this worker's config; None if this process is not a worker, also in a worker's child."""
    text = os.environ.get(WORKER_PLAN)
    if text is None:
        return None
    config = msgspec.json.decode(text, type=WorkerConfig)
    return config if config.process_id == os.getpid() else None


def forget_worker_config() -> None:
    """Remove the worker's config, so that the command that replaces this process sees torchrun's variables only."""
    os.environ.pop(WORKER_PLAN, None)


def is_child_of_worker() -> bool:
    """Whether a worker of `rankless run` has started this process."""
    return WORKER_PLAN in os.environ and read_worker_config() is None


def is_launched() -> bool:
    """Whether a launcher has started this process: ours, torchrun, an extension's, a cluster's, or one like them."""
    return WORKER_PLAN in os.environ or read_torchrun() is not None or _find_reader() is not None


def read_launched_worker() -> LaunchedWorker | None:
    """Return what the launcher of another system has set, or None in a process of another launcher or of none.

    Raises `JoinError` for invalid values.
    """
    reader = None if WORKER_PLAN in os.environ else _find_reader()
    if reader is None:
        return None
    read: Callable[[Mapping[str, str]], LaunchedWorker]
    read = import_declared(reader[0], "launched.module", reader[1], name="read_worker")
    return read(dict(os.environ))


def _find_reader() -> tuple[str, str] | None:
    """Return the name and the module of the extension whose launcher has started this process."""
    declared = ((extension.name, extension.launched) for extension in list_extensions())
    found = ((name, each.module) for name, each in declared if each is not None and os.environ.get(each.variable))
    return next(found, None)


def rank_and_size() -> tuple[int | None, int | None]:
    """Return RANK and WORLD_SIZE, as a script finds them now."""
    return whole_number("RANK"), whole_number("WORLD_SIZE")


def read_torchrun() -> TorchrunWorker | None:
    """Return what torchrun or a cluster's launcher has set, or None in a process of another launcher or of none."""
    if WORKER_PLAN in os.environ:
        return None
    rank, size, local_rank = (whole_number(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    address, port = os.environ.get("MASTER_ADDR") or None, whole_number("MASTER_PORT") or 0
    if rank is None or size is None:
        worker = _read_cluster_worker()
        if worker is None:
            return _read_incomplete(rank, size, address)
        return TorchrunWorker(
            launcher=worker.launcher,
            rank=worker.rank,
            world_size=worker.world_size,
            local_rank=worker.local_rank,
            threads=user_threads(),
            master_address=address or worker.address,
            master_port=port or worker.port,
            has_store=False,
        )
    if address is None and size == 1:
        return None  # a process that trains alone
    return TorchrunWorker(
        rank=rank,
        world_size=size,
        local_rank=local_rank or 0,
        threads=user_threads(),
        master_address=address,
        master_port=port,
        has_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _read_incomplete(rank: int | None, size: int | None, address: str | None) -> TorchrunWorker | None:
    """Return a process to which a launcher has said only a part, or None if nothing points at a launcher."""
    if address is None or (rank is None and size is None) or size == 1:
        return None
    return TorchrunWorker(
        rank=-1 if rank is None else rank,
        world_size=size or 0,
        local_rank=0,
        threads=None,
        master_address=address,
        master_port=0,
        has_store=False,
    )


def _read_cluster_worker() -> "ClusterWorker | None":
    if not any(name.startswith(_CLUSTER_PREFIXES) for name in os.environ):
        return None
    # Imported here: most processes are not started by a cluster's launcher.
    reader = importlib.import_module("rankless.config.cluster_variables")
    worker: ClusterWorker | None = reader.read_cluster_worker(os.environ)
    return worker


def has_own_gpu() -> bool:
    """Whether Slurm shows each task only the GPUs of that task, so that each task's first GPU is its own."""
    names = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPU_BIND")
    return WORKER_PLAN not in os.environ and any(os.environ.get(name) for name in names)


def prefer_loopback() -> None:
    """Let Gloo use loopback, for ranks on one host, unless the user has named an interface."""
    prefer_interface(loopback_name())


def prefer_interface(name: str) -> None:
    """Let Gloo use this network interface, unless the user has named one."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def snapshot() -> dict[str, str]:
    """Return a copy of all variables of this process."""
    return dict(os.environ)


def whole_number(name: str) -> int | None:
    """Return a variable's value as a number; None if it is not set or is no whole number."""
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() else None


def chosen_variables(given: Sequence[str], here: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `--env NAME`, with its value in `here`, and of `--env NAME=VALUE`.

    Raises `ConfigError` for an invalid name, an unset variable, and one that every worker gets for itself.
    """
    chosen = {}
    for item in given:
        name, has_value, value = item.partition("=")
        if not name.isidentifier() or not name.isascii():
            raise ConfigError(
                expected="--env NAME or --env NAME=VALUE", found=f"--env {item}", fix="as in: --env WANDB_MODE=offline"
            )
        if name in (*_OF_RANKS, TOKEN_FILE, WORKER_PLAN):
            raise ConfigError(
                expected="--env with a variable that may be the same everywhere",
                found=f"--env {item}, which each worker or host gets for itself",
                fix="omit it",
            )
        if not has_value and name not in here:
            raise ConfigError(
                expected=f"--env {name} with {name} set here",
                found="no such variable",
                fix=f"export {name}, or write --env {name}=VALUE",
            )
        chosen[name] = value if has_value else here[name]
    return chosen


def changes_too_late(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the names of variables that differ between two environments although torch read them at its import."""
    changed = {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}
    return sorted(name for name in changed if name.startswith(_READ_AT_IMPORT) and not name.startswith(_READ_LATER))


def read_at_start(variables: Mapping[str, str]) -> dict[str, str]:
    """Return those of an environment's variables that the interpreter and torch read only when they start."""
    names = (*_READ_AT_IMPORT, "PYTHON", "LD_", "MALLOC_")
    return {
        name: value for name, value in variables.items() if name.startswith(names) and not name.startswith(_READ_LATER)
    }
