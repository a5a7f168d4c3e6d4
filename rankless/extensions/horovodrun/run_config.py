"""Turns horovodrun's options into a `RunRequest`."""

import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping

import psutil  # type: ignore[import-untyped]  # it has no stubs

from rankless.config.environment import default_log_folder
from rankless.config.make_run_config import count_gpus
from rankless.config.run_config import Elastic, Program, RunRequest
from rankless.errors import ConfigError
from rankless.extensions.horovodrun.hosts import fill_hosts, list_hosts, make_cluster, name_hosts
from rankless.extensions.horovodrun.launched_worker import horovod_variables
from rankless.extensions.horovodrun.parser import HorovodrunFlags
from rankless.extensions.horovodrun.settings import HorovodrunSettings, NamedHost, make_horovodrun_spec

_MIB = 1 << 20
_NOT_NEGATIVE = (
    *("fusion_threshold_mb", "cycle_time_ms", "cache_capacity", "autotune_warmup_samples"),
    *("autotune_steps_per_sample", "autotune_bayes_opt_max_samples", "stall_check_warning_time_seconds"),
    *("stall_check_shutdown_time_seconds", "num_nccl_streams", "thread_affinity", "gloo_timeout_seconds"),
)
_VARIABLES = {
    "cycle_time_ms": "CYCLE_TIME",
    "cache_capacity": "CACHE_CAPACITY",
    "hierarchical_allreduce": "HIERARCHICAL_ALLREDUCE",
    "hierarchical_allgather": "HIERARCHICAL_ALLGATHER",
    "torus_allreduce": "TORUS_ALLREDUCE",
    "autotune": "AUTOTUNE",
    "autotune_log_file": "AUTOTUNE_LOG",
    "autotune_warmup_samples": "AUTOTUNE_WARMUP_SAMPLES",
    "autotune_steps_per_sample": "AUTOTUNE_STEPS_PER_SAMPLE",
    "autotune_bayes_opt_max_samples": "AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
    "autotune_gaussian_process_noise": "AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
    "timeline_filename": "TIMELINE",
    "timeline_mark_cycles": "TIMELINE_MARK_CYCLES",
    "no_stall_check": "STALL_CHECK_DISABLE",
    "stall_check_warning_time_seconds": "STALL_CHECK_TIME_SECONDS",
    "stall_check_shutdown_time_seconds": "STALL_SHUTDOWN_TIME_SECONDS",
    "mpi_threads_disable": "MPI_THREADS_DISABLE",
    "num_nccl_streams": "NUM_NCCL_STREAMS",
    "thread_affinity": "THREAD_AFFINITY",
    "gloo_timeout_seconds": "GLOO_TIMEOUT_SECONDS",
    "log_level": "LOG_LEVEL",
}
"""The HOROVOD_ variable that an option sets in the workers."""


def horovodrun_program(flags: HorovodrunFlags) -> Program:
    """Return the program after the options. A worker runs it itself if it is for this interpreter.

    Raises `ConfigError` if there is none.
    """
    if not flags.command:
        raise ConfigError(
            expected="a program to run",
            found="none",
            fix="name one, as in `rankless horovodrun -np 2 python train.py`",
        )
    target, *arguments = flags.command
    if is_this_python(target):
        python = _python_program(arguments)
        if python is not None:
            return python
    elif target.endswith(".py") and os.path.isfile(target) and not os.access(target, os.X_OK):
        return Program(kind="script", target=target, arguments=tuple(arguments))
    return Program(kind="command", target=target, arguments=tuple(arguments))


def horovodrun_request(flags: HorovodrunFlags, program: Program) -> RunRequest:
    """Return the request. Raises `ConfigError` for invalid values."""
    _require_range(flags)
    count = flags.num_proc
    if count is None or count < 1:
        raise ConfigError(
            expected="-np as a number of processes, from 1 up", found=count, fix="as in `rankless horovodrun -np 2 …`"
        )
    variables = dict(worker_variables(flags))
    elastic = make_elastic(flags, count, variables) if flags.is_elastic else None
    hosts = fill_hosts(flags, count) if elastic is None else ()
    cluster = make_cluster(flags, hosts) if elastic is None else None
    return RunRequest(
        worker_count=count,
        devices=_devices(variables.get("CUDA_VISIBLE_DEVICES")),
        log_folder=default_log_folder(),
        show="all",
        warm=program.kind != "command",
        separate_seeds=True,
        launcher=make_horovodrun_spec(
            HorovodrunSettings(
                hosts=name_hosts(hosts) or (NamedHost(name="localhost", slots=count),),
                variables=tuple(variables.items()),
                output_folder=flags.output_filename,
                timestamps=flags.prefix_output_with_timestamp,
            )
        ),
        cluster=cluster,
        elastic=elastic,
    )


def worker_variables(flags: HorovodrunFlags) -> Iterator[tuple[str, str]]:
    """Yield the variables that the options set in every worker, in the order of setting. Raises `ConfigError`."""
    if flags.fusion_threshold_mb is not None:
        yield "HOROVOD_FUSION_THRESHOLD", str(flags.fusion_threshold_mb * _MIB)
    for option, variable in _VARIABLES.items():
        value = getattr(flags, option)
        if value is not None:
            yield f"HOROVOD_{variable}", str(int(value) if isinstance(value, bool) else value)
    if flags.log_with_timestamp is not None:
        yield "HOROVOD_LOG_HIDE_TIME", str(int(not flags.log_with_timestamp))
    if flags.tcp:
        yield "NCCL_IB_DISABLE", "1"
    if flags.network_interfaces:
        _require_interfaces(flags.network_interfaces)
        yield "HOROVOD_GLOO_IFACE", flags.network_interfaces[0]
        yield "GLOO_SOCKET_IFNAME", flags.network_interfaces[0]
        yield "NCCL_SOCKET_IFNAME", ",".join(flags.network_interfaces)
    for text in flags.mpi_launch_flag:
        yield from _launch_environment(text)


def describe_ignored_options(flags: HorovodrunFlags) -> list[str]:
    """Return a line about each given option that has no effect, or another one than in Horovod."""
    elastic = (flags.max_num_proc, flags.slots_per_host, flags.elastic_timeout, flags.reset_limit)
    notes = {
        "--disable-cache": flags.disable_cache and "not needed: Rankless caches no checks",
        "--mpi, --jsrun": (flags.mpi or flags.jsrun) and "not needed: Rankless starts the processes without MPI",
        "--mpi-args": flags.mpi_args is not None and "ignored: Rankless does not use mpirun",
        "--binding-args": flags.binding_args is not None and "ignored: processes may use every core",
        "--mpi-threads-disable": flags.mpi_threads_disable is not None and "ignored: Rankless does not use MPI",
        "--num-nccl-streams": flags.num_nccl_streams is not None and "ignored: NCCL has one stream",
        "--thread-affinity": flags.thread_affinity is not None and "ignored: threads may use every core",
        "--hierarchical-allgather": bool(flags.hierarchical_allgather) and "ignored: it follows the allreduce",
        "--autotune": bool(flags.autotune) and "ignored: Rankless does not tune",
        "--max-np and other elastic options": any(value is not None for value in elastic)
        and not flags.is_elastic
        and "ignored without --min-np or --host-discovery-script",
    }
    return [f"{name}: {why}" for name, why in notes.items() if why]


def is_this_python(target: str) -> bool:
    """Whether a command is the interpreter that runs Rankless, under any of its names.

    A bare `python` always is: without an activated environment another one would be found, without Horovod's API.
    """
    if target in ("python", "python3"):
        return True
    found = shutil.which(target)
    if found is None or not os.path.basename(target).startswith("python"):
        return False
    folders = {os.path.realpath(os.path.dirname(path)) for path in (found, sys.executable)}
    return len(folders) == 1 and os.path.realpath(found) == os.path.realpath(sys.executable)


def _python_program(arguments: list[str]) -> Program | None:
    """Return the program of the interpreter's arguments; None if they have other options of the interpreter."""
    parts = [*arguments]
    while parts[:1] == ["-u"]:  # Rankless never buffers output
        parts.pop(0)
    if parts[:1] in (["-c"], ["-m"]) and len(parts) > 1:
        kind = "code" if parts[0] == "-c" else "module"
        return Program(kind=kind, target=parts[1], arguments=tuple(parts[2:]))  # type: ignore[arg-type]
    if not parts or parts[0].startswith("-") or os.path.isdir(parts[0]):
        return None
    return Program(kind="script", target=parts[0], arguments=tuple(parts[1:]))


def _devices(visible: str | None) -> str | None:
    """Return the devices that an option leaves visible; None if no option names any."""
    if visible is None:
        return None
    names = [name for name in visible.split(",") if name.strip() not in ("", "-1")]
    count = min(len(names), count_gpus())
    return ",".join(map(str, range(count))) if count else "cpu"


def _launch_environment(text: str) -> Iterator[tuple[str, str]]:
    """Yield the variables of `env NAME=VALUE …`, or of mpirun's `-x NAME=VALUE`. Raises `ConfigError` otherwise."""
    parts = [part for part in shlex.split(text) if part not in ("env", "-x")]
    for part in parts:
        name, found, value = part.partition("=")
        if not found or not name.isidentifier():
            raise ConfigError(
                expected='--mpi-launch-flag as "env NAME=VALUE …", which sets the workers\' environment',
                found=text,
                fix="omit the rest: Rankless does not use mpirun",
            )
        yield name, value


def _require_interfaces(names: tuple[str, ...]) -> None:
    there = psutil.net_if_addrs()
    absent = [name for name in names if name not in there]
    if absent:
        raise ConfigError(
            expected=f"a network interface {absent[0]} on this host", found=", ".join(sorted(there)), fix="name another"
        )


def _require_range(flags: HorovodrunFlags) -> None:
    for name in _NOT_NEGATIVE:
        value = getattr(flags, name)
        if value is not None and value < 0:
            raise ConfigError(expected=f"--{name.replace('_', '-')} from 0 up", found=value, fix="omit it")
    noise = flags.autotune_gaussian_process_noise
    if noise is not None and not 0 <= noise <= 1:
        raise ConfigError(expected="--autotune-gaussian-process-noise from 0 to 1", found=noise, fix="omit it")


ELASTIC_SECONDS = 600.0
"""horovodrun's default, without `--elastic-timeout` and HOROVOD_ELASTIC_TIMEOUT."""


def make_elastic(flags: HorovodrunFlags, count: int, variables: Mapping[str, str]) -> Elastic:
    """Return the limits and hosts of an elastic job. Raises `ConfigError` for invalid hosts.

    `variables` are what the options set in every worker. `config.make_run_config` checks the limits.
    """
    cooldown = flags.blacklist_cooldown_range
    return Elastic(
        min_workers=count if flags.min_num_proc is None else flags.min_num_proc,
        max_workers=flags.max_num_proc,
        discovery_script=flags.host_discovery_script,
        hosts=() if flags.host_discovery_script is not None else _fixed_hosts(flags, count),
        slots_per_host=flags.slots_per_host,
        elastic_timeout_seconds=_timeout(flags),
        reset_limit=flags.reset_limit,
        ssh_port=flags.ssh_port,
        ssh_identity_file=flags.ssh_identity_file,
        cooldown_range_seconds=None if cooldown is None else (float(cooldown[0]), float(cooldown[1])),
        stall_timeout_seconds=_stall_timeout(variables),
        has_chosen_interface="GLOO_SOCKET_IFNAME" in variables,
    )


def _stall_timeout(variables: Mapping[str, str]) -> float | None:
    name = "STALL_SHUTDOWN_TIME_SECONDS"
    try:
        return float(variables.get(f"HOROVOD_{name}") or horovod_variables().get(name, "")) or None
    except ValueError:
        return None


def _timeout(flags: HorovodrunFlags) -> float:
    if flags.elastic_timeout is not None:
        return float(flags.elastic_timeout)
    given = horovod_variables().get("ELASTIC_TIMEOUT", "")
    return float(given) if given.replace(".", "", 1).isdigit() else ELASTIC_SECONDS


def _fixed_hosts(flags: HorovodrunFlags, count: int) -> tuple[tuple[str, int], ...]:
    return tuple((host.address, host.workers) for host in list_hosts(flags, count))
