"""The environment variables of Horovod's own launcher, and of those that act like it (Ray's, Spark's)."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rankless.config import environment
from rankless.errors import JoinError
from rankless.records.elastic_driver_protocol import RankAssignment

ADDRESS = "GLOO_RENDEZVOUS_ADDR"
PORT = "GLOO_RENDEZVOUS_PORT"
START_SECONDS = 600.0
LAST_PORT = 65535
PREFIX = "HOROVOD_"


def horovod_variables() -> dict[str, str]:
    """Return Horovod's variables of this process, without the `HOROVOD_` prefix."""
    return environment.variables_without_prefix(PREFIX)


class HorovodWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A process that another launcher has started with Horovod's variables."""

    rank: int
    world_size: int
    address: str
    """The address of the launcher's HTTP key-value server."""
    port: int
    assignment: RankAssignment | None = None
    """None if the launcher has not set all of its variables."""
    interface: str | None = None
    """The network interface for traffic between ranks, if the launcher names one."""
    timeout_seconds: float = START_SECONDS
    """How long the rendezvous of the ranks may take."""

    def join(self, notify: Callable[[str], None]) -> Any:
        """Wait for the other ranks, and return the `RendezvousInfo` of this process. Raises `JoinError`."""
        # Imported here: this module does not import torch.
        return importlib.import_module("rankless.extensions.horovod.launched_rendezvous").join(self, notify)


def read_worker(environment_variables: Mapping[str, str]) -> HorovodWorker:
    """Return what Horovod's variables contain, of an environment that names the launcher's server.

    Raises `JoinError` for invalid values, and for a worker of an elastic job.
    """
    variables = {
        name.removeprefix(PREFIX): value for name, value in environment_variables.items() if name.startswith(PREFIX)
    }
    address = variables[ADDRESS]
    _refuse_elastic(variables)
    numbers = {name: _whole_number(name, variables) for name in ("RANK", "SIZE", PORT)}
    rank, size, port = numbers.values()
    if not rank < size:
        raise _unreadable("RANK", f"a rank below HOROVOD_SIZE={size}", variables)
    if not 0 < port <= LAST_PORT:
        raise _unreadable(PORT, f"a port from 1 to {LAST_PORT}", variables)
    return HorovodWorker(
        rank=rank,
        world_size=size,
        address=address,
        port=port,
        assignment=read_rank_assignment(variables),
        interface=variables.get("GLOO_IFACE") or None,
        timeout_seconds=_seconds(variables.get("START_TIMEOUT", "")),
    )


def _refuse_elastic(variables: Mapping[str, str]) -> None:
    if variables.get("ELASTIC", "0") not in ("", "0"):
        raise JoinError(
            expected="a worker of `rankless horovodrun`, which gives elastic jobs their rounds",
            found="HOROVOD_ELASTIC=1 and a server at HOROVOD_GLOO_RENDEZVOUS_ADDR: an elastic job of another launcher",
            fix="start it by `rankless horovodrun --min-np …`, with the same options; "
            "or by the other launcher without --min-np and --host-discovery-script",
        )


def read_rank_assignment(variables: Mapping[str, str]) -> RankAssignment | None:
    """Return the ranks and sizes in the variables; None unless all are set. Raises `JoinError` for an invalid one."""
    names = [name.upper() for name in RankAssignment.__struct_fields__]
    if not all(name in variables for name in names):
        return None
    return RankAssignment(**{name.lower(): _whole_number(name, variables) for name in names})


def rank_variables(assignment: RankAssignment) -> dict[str, str]:
    """Return the variables, with the `HOROVOD_` prefix, that contain these ranks and sizes."""
    return {f"HOROVOD_{name.upper()}": str(getattr(assignment, name)) for name in RankAssignment.__struct_fields__}


def _whole_number(name: str, variables: Mapping[str, str]) -> int:
    value = variables.get(name, "")
    if not (value.isascii() and value.isdigit()):
        raise _unreadable(name, "a number, as horovodrun sets it", variables)
    return int(value)


def _unreadable(name: str, expected: str, variables: Mapping[str, str]) -> JoinError:
    found = repr(variables[name]) if name in variables else "nothing"
    return JoinError(
        expected=f"in HOROVOD_{name} {expected}",
        found=found,
        fix=f"start the processes by one launcher; or unset HOROVOD_{ADDRESS}, if none has started this one",
    )


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return START_SECONDS
