"""Run all checks, on one host or between several, in the order in which later checks depend on earlier ones."""

import contextlib
import secrets
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rankless.config.environment import carried_variables
from rankless.config.extensions import DoctorCheck, list_extensions
from rankless.config.hosts_and_addresses import Host, addresses_of, own_addresses
from rankless.launch.doctor.host_pairs import HostPairs, PairCheckContext
from rankless.launch.doctor.probe_protocol import (
    ApplyEnvironment,
    CheckExtension,
    CheckHost,
    ExtensionChecked,
    HostReport,
    ProbeFailed,
    ProbeRequest,
    ProbeResponse,
    RelayTask,
    StartCollectiveProcess,
)
from rankless.launch.doctor.remote_probes import HostProbes
from rankless.launch.rendezvous.host_consistency import MAX_CLOCK_SKEW_SECONDS, find_differences
from rankless.launch.rendezvous.tcp_connect_and_reachability import describe_reachability
from rankless.records.doctor_records import (
    AllReduceResult,
    CheckResult,
    CheckTorch,
    CollectiveTestTask,
    RunAllReduce,
    ServeStore,
    StoreServedMessage,
    TorchImported,
    make_failure,
    make_pass,
    make_warning,
    with_place,
)
from rankless.records.encoding import encode_json
from rankless.records.number_formatting import format_bytes, format_seconds
from rankless.runtime.subprocess_command import python_command

WARNING_SKEW_SECONDS = 1.0
"""A clock that differs by more is a warning."""


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """What to check."""

    hosts: tuple[Host, ...]
    """The hosts of the job; empty to check this host only."""
    workers: int = 1
    """Workers on this host, if `hosts` is empty."""
    port: int
    log_folder: str
    without_ssh: bool = False
    """Do not use ssh; check the other hosts only from outside."""
    quick: bool = False
    """Skip the checks that import torch, and those of extensions."""


@dataclass
class DoctorFindings:
    """The results so far, and the checks that were skipped, with the reason."""

    results: list[CheckResult] = field(default_factory=list)
    skipped_checks: list[str] = field(default_factory=list)


def run_diagnosis(config: DoctorConfig, report_progress: Callable[[str], None]) -> DoctorFindings:
    """Run all checks and return their results; call `report_progress` with the name of each phase."""
    findings = DoctorFindings()
    hosts = config.hosts or (Host(address="this host", workers=config.workers),)
    own_indices = [0]
    if config.hosts:
        own_indices = _find_own_indices(hosts)
        findings.results += _check_host_list(hosts, own_indices)
    own_index = own_indices[0] if own_indices else None
    skipped_indices = (
        [index for index in range(len(hosts)) if index != own_index] if config.without_ssh else own_indices[1:]
    )
    report_progress("connecting to the hosts" if len(hosts) > 1 else "checking this host")
    with HostProbes(hosts, own_index=own_index, skipped=skipped_indices) as probes:
        _Diagnosis(config, hosts, own_indices, probes, findings).run(report_progress)
    return findings


class _Diagnosis:
    """One run of all checks, while the probe servers run on the hosts."""

    def __init__(
        self,
        config: DoctorConfig,
        hosts: Sequence[Host],
        own_indices: Sequence[int],
        probes: HostProbes,
        findings: DoctorFindings,
    ) -> None:
        self._config = config
        self._hosts = hosts
        self._names = [host.address for host in hosts]
        self._own_indices = own_indices
        """The indices of this host in the list: normally one, several if the list names it repeatedly, none if not at
        all.
        """
        self._own_index = own_indices[0] if own_indices else None
        self._probes = probes
        self._results = findings.results
        self._skipped_checks = findings.skipped_checks
        self._reports: dict[int, HostReport] = {}

    def run(self, report_progress: Callable[[str], None]) -> None:
        with StartupTest(is_enabled=self._own_index is not None and not self._config.quick) as startup_test:
            self._connect()
            if not self._config.quick and len(self._hosts) > 1:
                # A process on every host imports torch while other checks run.
                self._probes.request({index: StartCollectiveProcess() for index in self._probes.ready})
            report_progress("checking each host")
            self._check_hosts()
            if not self._config.quick:
                for extension in list_extensions():
                    if extension.doctor_check is not None:
                        report_progress(extension.doctor_check.progress)
                        self._check_extension(extension.name, extension.doctor_check)
            pairs = None
            if len(self._hosts) > 1:
                self._compare_versions()
                self._compare_clocks()
                report_progress("testing the connections between the hosts")
                pairs = HostPairs(self._probes, PairCheckContext(self._names, self._config.port, self._reports))
                self._results += pairs.check_connections()
            if self._own_index is not None and not self._config.quick:
                report_progress("starting a test job")
                self._add(self._own_index, startup_test.result())
        if pairs is not None:  # after the test job, which would slow the links' measurement
            report_progress("measuring the links between the hosts")
            self._run_collective(pairs)
            self._results += pairs.measure_speeds()

    def _add(self, index: int, *results: CheckResult) -> None:
        """Take results of checks of a host."""
        self._results += with_place(results, self._names[index])

    def _connect(self) -> None:
        for index, result in self._probes.wait_until_ready().items():
            self._add(index, result)
            self._skipped_checks.append(f"{self._names[index]} itself, because its {result.name} check failed")
        self._drop_duplicate_hosts()
        for index, probe in self._probes.ready.items():
            if index != self._own_index:
                self._add(index, make_pass("ssh", f"in {format_seconds(probe.connect_seconds)}, without a password"))
        if self._config.without_ssh:
            for index, name in enumerate(self._names):
                if index not in self._own_indices:
                    self._add(index, _check_from_outside(name))
                    self._skipped_checks.append(f"{name} itself (--no-ssh): run the same command there too")

    def _drop_duplicate_hosts(self) -> None:
        """If two names mean one host, check the first only."""
        first: dict[str, int] = {}
        for index, probe in list(self._probes.ready.items()):
            original = first.setdefault(probe.identity, index)
            if original != index:
                self._add(original, _make_duplicate_host_result([self._hosts[original], self._hosts[index]]))
                self._probes.ready.pop(index)

    def _check_hosts(self) -> None:
        variables = carried_variables()
        self._probes.request(
            {index: ApplyEnvironment(environment=variables) for index in self._probes.ready if index != self._own_index}
        )
        requests: dict[int, ProbeRequest] = {
            index: CheckHost(
                name=self._names[index],
                others=tuple(self._names[other] for other in self._probes.ready if other != index),
                is_first=index == 0,
                has_several=len(self._hosts) > 1,
                workers=self._hosts[index].workers,
                port=self._config.port,
                log_folder=self._config.log_folder,
            )
            for index in self._probes.ready
        }
        for index, response in self._probes.request(requests).items():
            if isinstance(response, HostReport):
                self._reports[index] = response
                self._add(index, *response.results)
            else:
                self._add(index, _probe_failure("program", response))
                self._probes.ready.pop(index)

    def _check_extension(self, name: str, check: DoctorCheck) -> None:
        requests: dict[int, ProbeRequest] = {index: CheckExtension(extension=name) for index in self._probes.ready}
        for index, response in self._probes.request(requests, check.timeout_seconds + 30.0).items():
            if isinstance(response, ExtensionChecked):
                self._add(index, response.result)
            else:
                self._add(index, _probe_failure(check.name, response))

    def _compare_versions(self) -> None:
        """Compare every host's versions with the first host's."""
        if not self._reports:
            return
        first = min(self._reports)
        reference = self._reports[first].facts
        for index, report in self._reports.items():
            mismatches = find_differences(reference, report.facts, received_seconds=report.facts.time_seconds)
            results = [
                make_failure(
                    item.what.removeprefix("the "), f"{item.there}, but {self._names[first]} has {item.here}", item.fix
                )
                for item in mismatches
            ]
            versions = ", ".join(f"{name} {version}" for name, version in report.facts.versions.items())
            self._add(index, *(results or [make_pass("versions", versions)]))

    def _compare_clocks(self) -> None:
        others = [index for index in self._probes.ready if index != self._own_index]
        for index, found in self._probes.measure_clocks(others).items():
            if found is not None:
                self._add(index, _make_clock_result(skew=found[0], doubt=found[1]))

    def _run_collective(self, pairs: HostPairs) -> None:
        if self._config.quick:
            return
        interfaces = {index: found.interface for index, found in self._reports.items() if found.interface is not None}
        if pairs.all_reached and pairs.address_of_first is not None and len(interfaces) == len(self._hosts):
            self._results += run_collective_test(
                self._probes, self._names, address=pairs.address_of_first, interfaces=interfaces
            )
        else:
            self._skipped_checks.append("a collective of all hosts: fix the failures above first")


def _probe_failure(name: str, response: ProbeResponse) -> CheckResult:
    text = _describe_failure(response)
    return make_failure(name, f"the probe failed: {text}", "run rankless doctor on that host alone")


def _find_own_indices(hosts: Sequence[Host]) -> list[int]:
    own = own_addresses()
    return [index for index, host in enumerate(hosts) if addresses_of(host.address) & own]


def _check_host_list(hosts: Sequence[Host], own_indices: Sequence[int]) -> list[CheckResult]:
    """Check that the list names this host exactly once."""
    listed = ", ".join(map(str, hosts))
    if not own_indices:
        result = make_warning(
            "hosts", f"this host is not one of {listed}", "start jobs on a host of the list, which becomes host 0"
        )
        return with_place([result], "this host")
    if len(own_indices) > 1:
        return with_place(
            [_make_duplicate_host_result([hosts[index] for index in own_indices])], str(hosts[own_indices[0]])
        )
    return []


def _make_duplicate_host_result(hosts: Sequence[Host]) -> CheckResult:
    fix = f"list it once, with all its workers: {hosts[0]}:{sum(host.workers for host in hosts)}"
    return make_failure("hosts", f"{' and '.join(map(str, hosts))} are the same host", fix)


def _check_from_outside(name: str) -> CheckResult:
    """Check without ssh what is visible of a host from here."""
    seen = describe_reachability(name)
    if seen.startswith("it is up"):
        return make_pass("from here", "it is up")
    return make_failure("from here", seen, "check the name, whether the host is up, and whether a firewall blocks it")


def _make_clock_result(*, skew: float, doubt: float) -> CheckResult:
    seen = f"{format_seconds(abs(skew))} {'ahead of' if skew > 0 else 'behind'} this host's (± {format_seconds(doubt)})"
    fix = "synchronize the clocks with timedatectl set-ntp true, or with chrony"
    if abs(skew) - doubt > MAX_CLOCK_SKEW_SECONDS:
        return make_failure("clock", seen, fix)
    return make_warning("clock", seen, fix) if abs(skew) - doubt > WARNING_SKEW_SECONDS else make_pass("clock", seen)


SLOW_START_SECONDS = 15.0
TIMEOUT_SECONDS = 40.0
_START_CHECK = "start of a job"


class StartupTest:
    """The test job; leaving the context ends it and removes its files."""

    def __init__(self, *, is_enabled: bool) -> None:
        self._is_enabled = is_enabled
        self._marker = f"began {secrets.token_hex(4)} "
        self._files = contextlib.ExitStack()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "StartupTest":
        if not self._is_enabled:
            return self
        self._output = self._files.enter_context(tempfile.TemporaryFile())
        self._stderr_file = self._files.enter_context(tempfile.TemporaryFile())
        self._start = time.time()
        self._process = subprocess.Popen(
            [*python_command("rankless.launch.startup_test_job"), self._marker],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._stderr_file,
            start_new_session=True,  # Ctrl-C must reach the doctor only
        )
        return self

    def __exit__(self, *_error: object) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()  # its agent ends the workers
            self._process.wait()
        self._files.close()

    def result(self) -> CheckResult:
        """Wait for the job and return how long it took."""
        assert self._process is not None
        try:
            code = self._process.wait(max(0.0, self._start + TIMEOUT_SECONDS - time.time()))
        except subprocess.TimeoutExpired:
            return _start_failure(f"not finished within {TIMEOUT_SECONDS:g} s")
        self._output.seek(0)
        for line in self._output.read().decode(errors="replace").splitlines():
            if line.startswith(self._marker) and code == 0:
                seconds = float(line.removeprefix(self._marker)) - self._start
                seen = f"2 workers, {seconds:.1f} s to their first collective"
                fix = "check for a slow disk or a busy host; a second start is faster"
                return (
                    make_warning(_START_CHECK, seen, fix)
                    if seconds > SLOW_START_SECONDS
                    else make_pass(_START_CHECK, seen)
                )
        self._stderr_file.seek(0)
        lines = self._stderr_file.read().decode(errors="replace").strip().splitlines()
        return _start_failure(lines[-1] if lines else f"it ended with exit code {code}")


def _start_failure(text: str) -> CheckResult:
    return make_failure(_START_CHECK, f"2 workers: {text}", "run rankless run -n 2 -c 'import torch; print(1)'")


JOIN_TIMEOUT_SECONDS = 10.0
IMPORT_TIMEOUT_SECONDS = 30.0
_COLLECTIVE_CHECK = "all_reduce"


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
        [make_pass(_COLLECTIVE_CHECK, f"{times} by Gloo over {cards}; rendezvous in {format_seconds(join_seconds)}")],
        "all hosts",
    )


def _make_relay_task(task: CollectiveTestTask) -> RelayTask:
    return RelayTask(line=encode_json(task), timeout_seconds=IMPORT_TIMEOUT_SECONDS - 1)


def _results(failures: Mapping[int, ProbeResponse], names: list[str]) -> list[CheckResult]:
    return [
        result for index, found in failures.items() for result in with_place([_collective_failure(found)], names[index])
    ]


def _collective_failure(found: ProbeResponse) -> CheckResult:
    text = _describe_failure(found)
    fix = "set the network card on every host with export GLOO_SOCKET_IFNAME=…; see also the connection checks"
    if "No module named" in text:
        fix = "install the same packages on that host as here"
    return make_failure(_COLLECTIVE_CHECK, text, fix)


def _describe_failure(found: ProbeResponse) -> str:
    return found.text if isinstance(found, ProbeFailed) else f"unexpected response: {type(found).__name__}"
