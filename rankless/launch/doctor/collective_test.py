"""A collective of all hosts, really run: a process on each imports torch and sums tensors with the others by Gloo."""

from collections.abc import Mapping

import msgspec

from rankless.config.collective_test import AreYouThere, Here, OpenStore, Reduce, Reduced, StoreOpened, TrialTask
from rankless.launch.doctor.probe_protocol import ProbeFailed, ProbeResponse, RelayTask, StartCollectiveProcess
from rankless.launch.doctor.remote_probes import HostProbes
from rankless.records.check_results import CheckResult, make_failure, make_pass, with_place
from rankless.records.quantities import format_bytes, format_seconds

JOIN_TIMEOUT_SECONDS = 10.0
IMPORT_TIMEOUT_SECONDS = 30.0
CHECK_NAME = "all_reduce"


def start_collective_processes(probes: HostProbes) -> None:
    """Let every host's process import torch, while other things are looked at."""
    probes.request({host_index: StartCollectiveProcess() for host_index in probes.ready})


def run_collective_test(
    probes: HostProbes, names: list[str], *, address: str, interfaces: Mapping[int, str]
) -> list[CheckResult]:
    """The row of the hosts' sums; or of those whose process could not take part."""
    # Whose torch is slow to import would keep the others waiting beyond their patience.
    responses = probes.request(
        {host_index: _make_relay_task(AreYouThere()) for host_index in probes.ready}, IMPORT_TIMEOUT_SECONDS
    )
    failures = {host_index: found for host_index, found in responses.items() if not isinstance(found, Here)}
    if failures:
        return _results(failures, names)
    (store,) = probes.request({0: _make_relay_task(OpenStore(address=address))}, IMPORT_TIMEOUT_SECONDS).values()
    if not isinstance(store, StoreOpened):
        return _results({0: store}, names)
    tasks = {
        host_index: _make_relay_task(
            Reduce(
                address=address,
                port=store.port,
                rank=host_index,
                size=len(names),
                interface=interfaces[host_index],
                timeout_seconds=JOIN_TIMEOUT_SECONDS,
            )
        )
        for host_index in probes.ready
    }
    sums = probes.request(tasks, IMPORT_TIMEOUT_SECONDS)
    incomplete = {host_index: found for host_index, found in sums.items() if not isinstance(found, Reduced)}
    if incomplete:
        return _results(incomplete, names)
    reduced = [found for found in sums.values() if isinstance(found, Reduced)]
    slowest = {size: max(each.seconds[size] for each in reduced) for size in reduced[0].seconds}
    times = ", ".join(f"{format_bytes(size)} in {format_seconds(seconds)}" for size, seconds in slowest.items())
    cards = ", ".join(dict.fromkeys(interfaces[host_index] for host_index in sorted(probes.ready)))
    join_seconds = max(each.join_seconds for each in reduced)
    return with_place(
        [make_pass(CHECK_NAME, f"{times} by Gloo over {cards}; met in {format_seconds(join_seconds)}")], "all hosts"
    )


def _make_relay_task(task: TrialTask) -> RelayTask:
    return RelayTask(line=msgspec.json.encode(task), timeout_seconds=IMPORT_TIMEOUT_SECONDS - 1)


def _results(failures: Mapping[int, ProbeResponse], names: list[str]) -> list[CheckResult]:
    return [
        result for host_index, found in failures.items() for result in with_place([_failure(found)], names[host_index])
    ]


def _failure(found: ProbeResponse) -> CheckResult:
    text = _describe_failure(found)
    fix = "name the card by hand on every host: export GLOO_SOCKET_IFNAME=…; see the rows of the connections"
    if "No module named" in text:
        fix = "install the same packages there as here"
    return make_failure(CHECK_NAME, text, fix)


def _describe_failure(found: ProbeResponse) -> str:
    return found.text if isinstance(found, ProbeFailed) else f"an answer that does not fit: {type(found).__name__}"
