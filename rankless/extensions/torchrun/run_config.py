"""Turns torchrun's options into a `RunRequest`."""

import re
import signal
import string
from collections.abc import Iterator, Sequence

import msgspec

from rankless.config.available_cpu_and_memory import core_count
from rankless.config.environment import (
    default_log_folder,
    snapshot,
    user_threads,
    user_visible_devices,
    whole_number,
)
from rankless.config.hosts_and_addresses import addresses_of, numbered_hosts, own_addresses
from rankless.config.make_run_config import count_gpus
from rankless.config.run_config import UNKNOWN_HOST, Cluster, Program, ProgramKind, RunRequest
from rankless.errors import ConfigError
from rankless.extensions.torchrun.parser import TorchrunFlags
from rankless.extensions.torchrun.profile import ShownStream, TorchrunSettings, make_torchrun_spec
from rankless.launch.worker_output import Source

LOCAL_RANK = "${local_rank}"
"""Stands for the worker's local rank in an argument of the program."""

_BITS: tuple[tuple[Source, int], ...] = (("out", 1), ("err", 2))


def torchrun_program(flags: TorchrunFlags) -> Program:
    """Return the program of the command line. Raises `ConfigError` if it has none, or for contradicting options."""
    if not flags.training_script:
        raise ConfigError(
            expected="a script to run",
            found="none",
            fix="name one, as in `rankless torchrun --nproc-per-node 2 train.py`",
        )
    target, *arguments = flags.training_script
    if flags.no_python and flags.module and not flags.run_path:
        raise ConfigError(expected="--no-python or --module", found="both", fix="a module is Python: omit --no-python")
    kind: ProgramKind = "script"
    if flags.no_python and not flags.run_path:
        kind = "command"
    elif flags.module and not flags.run_path:
        kind = "module"
    return Program(kind=kind, target=target, arguments=tuple(arguments), has_macros=True)


def use_chosen_python(program: Program) -> Program:
    """Return the program as a command of the interpreter in PYTHON_EXEC, or unchanged if that is not set."""
    python = snapshot().get("PYTHON_EXEC")
    if not python or program.kind == "command":
        return program
    options = ("-u", "-m") if program.kind == "module" else ("-u",)
    return Program(
        kind="command", target=python, arguments=(*options, program.target, *program.arguments), has_macros=True
    )


def torchrun_request(flags: TorchrunFlags, program: Program) -> RunRequest:
    """Return the request. Raises `ConfigError` for invalid values."""
    count = worker_count(flags.nproc_per_node or "1")
    visible = user_visible_devices()
    if flags.virtual_local_rank and visible is not None and len(visible) < count:
        raise ConfigError(
            expected=f"a GPU for each of {count} workers, as --virtual-local-rank gives each its own",
            found=f"CUDA_VISIBLE_DEVICES={','.join(visible)}",
            fix="name more GPUs there, or start fewer workers",
        )
    if flags.max_restarts is not None and flags.max_restarts < 0:
        raise ConfigError(expected="--max-restarts from 0 up", found=flags.max_restarts, fix="omit it")
    hosts = make_hosts(flags)
    return RunRequest(
        worker_count=count,
        threads=1 if user_threads() is None and count > 1 else None,
        log_folder=flags.log_dir or default_log_folder(),
        warm=program.kind != "command" and flags.start_method in (None, "fork"),
        master_address=hosts.master_address,
        master_port=hosts.master_port,
        launcher=make_torchrun_spec(_settings(flags, count)),
        cluster=make_cluster(hosts, workers=count, insecure=flags.insecure),
    )


def worker_count(text: str) -> int:
    """Return the number of workers that `--nproc-per-node` requests. Raises `ConfigError` for an invalid text."""
    if re.fullmatch(r"\d+", text) and int(text) > 0:
        return int(text)
    gpus = count_gpus()
    if text == "cpu" or (text == "auto" and not gpus):
        return core_count()
    if text in ("auto", "gpu") and gpus:
        return gpus
    raise ConfigError(
        expected="--nproc-per-node as a number from 1 up, or auto, gpu, cpu",
        found=f"{text}, and no such device on this host" if text in ("gpu", "xpu") else text,
        fix="give cpu for one process per core, or a number",
    )


def describe_ignored_options(flags: TorchrunFlags) -> list[str]:
    """Return a line about each given option that has no effect, or another one than under torchrun."""
    found = []
    is_alone = (flags.nnodes or "1") in ("1", "1:1")
    ignored = {
        "--rdzv-backend": flags.rdzv_backend not in (None, "static", "c10d"),
        "--rdzv-conf": bool(flags.rdzv_conf),
        "--local-addr": flags.local_addr is not None,
    }
    if is_alone and any(ignored.values()):
        names = ", ".join(name for name, given in ignored.items() if given)
        found.append(f"{names}: not needed: one host needs no rendezvous")
    if flags.max_restarts:
        found.append(f"--max-restarts {flags.max_restarts}: Rankless restarts nothing: the first failure ends the run")
    if flags.monitor_interval is not None:
        found.append("--monitor-interval: not needed: the agent sees the end of a worker at once")
    if flags.event_log_handler not in (None, "null"):
        found.append("--event-log-handler: ignored: Rankless makes no events of torch's")
    if flags.logs_specs is not None:
        found.append("--logs-specs: ignored: Rankless writes logs as torch's default does")
    if flags.numa_binding is not None:
        found.append("--numa-binding: ignored: workers may use every core")
    return found


def _settings(flags: TorchrunFlags, count: int) -> TorchrunSettings:
    shutdown = flags.shutdown_timeout
    if shutdown is None:
        shutdown = whole_number("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    if shutdown is not None and shutdown < 0:
        raise ConfigError(expected="--shutdown-timeout from 0 up", found=shutdown, fix="give seconds")
    return TorchrunSettings(
        role=flags.role or "default",
        run_id=None if flags.standalone else flags.rdzv_id,
        signals=_signals(flags.signals_to_handle or "SIGTERM,SIGINT,SIGHUP,SIGQUIT"),
        shutdown_seconds=30.0 if shutdown is None else float(shutdown),
        virtual_local_rank=flags.virtual_local_rank,
        streams=tuple(_streams(flags, count)),
    )


def _signals(text: str) -> tuple[int, ...]:
    numbers = []
    for name in text.split(","):
        number = signal.__dict__.get(name.strip())
        if not isinstance(number, signal.Signals) or number in (signal.SIGKILL, signal.SIGSTOP):
            raise ConfigError(
                expected="--signals-to-handle as names of signals that can be caught",
                found=name.strip(),
                fix="as in --signals-to-handle SIGTERM,SIGINT,SIGUSR1",
            )
        numbers.append(int(number))
    return tuple(numbers)


def _streams(flags: TorchrunFlags, count: int) -> Iterator[ShownStream]:
    redirects = _per_rank(flags.redirects or "0", count, option="--redirects")
    tee = _per_rank(flags.tee or "0", count, option="--tee")
    shown = _ranks(flags.local_ranks_filter, count)
    template = string.Template(
        snapshot().get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE") or "[${role_name}${local_rank}]:"
    )
    filters = {"out": flags.duplicate_stdout_filters, "err": flags.duplicate_stderr_filters}
    for rank in range(count):
        prefix = template.safe_substitute(role_name=flags.role or "default", rank=rank, local_rank=rank)
        for source, bit in _BITS:
            if rank not in shown or (redirects[rank] & bit and not tee[rank] & bit):
                continue
            teed = tee[rank] & bit
            yield ShownStream(
                rank=rank,
                source=source,
                prefix=prefix if teed else "",
                filters=_texts(filters[source] or "") if teed else (),
            )


def _per_rank(text: str, count: int, *, option: str) -> list[int]:
    if re.fullmatch("[0-3]", text):
        return [int(text)] * count
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        raise ConfigError(
            expected=f"{option} as 0 to 3 (1: standard output, 2: standard error), or as RANK:0 to 3, with commas",
            found=text,
            fix=f"as in {option} 3, or {option} 0:3,1:1",
        )
    chosen = {int(rank): int(bits) for rank, bits in (pair.split(":") for pair in text.split(","))}
    return [chosen.get(rank, 0) for rank in range(count)]


def _ranks(text: str | None, count: int) -> Sequence[int]:
    if not text:
        return range(count)
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts):
        raise ConfigError(
            expected="--local-ranks-filter as numbers with commas", found=text, fix="as in --local-ranks-filter 0,1"
        )
    return [int(part) for part in parts]


def _texts(text: str) -> tuple[str, ...]:
    """Split a list at its commas; two commas stand for one inside a text."""
    return tuple(part.replace("\0", ",") for part in text.replace(",,", "\0").split(",")) if text else ()


STATIC_PORT = 29500
RENDEZVOUS_PORT = 29400
"""torchrun's default port."""


class TorchrunHosts(msgspec.Struct, frozen=True, kw_only=True):
    """The hosts of a run, and the rendezvous of hosts and workers."""

    least: int = 1
    most: int = 1
    number: int = 0
    """This host's number."""
    master_address: str = "127.0.0.1"
    master_port: int | None = None
    """None: a free port."""
    local_address: str | None = None
    rendezvous: str = "static"
    endpoint: str = ""
    settings: tuple[tuple[str, str], ...] = ()


def make_hosts(flags: TorchrunFlags) -> TorchrunHosts:
    """Return what the options say about hosts. Raises `ConfigError` for invalid values."""
    least, most = _host_counts(flags.nnodes or "1")
    address, port = flags.master_addr or "127.0.0.1", flags.master_port
    backend = "c10d" if flags.standalone else flags.rdzv_backend or "static"
    endpoint = "" if flags.standalone else flags.rdzv_endpoint or ""
    if backend == "static" and endpoint:
        host, _, number = endpoint.rpartition(":")
        if not host or not number.isdigit():
            raise ConfigError(
                expected="--rdzv-endpoint as HOST:PORT", found=endpoint, fix="or use --master-addr and --master-port"
            )
        address, port = host, int(number)
    elif backend != "static" and most == 1:
        port = None  # torchrun also takes a free port then
    if port is not None and not 0 <= port < 2**16:
        raise ConfigError(expected="a port from 1 to 65535", found=port, fix="choose another --master-port")
    return TorchrunHosts(
        least=least,
        most=most,
        number=flags.node_rank or 0,
        master_address=address.strip("[]"),
        master_port=port or None,
        local_address=flags.local_addr,
        rendezvous=backend,
        endpoint=endpoint,
        settings=tuple(_rendezvous_settings(flags.rdzv_conf or "")),
    )


def _host_counts(text: str) -> tuple[int, int]:
    numbers = text.split(":")
    if not all(number.isdigit() for number in numbers) or not 1 <= len(numbers) <= 2:
        raise ConfigError(expected="--nnodes as N or MIN:MAX", found=text, fix="one host is --nnodes 1")
    least, most = int(numbers[0]), int(numbers[-1])
    if not 0 < least <= most:
        raise ConfigError(expected="--nnodes from 1 up, MIN no more than MAX", found=text, fix="one host is --nnodes 1")
    return least, most


def _rendezvous_settings(text: str) -> Iterator[tuple[str, str]]:
    for pair in text.split(",") if text.strip() else ():
        name, _, value = (part.strip() for part in pair.partition("="))
        if not name or not value:
            raise ConfigError(expected="--rdzv-conf as NAME=VALUE,NAME=VALUE", found=text, fix="correct it")
        yield name, value


def make_cluster(hosts: TorchrunHosts, *, workers: int, insecure: bool) -> Cluster | None:
    """Return the hosts, on each of which the user types the command; None for one host.

    The agents' rendezvous is at torchrun's master port. The workers get a free port of host 0. Raises `ConfigError` for
    options that contradict each other.
    """
    if hosts.most == 1:
        if hosts.number != 0:
            raise ConfigError(
                expected="--node-rank 0, the only host's number",
                found=hosts.number,
                fix="omit it, or give --nnodes",
            )
        return None
    if hosts.least != hosts.most:
        raise ConfigError(
            expected="a fixed number of hosts: none can join or leave while the job runs",
            found=f"--nnodes {hosts.least}:{hosts.most}",
            fix=f"--nnodes {hosts.most}",
        )
    if hosts.rendezvous == "static":
        address, port, host_index = hosts.master_address, hosts.master_port or STATIC_PORT, hosts.number
        if not 0 <= host_index < hosts.most:
            raise ConfigError(
                expected=f"--node-rank from 0 to {hosts.most - 1}", found=host_index, fix="number the hosts from 0"
            )
    else:
        address, _, number = hosts.endpoint.rpartition(":")
        if not number.isdigit():
            address, number = hosts.endpoint, str(RENDEZVOUS_PORT)
        if not address:
            raise ConfigError(
                expected="--rdzv-endpoint HOST:PORT, the rendezvous of the hosts",
                found=f"none, with --nnodes {hosts.most}",
                fix="name the first host, the same on every host",
            )
        port, host_index = int(number), 0 if addresses_of(address) & own_addresses() else UNKNOWN_HOST
    return Cluster(
        hosts=numbered_hosts(address, hosts.most, workers=workers),
        host_index=host_index,
        port=port,
        agent_start="manual",
        is_listed=False,
        insecure=insecure,
        join_timeout_seconds=_join_seconds(dict(hosts.settings)),
    )


def _join_seconds(settings: dict[str, str]) -> float:
    given = settings.get("join_timeout") or settings.get("timeout") or "60"
    try:
        return float(given)
    except ValueError:
        raise ConfigError(
            expected="join_timeout= in --rdzv-conf as seconds", found=given, fix="as in --rdzv-conf join_timeout=300"
        ) from None
