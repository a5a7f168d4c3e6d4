"""Run all checks of one host, from inside."""

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import psutil  # type: ignore[import-untyped]  # it has no stubs

from rankless.config.hosts import own_addresses
from rankless.config.run_config import Program
from rankless.launch.doctor import gpu_checks, local_network_checks, machine_checks
from rankless.launch.doctor.probe_protocol import CheckHost, HostReport
from rankless.launch.rendezvous.host_facts import collect_host_facts
from rankless.records.check_results import CheckResult, make_warning

Check = Callable[[], CheckResult | list[CheckResult]]
NO_PROGRAM = Program(kind="code", target="")


def check_host(request: CheckHost) -> HostReport:
    """Run every check of this host."""
    card = local_network_checks.find_own_card(request)
    return HostReport(
        results=tuple(
            run_checks(
                [*_network_checks(request), *_port_checks(request), *_machine_checks(request), *_gpu_checks(request)]
            )
        ),
        facts=collect_host_facts(NO_PROGRAM, hosts=(), devices=()),
        container=machine_checks.detect_container(),
        interface=None if card is None else card[0],
        address=None if card is None else card[1],
    )


def check_host_quickly(request: CheckHost) -> list[CheckResult]:
    """Run the checks that take a fraction of a second, before a job on several hosts."""
    # Not the port: the agent that listens on it reports itself which process holds it.
    checks: list[Check] = [
        *_network_checks(request),
        machine_checks.check_shared_memory,
        machine_checks.check_open_files,
        machine_checks.check_processes,
    ]
    return run_checks([*checks, partial(machine_checks.check_disk, request)])


def run_checks(checks: Sequence[Check]) -> list[CheckResult]:
    """Run all checks; one that the system does not allow becomes a warning."""
    results: list[CheckResult] = []
    for check in checks:
        try:
            found = check()
        except (OSError, psutil.Error) as error:
            name = getattr(check, "func", check).__name__.removeprefix("check_").replace("_", " ")
            found = make_warning(name, f"could not be checked: {error}", "check the permissions of this user")
        results += found if isinstance(found, list) else [found]
    return results


def _network_checks(request: CheckHost) -> list[Check]:
    return [
        partial(check, request)
        for check in (
            local_network_checks.check_own_name,
            local_network_checks.check_network_card,
            local_network_checks.check_proxies,
        )
    ]


def _port_checks(request: CheckHost) -> list[Check]:
    return [partial(local_network_checks.check_free_port, request)] if request.is_first else []


def _machine_checks(request: CheckHost) -> list[Check]:
    own = [
        partial(check, request)
        for check in (
            machine_checks.check_backend,
            machine_checks.check_memory,
            machine_checks.check_cores,
            machine_checks.check_disk,
        )
    ]
    limits = [
        machine_checks.check_shared_memory,
        machine_checks.check_open_files,
        machine_checks.check_processes,
        machine_checks.check_locked_memory,
    ]
    return [machine_checks.check_container, machine_checks.check_torch, *own, *limits, machine_checks.check_mpi]


def _gpu_checks(request: CheckHost) -> list[Check]:
    return [partial(gpu_checks.check_gpus, request)]


def read_host_identity() -> str:
    """Return an identity that is equal for two names of one host: the kernel's boot ID and the network namespace."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.stat('/proc/self/ns/net').st_ino}"
    return f"{socket.gethostname()} {sorted(own_addresses())}"
