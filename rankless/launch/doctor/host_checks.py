"""All that the doctor sees from inside one host."""

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import psutil  # type: ignore[import-untyped]  # it has no stubs

from rankless.config.hosts import own_addresses
from rankless.config.run_config import Program
from rankless.launch.doctor import gpu_checks, machine_checks, network_checks
from rankless.launch.doctor.probe_protocol import Look, Looked
from rankless.launch.rendezvous.host_facts import own_facts
from rankless.records.check_results import Row, warned

Check = Callable[[], Row | list[Row]]
NO_PROGRAM = Program(kind="code", target="")


def look_around(look: Look) -> Looked:
    """Every check of this host."""
    card = network_checks.own_card(look)
    return Looked(
        rows=tuple(made([*_network(look), *_port(look), *_machine(look), *_devices(look)])),
        facts=own_facts(NO_PROGRAM, hosts=(), devices=()),
        container=machine_checks.container(),
        interface=None if card is None else card[0],
        address=None if card is None else card[1],
    )


def look_quickly(look: Look) -> list[Row]:
    """What can be seen in a fraction of a second, before a job on several hosts."""
    # Not the port: the agent that is to listen finds it taken itself, and says by whom.
    quick: list[Check] = [
        *_network(look),
        machine_checks.shared_memory,
        machine_checks.open_files,
        machine_checks.processes,
    ]
    return made([*quick, partial(machine_checks.disk, look)])


def made(checks: Sequence[Check]) -> list[Row]:
    """The rows of all checks; one that the system does not let look is a warning."""
    rows: list[Row] = []
    for check in checks:
        try:
            found = check()
        except (OSError, psutil.Error) as error:
            name = getattr(check, "func", check).__name__.replace("_", " ")
            found = warned(name, f"could not be looked at: {error}", "see whether this user may look there")
        rows += found if isinstance(found, list) else [found]
    return rows


def _network(look: Look) -> list[Check]:
    return [
        partial(check, look) for check in (network_checks.own_name, network_checks.network_card, network_checks.proxies)
    ]


def _port(look: Look) -> list[Check]:
    return [partial(network_checks.free_port, look)] if look.is_first else []


def _machine(look: Look) -> list[Check]:
    own = [partial(check, look) for check in (machine_checks.memory, machine_checks.cores, machine_checks.disk)]
    limits = [
        machine_checks.shared_memory,
        machine_checks.open_files,
        machine_checks.processes,
        machine_checks.locked_memory,
    ]
    return [machine_checks.surroundings, *own, *limits, machine_checks.mpi]


def _devices(look: Look) -> list[Check]:
    return [partial(gpu_checks.gpus, look)]


def identity() -> str:
    """The same for two names of one host only: the running kernel, and the network that it gives us."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.stat('/proc/self/ns/net').st_ino}"
    return f"{socket.gethostname()} {sorted(own_addresses())}"
