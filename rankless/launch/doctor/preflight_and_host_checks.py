"""Run the checks of one host, from inside: all of them for the doctor, the quick ones before a job on several hosts."""

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import psutil  # type: ignore[import-untyped]  # it has no stubs

from rankless.config.hosts_and_addresses import own_addresses
from rankless.config.run_config import Program, RunConfig
from rankless.errors import JoinError
from rankless.launch.doctor import local_network_checks, machine_checks
from rankless.launch.doctor.probe_protocol import CheckHost, HostReport
from rankless.launch.rendezvous.host_consistency import collect_host_facts
from rankless.records.doctor_records import CheckResult, make_warning

Check = Callable[[], CheckResult | list[CheckResult]]
NO_PROGRAM = Program(kind="code", target="")


def check_host(request: CheckHost) -> HostReport:
    """Run every check of this host."""
    card = local_network_checks.find_own_card(request)
    # Only host 0 listens on the job's port.
    port = [partial(local_network_checks.check_free_port, request)] if request.is_first else []
    return HostReport(
        results=tuple(run_checks([*_network_checks(request), *port, *_machine_checks(request)])),
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
        partial(local_network_checks.check_own_name, request),
        partial(local_network_checks.check_network_card, request),
        partial(local_network_checks.check_proxies, request),
    ]


def _machine_checks(request: CheckHost) -> list[Check]:
    return [
        machine_checks.check_container,
        machine_checks.check_torch,
        partial(machine_checks.check_backend, request),
        partial(machine_checks.check_memory, request),
        partial(machine_checks.check_cores, request),
        partial(machine_checks.check_disk, request),
        machine_checks.check_shared_memory,
        machine_checks.check_open_files,
        machine_checks.check_processes,
        machine_checks.check_locked_memory,
        machine_checks.check_mpi,
        partial(machine_checks.check_gpus, request),
    ]


def read_host_identity() -> str:
    """Return an identity that is equal for two names of one host: the kernel's boot ID and the network namespace."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.stat('/proc/self/ns/net').st_ino}"
    return f"{socket.gethostname()} {sorted(own_addresses())}"


def run_preflight(config: RunConfig, warn: Callable[[str], None]) -> None:
    """Check this host before a job on several hosts.

    Args:
        config: The job's configuration; its `cluster` is set.
        warn: Receives one line with all warnings.

    Raises:
        JoinError: If a check finds something that would make the job fail.
    """
    cluster = config.cluster
    assert cluster is not None
    # If the hosts are only counted, the address of host 0 is known, and only to the other hosts.
    known = cluster.hosts if cluster.is_listed else cluster.hosts[:1]
    if cluster.agent_start == "slurm":
        known = ()  # several tasks may share host 0, so that its name leads here
    results = check_host_quickly(
        CheckHost(
            name=cluster.hosts[cluster.host_index].address,
            others=tuple(host.address for place, host in enumerate(known) if place != cluster.host_index),
            is_first=cluster.host_index == 0,
            has_several=True,
            workers=config.worker_count,
            port=cluster.port,
            log_folder=config.request.log_folder,
        )
    )
    warnings = [f"{result.name}: {result.seen}" for result in results if result.status == "warn"]
    if warnings:
        warn(f"{'; '.join(warnings)} (rankless doctor shows the fix)")
    failures = [result for result in results if result.status == "fail"]
    if failures:
        raise JoinError(
            expected=f"{cluster.hosts[cluster.host_index]} to pass the checks for a job on several hosts",
            found="; ".join(f"{result.name}: {result.seen}" for result in failures),
            fix="; ".join(result.fix for result in failures) + " (rankless doctor checks more)",
        )
