"""The options of horovodrun, word for word."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rankless.launchers.horovodrun.options import HorovodrunFlags

LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")
_NO_MPI = "accepted and not heeded: there is no mpirun"
_ACCEPTED = "accepted and not heeded"


@dataclass(frozen=True, kw_only=True)
class Value:
    """An option with a value."""

    names: tuple[str, ...]
    help: str
    kind: Callable[[str], object] = str
    metavar: str | None = "N"
    group: str = ""
    """Of options of which one may be given."""
    count: int | None = None
    choices: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Switch:
    """An option without a value, and what says the opposite."""

    on: tuple[str, ...]
    help: str
    off: tuple[str, ...] = ()
    group: str = ""


OPTIONS: tuple[Value | Switch, ...] = (
    Value(names=("--num-proc", "-np"), kind=int, help="how many processes the job has on all hosts"),
    Switch(on=("--check-build", "-cb"), help="show what is there, and end"),
    Switch(on=("--disable-cache",), help="not needed: no checks are cached"),
    Value(names=("--start-timeout",), kind=int, metavar="S", help="how long to wait for hosts (30)"),
    Value(names=("--output-filename",), metavar="DIR", help="all output goes to DIR/rank.N/stdout and stderr, too"),
    Switch(on=("--verbose",), help="say what the workers are given"),
    Value(names=("--config-file",), metavar="FILE", help="options by section, in YAML; the command line wins"),
    Value(names=("--ssh-port", "-p"), kind=int, metavar="PORT", help="of ssh on the other hosts"),
    Value(names=("--ssh-identity-file", "-i"), metavar="FILE", help="the private key for ssh"),
    Value(names=("--fusion-threshold-mb",), kind=int, help="tensors are put together up to so many MiB; 0: never"),
    Value(names=("--cycle-time-ms",), kind=float, help="how long tensors wait for more to go with them (0)"),
    Value(names=("--cache-capacity",), kind=int, help="how many operations are remembered once agreed (1024)"),
    *(
        Switch(on=(f"--{name}",), off=(f"--no-{name}",), group=name, help=_ACCEPTED)
        for name in ("hierarchical-allreduce", "hierarchical-allgather", "torus-allreduce")
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
        help="elastic: with fewer workers the job waits for others (-np)",
    ),
    Value(
        names=("--max-num-proc", "--max-np"),
        kind=int,
        help="elastic: it takes no more workers than so many (all slots)",
    ),
    Value(names=("--slots-per-host",), kind=int, help="elastic: for discovered hosts that come without a number (1)"),
    Value(
        names=("--elastic-timeout",), kind=int, metavar="S", help="elastic: how long there may be too few workers (600)"
    ),
    Value(names=("--reset-limit",), kind=int, help="elastic: how often workers may come together again (no limit)"),
    Value(
        names=("--blacklist-cooldown-range",),
        kind=int,
        metavar="S",
        count=2,
        help="elastic: how long a host whose workers keep failing gets no new ones, at first and at most (for good)",
    ),
    Value(names=("--timeline-filename",), metavar="FILE", help="write a timeline for chrome://tracing"),
    Switch(
        on=("--timeline-mark-cycles",),
        off=("--no-timeline-mark-cycles",),
        group="timeline cycles",
        help="mark cycles in it",
    ),
    Switch(on=("--no-stall-check",), off=("--stall-check",), group="stall", help="do not look for what waits"),
    Value(
        names=("--stall-check-warning-time-seconds",),
        kind=int,
        metavar="S",
        help="say which ranks keep an operation waiting after so long (60)",
    ),
    Value(
        names=("--stall-check-shutdown-time-seconds",),
        kind=int,
        metavar="S",
        help="end a job in which an operation waits so long; 0: never (0)",
    ),
    Switch(on=("--mpi-threads-disable",), off=("--no-mpi-threads-disable",), group="mpi threads", help=_NO_MPI),
    Value(names=("--mpi-args",), metavar="ARGS", help=_NO_MPI),
    Switch(on=("--tcp",), help="NCCL does without InfiniBand"),
    Value(names=("--binding-args",), metavar="ARGS", help=_NO_MPI),
    Value(names=("--num-nccl-streams",), kind=int, help=_ACCEPTED),
    Value(names=("--thread-affinity",), kind=int, help=_ACCEPTED),
    Value(names=("--gloo-timeout-seconds",), kind=int, metavar="S", help="how long Gloo may take for an operation"),
    Value(names=("--log-level",), metavar="LEVEL", choices=LEVELS, help="HOROVOD_LOG_LEVEL"),
    Switch(
        on=("--log-with-timestamp", "--no-log-hide-timestamp"),
        off=("--log-without-timestamp", "--log-hide-timestamp"),
        group="timestamps",
        help="whether log messages have the time",
    ),
    Switch(
        on=("--prefix-output-with-timestamp", "-prefix-timestamp"),
        group="timestamps",
        help="put the time before each line of output",
    ),
    Value(names=("--hosts", "-H"), metavar="A:2,B:4", group="hosts", help="the hosts, with their slots; A is this one"),
    Value(names=("--hostfile", "-hostfile"), metavar="FILE", group="hosts", help="a host a line: `10.0.0.1 slots=4`"),
    Value(
        names=("--host-discovery-script",),
        metavar="FILE",
        group="hosts",
        help="elastic: a command that prints the hosts of the moment, as host:slots",
    ),
    Switch(on=("--gloo",), group="controller", help="as is always done"),
    Switch(on=("--mpi",), group="controller", help="accepted: Rankless starts the processes itself"),
    Switch(on=("--jsrun",), group="controller", help="accepted: Rankless starts the processes itself"),
)


class _TakeInterfaces(argparse.Action):
    """Adds names, which commas may part, to those given before."""

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
    """Declare the options. What nobody gives is None, or False for a switch that has no opposite."""
    groups: dict[str, argparse._MutuallyExclusiveGroup] = {}
    for option in OPTIONS:
        place: Any = parser
        if option.group:
            place = groups.setdefault(option.group, parser.add_mutually_exclusive_group())
        if isinstance(option, Switch):
            _add_switch(place, option)
        else:
            place.add_argument(
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
        help="the network cards by which the workers talk; may be given again",
    )
    parser.add_argument(
        "--mpi-launch-flag", action="append", default=[], metavar='"env A=1"', help="variables for the workers"
    )
    parser.usage = "%(prog)s [options] command [args]"
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="command [args]", help="what to run")


def take_flags(arguments: argparse.Namespace) -> HorovodrunFlags:
    """What was given."""
    values = vars(arguments)
    if values["command"][:1] == ["--"]:
        values["command"] = values["command"][1:]
    return msgspec.convert(values, HorovodrunFlags)


def _add_switch(place: Any, option: Switch) -> None:
    field = _field(option.on[0])
    default = None if option.off else False
    place.add_argument(*option.on, dest=field, action="store_const", const=True, default=default, help=option.help)
    if option.off:
        place.add_argument(*option.off, dest=field, action="store_const", const=False, default=default, help="not that")


def _field(name: str) -> str:
    return name.lstrip("-").replace("-", "_")
