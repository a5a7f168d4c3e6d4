"""torchrun's command line as a plan: what each of its options means for a run on one host."""

import re
import signal
import string
from collections.abc import Iterator, Sequence

import msgspec

from rankless.errors import PlanError
from rankless.plan.check import core_count, count_gpus
from rankless.plan.environment import (
    user_line_prefix,
    user_python,
    user_shutdown_seconds,
    user_threads,
    user_visible_devices,
)
from rankless.plan.foreign import Foreign, Hosts, ShownStream, Source
from rankless.plan.run_plan import Program, ProgramKind, RunRequest

LOCAL_RANK = "${local_rank}"
"""In an argument of the program: the worker's local rank."""

_BITS: tuple[tuple[Source, int], ...] = (("out", 1), ("err", 2))


class TorchrunFlags(msgspec.Struct, frozen=True, kw_only=True):
    """What was given on the command line, or by PET_ variables; None is what was not."""

    nnodes: str | None = None
    nproc_per_node: str | None = None
    rdzv_backend: str | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    rdzv_conf: str | None = None
    standalone: bool = False
    max_restarts: int | None = None
    monitor_interval: float | None = None
    start_method: str | None = None
    event_log_handler: str | None = None
    role: str | None = None
    module: bool = False
    no_python: bool = False
    run_path: bool = False
    log_dir: str | None = None
    redirects: str | None = None
    tee: str | None = None
    local_ranks_filter: str | None = None
    duplicate_stdout_filters: str | None = None
    duplicate_stderr_filters: str | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    local_addr: str | None = None
    logs_specs: str | None = None
    numa_binding: str | None = None
    signals_to_handle: str | None = None
    shutdown_timeout: int | None = None
    virtual_local_rank: bool = False
    use_env: bool = True
    training_script: tuple[str, ...] = ()
    """The script, module or command, and its own arguments."""


def torchrun_program(flags: TorchrunFlags) -> Program:
    """The program that the flags name. Raises PlanError if there is none, or two flags contradict each other."""
    if not flags.training_script:
        raise PlanError(
            expected="a script to run",
            found="none",
            fix="name one, as in `rankless torchrun --nproc-per-node 2 train.py`",
        )
    target, *arguments = flags.training_script
    if flags.no_python and flags.module and not flags.run_path:
        raise PlanError(
            expected="--no-python or --module", found="both", fix="a module is Python: leave --no-python away"
        )
    kind: ProgramKind = "script"
    if flags.no_python and not flags.run_path:
        kind = "command"
    elif flags.module and not flags.run_path:
        kind = "module"
    return Program(kind=kind, target=target, arguments=tuple(arguments), has_macros=True)


def under_own_python(program: Program) -> Program:
    """The program as a command of the interpreter that PYTHON_EXEC names, if it names one."""
    python = user_python()
    if python is None or program.kind == "command":
        return program
    how = ("-u", "-m") if program.kind == "module" else ("-u",)
    return Program(kind="command", target=python, arguments=(*how, program.target, *program.arguments), has_macros=True)


def torchrun_request(flags: TorchrunFlags, program: Program) -> RunRequest:
    """What the flags ask for. Raises PlanError for what cannot be meant."""
    count = worker_count(flags.nproc_per_node or "1")
    visible = user_visible_devices()
    if flags.virtual_local_rank and visible is not None and len(visible) < count:
        raise PlanError(
            expected=f"a GPU for each of {count} workers, as --virtual-local-rank gives each its own",
            found=f"CUDA_VISIBLE_DEVICES={','.join(visible)}",
            fix="name more GPUs there, or start fewer workers",
        )
    if flags.max_restarts is not None and flags.max_restarts < 0:
        raise PlanError(expected="--max-restarts from 0 up", found=flags.max_restarts, fix="leave it away")
    return RunRequest(
        worker_count=count,
        threads=1 if user_threads() is None and count > 1 else None,
        log_folder=flags.log_dir or "log",
        warm=program.kind != "command" and flags.start_method in (None, "fork"),
        hosts=_hosts(flags),
        foreign=_foreign(flags, count),
    )


def worker_count(text: str) -> int:
    """How many workers `--nproc-per-node` asks for. Raises PlanError."""
    if re.fullmatch(r"\d+", text) and int(text) > 0:
        return int(text)
    gpus = count_gpus()
    if text == "cpu" or (text == "auto" and not gpus):
        return core_count()
    if text in ("auto", "gpu") and gpus:
        return gpus
    raise PlanError(
        expected="--nproc-per-node as a number from 1 up, or auto, gpu, cpu",
        found=f"{text}, and no such device on this host" if text in ("gpu", "xpu") else text,
        fix="say cpu for one process per core, or a number",
    )


def notes(flags: TorchrunFlags) -> list[str]:
    """What the user is told of flags that mean nothing here, or something else than under torchrun."""
    found = []
    unheeded = {
        "--rdzv-backend": flags.rdzv_backend not in (None, "static", "c10d"),
        "--rdzv-conf": bool(flags.rdzv_conf),
        "--local-addr": flags.local_addr is not None,
    }
    if any(unheeded.values()):
        names = ", ".join(name for name, given in unheeded.items() if given)
        found.append(f"{names}: not needed, on one host nobody has to be met")
    if flags.max_restarts:
        found.append(f"--max-restarts {flags.max_restarts}: nothing is restarted, the first failure ends the run")
    if flags.monitor_interval is not None:
        found.append("--monitor-interval: not needed, the end of a worker is noticed at once")
    if flags.event_log_handler not in (None, "null"):
        found.append("--event-log-handler: not heeded, torch's events are not made")
    if flags.logs_specs is not None:
        found.append("--logs-specs: not heeded, logs are written as torch's default does")
    if flags.numa_binding is not None:
        found.append("--numa-binding: not heeded, workers may use every core")
    return found


def _hosts(flags: TorchrunFlags) -> Hosts:
    least, most = _host_counts(flags.nnodes or "1")
    address, port = flags.master_addr or "127.0.0.1", flags.master_port
    backend = "c10d" if flags.standalone else flags.rdzv_backend or "static"
    endpoint = "" if flags.standalone else flags.rdzv_endpoint or ""
    if backend == "static" and endpoint:
        host, _, number = endpoint.rpartition(":")
        if not host or not number.isdigit():
            raise PlanError(
                expected="--rdzv-endpoint as HOST:PORT", found=endpoint, fix="or use --master-addr and --master-port"
            )
        address, port = host, int(number)
    elif backend != "static" and most == 1:
        port = None  # torchrun, too, takes a free one then
    if port is not None and not 0 <= port < 2**16:
        raise PlanError(expected="a port from 1 to 65535", found=port, fix="choose another --master-port")
    return Hosts(
        least=least,
        most=most,
        number=flags.node_rank or 0,
        master_address=address.strip("[]"),
        master_port=port or None,
        local_address=flags.local_addr,
        rendezvous=backend,
        endpoint=endpoint,
        settings=tuple(_settings(flags.rdzv_conf or "")),
    )


def _host_counts(text: str) -> tuple[int, int]:
    numbers = text.split(":")
    if not all(number.isdigit() for number in numbers) or not 1 <= len(numbers) <= 2:
        raise PlanError(expected="--nnodes as N or MIN:MAX", found=text, fix="one host is --nnodes 1")
    least, most = int(numbers[0]), int(numbers[-1])
    if not 0 < least <= most:
        raise PlanError(expected="--nnodes from 1 up, MIN no more than MAX", found=text, fix="one host is --nnodes 1")
    return least, most


def _settings(text: str) -> Iterator[tuple[str, str]]:
    for pair in text.split(",") if text.strip() else ():
        name, _, value = (part.strip() for part in pair.partition("="))
        if not name or not value:
            raise PlanError(expected="--rdzv-conf as NAME=VALUE,NAME=VALUE", found=text, fix="correct it")
        yield name, value


def _foreign(flags: TorchrunFlags, count: int) -> Foreign:
    shutdown = flags.shutdown_timeout if flags.shutdown_timeout is not None else user_shutdown_seconds()
    if shutdown is not None and shutdown < 0:
        raise PlanError(expected="--shutdown-timeout from 0 up", found=shutdown, fix="give seconds")
    return Foreign(
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
            raise PlanError(
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
    template = string.Template(user_line_prefix() or "[${role_name}${local_rank}]:")
    needles = {"out": flags.duplicate_stdout_filters, "err": flags.duplicate_stderr_filters}
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
                needles=_texts(needles[source] or "") if teed else (),
            )


def _per_rank(text: str, count: int, *, option: str) -> list[int]:
    if re.fullmatch("[0-3]", text):
        return [int(text)] * count
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        raise PlanError(
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
        raise PlanError(
            expected="--local-ranks-filter as numbers with commas", found=text, fix="as in --local-ranks-filter 0,1"
        )
    return [int(part) for part in parts]


def _texts(text: str) -> tuple[str, ...]:
    """A list with commas; two of them are one that belongs to a text."""
    return tuple(part.replace("\0", ",") for part in text.replace(",,", "\0").split(",")) if text else ()
