"""Run a collective on all hosts: a process on each imports torch and sums tensors with the others through Gloo."""

from collections.abc import Mapping

from rankless.launch.doctor.probe_protocol import ProbeFailed, ProbeResponse, RelayTask, StartCollectiveProcess
from rankless.launch.doctor.remote_probes import HostProbes
from rankless.records.check_results import CheckResult, make_failure, make_pass, with_place
from rankless.records.collective_test_messages import (
    AllReduceResult,
    CheckTorch,
    CollectiveTestTask,
    RunAllReduce,
    ServeStore,
    StoreServedMessage,
    TorchImported,
)
from rankless.records.encoding import encode_json
from rankless.records.quantities import format_bytes, format_seconds

JOIN_TIMEOUT_SECONDS = 10.0
IMPORT_TIMEOUT_SECONDS = 30.0
CHECK_NAME = "all_reduce"


def start_collective_processes(probes: HostProbes) -> None:
    """Let a process on every host import torch while other checks run."""
    probes.request({index: StartCollectiveProcess() for index in probes.ready})


def run_collective_test(
    probes: HostProbes, names: list[str], *, address: str, interfaces: Mapping[int, str]
) -> list[CheckResult]:
    """Return the result of the sums on all hosts, or a failure for each host whose process could not take part."""
    # A process that still imports torch would make the rendezvous of the others time out.
    responses = probes.request(
        {index: _make_relay_task(CheckTorch()) for index in probes.ready}, IMPORT_TIMEOUT_SECONDS
    )
    failures = {index: found for index, found in responses.items() if not isinstance(found, TorchImported)}
    if failures:
        return _results(failures, names)
    (store,) = probes.request({0: _make_relay_task(ServeStore(address=address))}, IMPORT_TIMEOUT_SECONDS).values()
    if not isinstance(store, StoreServedMessage):
        return _results({0: store}, names)
    tasks = {
        index: _make_relay_task(
            RunAllReduce(
                address=address,
                port=store.port,
                rank=index,
                size=len(names),
                interface=interfaces[index],
                timeout_seconds=JOIN_TIMEOUT_SECONDS,
            )
        )
        for index in probes.ready
    }
    sums = probes.request(tasks, IMPORT_TIMEOUT_SECONDS)
    incomplete = {index: found for index, found in sums.items() if not isinstance(found, AllReduceResult)}
    if incomplete:
        return _results(incomplete, names)
    reduced = [found for found in sums.values() if isinstance(found, AllReduceResult)]
    slowest = {size: max(each.seconds[size] for each in reduced) for size in reduced[0].seconds}
    times = ", ".join(f"{format_bytes(size)} in {format_seconds(seconds)}" for size, seconds in slowest.items())
    cards = ", ".join(dict.fromkeys(interfaces[index] for index in sorted(probes.ready)))
    join_seconds = max(each.join_seconds for each in reduced)
    return with_place(
        [make_pass(CHECK_NAME, f"{times} by Gloo over {cards}; rendezvous in {format_seconds(join_seconds)}")],
        "all hosts",
    )


def _make_relay_task(task: CollectiveTestTask) -> RelayTask:
    return RelayTask(line=encode_json(task), timeout_seconds=IMPORT_TIMEOUT_SECONDS - 1)


def _results(failures: Mapping[int, ProbeResponse], names: list[str]) -> list[CheckResult]:
    return [result for index, found in failures.items() for result in with_place([_failure(found)], names[index])]


def _failure(found: ProbeResponse) -> CheckResult:
    text = _describe_failure(found)
    fix = "set the network card on every host with export GLOO_SOCKET_IFNAME=…; see also the connection checks"
    if "No module named" in text:
        fix = "install the same packages on that host as here"
    return make_failure(CHECK_NAME, text, fix)


def _describe_failure(found: ProbeResponse) -> str:
    return found.text if isinstance(found, ProbeFailed) else f"unexpected response: {type(found).__name__}"
