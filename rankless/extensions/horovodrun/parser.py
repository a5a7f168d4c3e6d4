"""The options of horovodrun, word for word."""

import argparse
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rankless.errors import ConfigError


class HorovodrunFlags(msgspec.Struct, frozen=True, kw_only=True):
    """The options given on the command line or in its `--config-file`; None if an option is not given."""

    num_proc: int | None = None
    check_build: bool = False
    disable_cache: bool = False
    start_timeout: int | None = None
    network_interfaces: tuple[str, ...] = ()
    output_filename: str | None = None
    verbose: bool = False
    config_file: str | None = None
    ssh_port: int | None = None
    ssh_identity_file: str | None = None

    fusion_threshold_mb: int | None = None
    cycle_time_ms: float | None = None
    cache_capacity: int | None = None
    hierarchical_allreduce: bool | None = None
    hierarchical_allgather: bool | None = None
    torus_allreduce: bool | None = None

    autotune: bool | None = None
    autotune_log_file: str | None = None
    autotune_warmup_samples: int | None = None
    autotune_steps_per_sample: int | None = None
    autotune_bayes_opt_max_samples: int | None = None
    autotune_gaussian_process_noise: float | None = None

    min_num_proc: int | None = None
    max_num_proc: int | None = None
    slots_per_host: int | None = None
    elastic_timeout: int | None = None
    reset_limit: int | None = None
    blacklist_cooldown_range: tuple[int, int] | None = None

    timeline_filename: str | None = None
    timeline_mark_cycles: bool | None = None

    no_stall_check: bool | None = None
    stall_check_warning_time_seconds: int | None = None
    stall_check_shutdown_time_seconds: int | None = None

    mpi_threads_disable: bool | None = None
    mpi_args: str | None = None
    mpi_launch_flag: tuple[str, ...] = ()
    """`env NAME=VALUE …` for the workers. Horovod itself does not have it, but tutorials use it."""
    tcp: bool = False
    binding_args: str | None = None
    num_nccl_streams: int | None = None
    thread_affinity: int | None = None
    gloo_timeout_seconds: int | None = None

    log_level: str | None = None
    log_with_timestamp: bool | None = None
    prefix_output_with_timestamp: bool = False

    hosts: str | None = None
    hostfile: str | None = None
    host_discovery_script: str | None = None

    gloo: bool = False
    mpi: bool = False
    jsrun: bool = False

    command: tuple[str, ...] = ()

    @property
    def is_elastic(self) -> bool:
        """Whether workers may join and leave while the job runs."""
        return self.host_discovery_script is not None or self.min_num_proc is not None


LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")
_NO_MPI = "Accepted for compatibility and ignored: Rankless does not use mpirun."
_ACCEPTED = "Accepted for compatibility and ignored."


@dataclass(frozen=True, kw_only=True)
class Value:
    """An option with a value."""

    names: tuple[str, ...]
    help: str
    kind: Callable[[str], object] = str
    metavar: str | None = "N"
    group: str = ""
    """The name of a group of options that exclude each other."""
    count: int | None = None
    choices: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Switch:
    """An option without a value, and its opposite."""

    on: tuple[str, ...]
    help: str
    off: tuple[str, ...] = ()
    group: str = ""


OPTIONS: tuple[Value | Switch, ...] = (
    Value(names=("--num-proc", "-np"), kind=int, help="Total number of processes on all hosts."),
    Switch(on=("--check-build", "-cb"), help="Show the available frameworks, controllers and operations, and exit."),
    Switch(on=("--disable-cache",), help="Accepted for compatibility; Rankless caches no checks."),
    Value(names=("--start-timeout",), kind=int, metavar="S", help="Seconds to wait for the other hosts. Default: 30."),
    Value(
        names=("--output-filename",),
        metavar="DIR",
        help="Write all output also to DIR/rank.N/stdout and DIR/rank.N/stderr.",
    ),
    Switch(on=("--verbose",), help="Print the slots, the program and the variables that the workers get."),
    Value(
        names=("--config-file",),
        metavar="FILE",
        help="YAML file with options; options on the command line take precedence.",
    ),
    Value(names=("--ssh-port", "-p"), kind=int, metavar="PORT", help="Port of ssh on the other hosts."),
    Value(names=("--ssh-identity-file", "-i"), metavar="FILE", help="Private key for ssh."),
    Value(
        names=("--fusion-threshold-mb",),
        kind=int,
        help="Size in MiB up to which tensors are fused into one operation; 0 turns fusion off. Default: 128.",
    ),
    Value(
        names=("--cycle-time-ms",),
        kind=float,
        help="Milliseconds for which tensors wait to be fused with others. Default: 0.",
    ),
    Value(names=("--cache-capacity",), kind=int, help="Capacity of the response cache, in operations. Default: 1024."),
    *(
        Switch(on=(f"--{name}",), off=(f"--no-{name}",), group=name, help=text)
        for name, text in (
            ("hierarchical-allreduce", "Reduce within each host first, then between the hosts. Default: on."),
            ("hierarchical-allgather", _ACCEPTED),
            ("torus-allreduce", "Same as --hierarchical-allreduce."),
        )
    ),
    Switch(on=("--autotune",), off=("--no-autotune",), group="autotune", help=_ACCEPTED),
    Value(names=("--autotune-log-file",), metavar="FILE", help=_ACCEPTED),
    Value(names=("--autotune-warmup-samples",), kind=int, help=_ACCEPTED),
    Value(names=("--autotune-steps-per-sample",), kind=int, help=_ACCEPTED),
    Value(names=("--autotune-bayes-opt-max-samples",), kind=int, help=_ACCEPTED),
    Value(names=("--autotune-gaussian-process-noise",), kind=float, help=_ACCEPTED),
    Value(
        names=("--min-num-proc", "--min-np"),
        kind=int,
        help="Elastic: minimum number of workers; with fewer, the job waits. Default: the value of -np.",
    ),
    Value(
        names=("--max-num-proc", "--max-np"),
        kind=int,
        help="Elastic: maximum number of workers. Default: all slots.",
    ),
    Value(
        names=("--slots-per-host",),
        kind=int,
        help="Elastic: slots of discovered hosts without a number of slots. Default: 1.",
    ),
    Value(
        names=("--elastic-timeout",),
        kind=int,
        metavar="S",
        help="Elastic: seconds for which the job waits with too few workers. Default: 600.",
    ),
    Value(
        names=("--reset-limit",), kind=int, help="Elastic: maximum number of rounds after the first. Default: no limit."
    ),
    Value(
        names=("--blacklist-cooldown-range",),
        kind=int,
        metavar="S",
        count=2,
        help="Elastic: first and longest period in seconds for which a failing host gets no workers. Default: forever.",
    ),
    Value(names=("--timeline-filename",), metavar="FILE", help="Write a timeline for chrome://tracing to this file."),
    Switch(
        on=("--timeline-mark-cycles",),
        off=("--no-timeline-mark-cycles",),
        group="timeline cycles",
        help="Mark cycles in the timeline.",
    ),
    Switch(
        on=("--no-stall-check",),
        off=("--stall-check",),
        group="stall",
        help="Turn off the check for stalled operations.",
    ),
    Value(
        names=("--stall-check-warning-time-seconds",),
        kind=int,
        metavar="S",
        help="Seconds after which to warn which ranks an operation waits for. Default: 60.",
    ),
    Value(
        names=("--stall-check-shutdown-time-seconds",),
        kind=int,
        metavar="S",
        help="Seconds after which a stalled operation ends the job; 0 for never. Default: 0.",
    ),
    Switch(on=("--mpi-threads-disable",), off=("--no-mpi-threads-disable",), group="mpi threads", help=_NO_MPI),
    Value(names=("--mpi-args",), metavar="ARGS", help=_NO_MPI),
    Switch(on=("--tcp",), help="Make NCCL use TCP instead of InfiniBand."),
    Value(names=("--binding-args",), metavar="ARGS", help=_NO_MPI),
    Value(names=("--num-nccl-streams",), kind=int, help=_ACCEPTED),
    Value(names=("--thread-affinity",), kind=int, help=_ACCEPTED),
    Value(
        names=("--gloo-timeout-seconds",),
        kind=int,
        metavar="S",
        help="Timeout of a Gloo operation, in seconds. Default: 30.",
    ),
    Value(names=("--log-level",), metavar="LEVEL", choices=LEVELS, help="Value of HOROVOD_LOG_LEVEL."),
    Switch(
        on=("--log-with-timestamp", "--no-log-hide-timestamp"),
        off=("--log-without-timestamp", "--log-hide-timestamp"),
        group="timestamps",
        help="Start log messages with the time.",
    ),
    Switch(
        on=("--prefix-output-with-timestamp", "-prefix-timestamp"),
        group="timestamps",
        help="Start each line of output with the time.",
    ),
    Value(names=("--hosts", "-H"), metavar="A:2,B:4", group="hosts", help="Hosts and their slots; A is this host."),
    Value(
        names=("--hostfile", "-hostfile"),
        metavar="FILE",
        group="hosts",
        help="File with one host per line, such as `10.0.0.1 slots=4`.",
    ),
    Value(
        names=("--host-discovery-script",),
        metavar="FILE",
        group="hosts",
        help="Elastic: command that prints the currently available hosts, as host:slots.",
    ),
    Switch(
        on=("--gloo",),
        group="controller",
        help="Accepted for compatibility; Rankless always starts the processes itself.",
    ),
    Switch(on=("--mpi",), group="controller", help="Accepted for compatibility; Rankless starts the processes itself."),
    Switch(
        on=("--jsrun",), group="controller", help="Accepted for compatibility; Rankless starts the processes itself."
    ),
)


class _TakeInterfaces(argparse.Action):
    """Adds names, with or without commas between them, to those given before."""

    def __call__(
        self,
        _parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        _option: str | None = None,
    ) -> None:
        names = [name.strip() for name in str(values).split(",") if name.strip()]
        namespace.network_interfaces = (*namespace.network_interfaces, *names)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the options. Options that are not given are None, or False for a switch without an opposite."""
    groups: dict[str, argparse._MutuallyExclusiveGroup] = {}
    for option in OPTIONS:
        group: Any = parser
        if option.group:
            group = groups.setdefault(option.group, parser.add_mutually_exclusive_group())
        if isinstance(option, Switch):
            _add_switch(group, option)
        else:
            group.add_argument(
                *option.names,
                dest=_field(option.names[0]),
                type=option.kind,
                metavar=option.metavar,
                nargs=option.count,
                choices=option.choices,
                help=option.help,
            )
    parser.add_argument(
        *("--network-interfaces", "--network-interface"),
        action=_TakeInterfaces,
        default=(),
        metavar="NAME",
        help="Network cards for the communication of the workers; repeatable.",
    )
    parser.add_argument(
        "--mpi-launch-flag",
        action="append",
        default=[],
        metavar='"env A=1"',
        help="Environment variables for the workers; repeatable.",
    )
    parser.usage = "%(prog)s [options] command [args]"
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="command [args]", help="Command to run, with its arguments."
    )


def read_flags(arguments: argparse.Namespace) -> HorovodrunFlags:
    """Return the parsed options."""
    values = vars(arguments)
    if values["command"][:1] == ["--"]:
        values["command"] = values["command"][1:]
    return msgspec.convert(values, HorovodrunFlags)


def _add_switch(group: Any, option: Switch) -> None:
    field = _field(option.on[0])
    default = None if option.off else False
    group.add_argument(*option.on, dest=field, action="store_const", const=True, default=default, help=option.help)
    if option.off:
        group.add_argument(
            *option.off,
            dest=field,
            action="store_const",
            const=False,
            default=default,
            help=f"Opposite of {option.on[0]}.",
        )


def _field(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


SECTIONS: Mapping[str, Mapping[str, str]] = {
    "params": {
        name: name
        for name in (
            *("fusion_threshold_mb", "cycle_time_ms", "cache_capacity"),
            *("hierarchical_allreduce", "hierarchical_allgather", "torus_allreduce"),
        )
    },
    "autotune": {
        "enabled": "autotune",
        "log_file": "autotune_log_file",
        "warmup_samples": "autotune_warmup_samples",
        "steps_per_sample": "autotune_steps_per_sample",
        "bayes_opt_max_samples": "autotune_bayes_opt_max_samples",
        "gaussian_process_noise": "autotune_gaussian_process_noise",
    },
    "timeline": {"filename": "timeline_filename", "mark_cycles": "timeline_mark_cycles"},
    "stall_check": {
        "enabled": "no_stall_check",
        "warning_time_seconds": "stall_check_warning_time_seconds",
        "shutdown_time_seconds": "stall_check_shutdown_time_seconds",
    },
    "library_options": {
        name: name for name in ("mpi_threads_disable", "num_nccl_streams", "thread_affinity", "gloo_timeout_seconds")
    },
    "logging": {"level": "log_level", "with_timestamp": "log_with_timestamp"},
}
"""The option for each key of each section."""
_CONTROLLERS = ("gloo", "mpi")


def read_config(path: str) -> dict[str, Any]:
    """Return the file's content by section. Raises `ConfigError` if it cannot be read."""
    try:
        with open(path, "rb") as file:
            found = msgspec.yaml.decode(file.read())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            expected="a file of options in YAML, with sections as `params:` and `timeline:`",
            found=f"{path}: {getattr(error, 'strerror', None) or error}",
            fix="check the path given to --config-file, and the file",
        ) from None
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(found.get(name) or {}, dict) for name in SECTIONS):
        raise ConfigError(
            expected=f"sections in {path}, each with options below it",
            found=type(found).__name__ if not isinstance(found, dict) else ", ".join(map(str, found)),
            fix="as in `params:`, and below it, indented, `fusion_threshold_mb: 32`",
        )
    return found


def complete_flags(flags: HorovodrunFlags, config: Mapping[str, Any], *, path: str) -> HorovodrunFlags:
    """Return the flags, with those that the command line omits from the file.

    Raises `ConfigError` for values of the wrong type.
    """
    values = msgspec.to_builtins(flags)
    values |= {name: value for name, value in _options(config) if values[name] is None}
    controller = config.get("controller")
    if controller is not None and not (flags.gloo or flags.mpi or flags.jsrun):
        name = str(controller).lower()
        if name not in _CONTROLLERS:
            raise ConfigError(expected=f"controller: gloo or mpi in {path}", found=controller, fix="omit it")
        values[name] = True
    try:
        return msgspec.convert(values, HorovodrunFlags, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(
            expected=f"options of the right types in {path}", found=str(error), fix="correct it"
        ) from None


def unknown_keys(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the unknown keys of the file, each with the nearest known name."""
    known = ["controller", *SECTIONS]
    for section, below in config.items():
        if section not in known:
            yield f"{section}{_nearest(str(section), known)}"
        elif section != "controller":
            for name in (below or {}).keys() - SECTIONS[section].keys():
                yield f"{section}.{name}{_nearest(str(name), list(SECTIONS[section]))}"


def _options(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for section, options in SECTIONS.items():
        for name, value in (config.get(section) or {}).items():
            if name in options and value is not None:
                # The file enables the stall check, the option disables it.
                yield options[name], not value if (section, name) == ("stall_check", "enabled") else value


def _nearest(name: str, known: list[str]) -> str:
    found = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {found[0]}?)" if found else ""
