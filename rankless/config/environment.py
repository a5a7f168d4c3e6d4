"""The one file that reads and writes environment variables.

Workers get torchrun's variables, so that any script written for torchrun runs, and one of ours that holds the
`WorkerConfig`.
"""

import importlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import msgspec

from rankless.config.run_config import RunConfig
from rankless.config.worker_config import WorkerConfig

if TYPE_CHECKING:
    from rankless.config.horovod_variables import HorovodWorker
    from rankless.config.mpi_variables import MpiWorker

WORKER_PLAN = "RANKLESS_WORKER_PLAN"
TOKEN_FILE = "RANKLESS_TOKEN_FILE"
HANG_TIMEOUT = "RANKLESS_HANG_TIMEOUT"
HOROVOD = "RANKLESS_HOROVOD"
HOROVOD_SERVER = "GLOO_RENDEZVOUS_ADDR"
"""Horovod's launcher names its server by this variable, with `HOROVOD_` before it."""
FUNCTION_KEY = "RANKLESS_FUNCTION_KEY"
_CARRIED = (
    "RANKLESS_",
    "PYTHON",
    "TORCH",
    "PYTORCH_",
    "NCCL_",
    "GLOO_",
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "CUDA_DEVICE",
    "HF_",
    "HOROVOD_",
)
_A_HOSTS_OWN = ("HOME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "HOSTNAME", "TMPDIR", "DISPLAY", "_")
_A_LOGINS_OWN = ("SSH_", "XDG_", "DBUS_", "BASH_FUNC_")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_MPI = ("OMPI_COMM_WORLD_", "PMI_")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
# Read by torch, or by what it loads, once, when it is imported. A worker forked after the import cannot
# honour a change.
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
# These are honoured all the same: applied again by the worker, or read by torch only when they are needed.
_HONOURED = (
    "TORCH_DISTRIBUTED_DEBUG",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "TORCH_NCCL_",
    "TORCH_FR_",
    "TORCH_GLOO_",
)


class Torchrun(msgspec.Struct, frozen=True, kw_only=True):
    """What torchrun, or a launcher like it, says to one of its processes."""

    rank: int
    world_size: int
    local_rank: int
    threads: int | None
    master_address: str | None
    """None: MPI's launcher has not told where the ranks meet."""
    master_port: int
    has_store: bool
    """Whether the launcher itself serves the store at that address."""


def parent_environment(config: RunConfig) -> dict[str, str]:
    """The environment of the process that starts the workers."""
    environment = dict(os.environ)
    if config.seed is not None:
        environment.setdefault("PYTHONHASHSEED", str(config.seed % 2**32))
    if config.warm:
        # With more than one thread in the parent, a forked worker would hang in its first parallel region.
        environment.update(dict.fromkeys(_THREAD_VARIABLES, "1"))
    return environment


def worker_environment(config: WorkerConfig, *, cuda_devices: str | None) -> dict[str, str | None]:
    """What one worker's environment sets (or, where None, removes) on top of its parent's."""
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
        # All workers are on this host: never ask a name server or a firewall for the way to them. Where they are not,
        # the card that leads to host 0: guessing takes a virtual one.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", config.interface or loopback_name()),
    }
    if config.interface is not None:
        variables["NCCL_SOCKET_IFNAME"] = os.environ.get("NCCL_SOCKET_IFNAME", f"={config.interface}")
    if cuda_devices is not None:
        variables["CUDA_VISIBLE_DEVICES"] = cuda_devices
    return variables


def user_token_file() -> str | None:
    """The file that holds the token of a job on several hosts, if RANKLESS_TOKEN_FILE names one."""
    return os.environ.get(TOKEN_FILE) or None


def user_hang_timeout() -> str | None:
    """What RANKLESS_HANG_TIMEOUT says, for the commands that have no such option, as torchrun's."""
    return os.environ.get(HANG_TIMEOUT) or None


def carried_variables() -> dict[str, str]:
    """What the agents of other hosts get of this process's environment: what torch, its libraries and Python read."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_CARRIED) and name not in (TOKEN_FILE, WORKER_PLAN)
    }


def exported_variables() -> dict[str, str]:
    """What the agents of other hosts get under horovodrun, which takes the whole environment along."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_A_LOGINS_OWN) and name not in (*_A_HOSTS_OWN, TOKEN_FILE, WORKER_PLAN)
    }


def horovod_choice() -> Literal["never", "missing", "always"]:
    """When the import name `horovod` is ours: where no Horovod is installed, unless RANKLESS_HOROVOD says 0 or 1."""
    choices: dict[str, Literal["never", "always"]] = {"0": "never", "1": "always"}
    return choices.get(os.environ.get(HOROVOD, ""), "missing")


def with_function_key(key: bytes) -> dict[str, str]:
    """This process's environment for a `horovodrun` that runs a function: with the key to where the function is."""
    return {**os.environ, FUNCTION_KEY: key.hex()}


def take_function_key() -> bytes:
    """The key that `with_function_key` has given; what this process starts does not get it."""
    return bytes.fromhex(os.environ.pop(FUNCTION_KEY, ""))


def python_path_from(folder: str) -> str:
    """PYTHONPATH with `folder` before all that is there."""
    there = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place and place != folder]
    return os.pathsep.join([folder, *there])


def user_proxies() -> dict[str, str]:
    """The variables that name proxies, as they are written; none of them is a name that is empty."""
    return {name: value for name, value in os.environ.items() if name.lower() in _PROXIES and value}


def hosts_without_proxy() -> tuple[str, ...]:
    """The names that no_proxy excepts; "*" are all."""
    value = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    return tuple(name.strip() for name in value.split(",") if name.strip())


def user_interfaces() -> dict[str, str]:
    """The network cards that the user has named for Gloo and NCCL, by variable."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: value for name in names if (value := os.environ.get(name))}


def ssh_addresses() -> tuple[str, str]:
    """For what ssh has started: this host's address, as whoever logged in reached it, and theirs."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    return (words[2], words[0]) if len(words) == 4 else ("127.0.0.1", "127.0.0.1")


def horovod_variables() -> dict[str, str]:
    """Horovod's variables, without `HOROVOD_` before their names."""
    return {name.removeprefix("HOROVOD_"): value for name, value in os.environ.items() if name.startswith("HOROVOD_")}


def spawned_environment(rank: int, count: int, port: int) -> dict[str, str]:
    """The environment of a process that `rankless.spawn` starts: torchrun's variables, and its share of the cores."""
    variables = {name: value for name, value in os.environ.items() if name != WORKER_PLAN}
    threads = str(max(1, (os.cpu_count() or 1) // count))
    return variables | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", loopback_name()),
    }


def loopback_name() -> str:
    """The name of the loopback network interface."""
    return "lo" if os.uname().sysname == "Linux" else "lo0"


def user_threads() -> int | None:
    """How many threads the user has asked for through OMP_NUM_THREADS, if they have."""
    return whole_number("OMP_NUM_THREADS")


def user_visible_devices() -> list[str] | None:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves visible, or None when it is not set."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if value is None else [name.strip() for name in value.split(",") if name.strip() not in ("", "-1")]


def apply(changes: Mapping[str, str | None]) -> None:
    """Set, or where None remove, variables of this process."""
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def write_worker_config(config: WorkerConfig) -> None:
    """Make `plan` what `read_worker_config` finds in this process."""
    os.environ[WORKER_PLAN] = msgspec.json.encode(config).decode()


def read_worker_config() -> WorkerConfig | None:
    """This worker's plan; None when this process is no worker of `rankless run`, nor is a worker's child."""
    text = os.environ.get(WORKER_PLAN)
    if text is None:
        return None
    config = msgspec.json.decode(text, type=WorkerConfig)
    return config if config.process_id == os.getpid() else None


def forget_worker_config() -> None:
    """Let what this process becomes read torchrun's variables alone."""
    os.environ.pop(WORKER_PLAN, None)


def is_child_of_worker() -> bool:
    """Whether this process was started by a worker of `rankless run`, and is none itself."""
    return WORKER_PLAN in os.environ and read_worker_config() is None


def is_launched() -> bool:
    """Whether a launcher has started this process: ours, torchrun, Horovod's, MPI's, or one that does as they do."""
    return WORKER_PLAN in os.environ or read_torchrun() is not None or HOROVOD_SERVER in horovod_variables()


def read_horovod_worker() -> "HorovodWorker | None":
    """What Horovod's own launcher told this process, or None when another, or none, started it. Raises JoinError."""
    variables = horovod_variables()
    if WORKER_PLAN in os.environ or HOROVOD_SERVER not in variables:
        return None
    # Imported here: most processes are not started by Horovod's launcher.
    reader = importlib.import_module("rankless.config.horovod_variables")
    worker: HorovodWorker | None = reader.horovod_worker(variables)
    return worker


def read_torchrun() -> Torchrun | None:
    """What torchrun, or MPI's launcher, told this process; None when another launcher, or none, started it."""
    if WORKER_PLAN in os.environ:
        return None
    rank, size, local_rank = (whole_number(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    address = os.environ.get("MASTER_ADDR")
    if rank is None or size is None:
        told = _read_mpi_worker()
        if told is None:
            return None
        rank, size, local_rank = told.rank, told.world_size, told.local_rank
    elif address is None:
        return None
    return Torchrun(
        rank=rank,
        world_size=size,
        local_rank=local_rank or 0,
        threads=user_threads(),
        master_address=address,
        master_port=whole_number("MASTER_PORT") or 0,
        has_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _read_mpi_worker() -> "MpiWorker | None":
    if not any(name.startswith(_MPI) for name in os.environ):
        return None
    # Imported here: most processes are not started by MPI's launcher.
    reader = importlib.import_module("rankless.config.mpi_variables")
    worker: MpiWorker | None = reader.mpi_worker(os.environ)
    return worker


def prefer_loopback() -> None:
    """Let Gloo talk over loopback, unless the user has named an interface: all ranks are on this host."""
    prefer_interface(loopback_name())


def prefer_interface(name: str) -> None:
    """Let Gloo talk by this network card, unless the user has named one."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def snapshot() -> dict[str, str]:
    """All variables of this process as they are now."""
    return dict(os.environ)


def changes_too_late(before: Mapping[str, str]) -> list[str]:
    """Names of the variables, changed since `before`, that torch read when the parent imported it."""
    now = os.environ
    changed = {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}
    return sorted(name for name in changed if name.startswith(_READ_AT_IMPORT) and not name.startswith(_HONOURED))


def whole_number(name: str) -> int | None:
    """Return a variable's value as a number; None if it is not set or is no whole number."""
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() else None
