"""Every host to every other: is it reached, on which ports, by which of its addresses, and how fast."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from rankless.launch.doctor.link_test import SECRET_BYTES
from rankless.launch.doctor.probe_protocol import (
    ConnectionAttempt,
    ConnectionAttempts,
    ConnectionTarget,
    ConnectToTargets,
    HostReport,
    LinkSpeed,
    ListenersOpened,
    MeasureLink,
    OpenListeners,
    ProbeFailed,
    ProbeRequest,
)
from rankless.launch.doctor.remote_probes import HostProbes
from rankless.records.check_results import CheckResult, make_failure, make_pass, make_warning, with_place
from rankless.records.quantities import format_bit_rate, format_bytes, format_seconds

SLOW_ROUND_TRIP_SECONDS = 0.01
SLOW_BYTES_PER_SECOND = 50e6
_CONNECTION, _SPEED = "connection", "speed"


@dataclass(frozen=True)
class HostNetwork:
    """The hosts of one examination as the pairs see them."""

    names: Sequence[str]
    port: int
    reports: Mapping[int, HostReport]

    def address(self, host_index: int) -> str:
        """What the host's workers would tell the others; its name where that is not known."""
        return self.reports[host_index].address or self.names[host_index]

    def container(self, *host_indices: int) -> str | None:
        """The kind of container of the first that is one."""
        return next(
            (kind for host_index in host_indices if (kind := self.reports[host_index].container) is not None), None
        )

    def format_pair(self, source: int, destination: int) -> str:
        """As "a → b"."""
        return f"{self.names[source]} → {self.names[destination]}"


class HostPairs:
    """All ordered pairs of the hosts that are open."""

    def __init__(self, probes: HostProbes, network: HostNetwork) -> None:
        self._probes = probes
        self._hosts = network
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._reached_targets: dict[tuple[int, int], ConnectionTarget] = {}
        self.all_reached = False
        self.address_of_first: str | None = None
        """Host 0's, as another host has reached it."""

    def check_connections(self) -> list[CheckResult]:
        """Whether each is reached, on a free port and, host 0, on the job's."""
        network = self._hosts
        free_port_targets, control_target = self._listen()
        attempts = self._attempt_connections(free_port_targets, control_target)
        results: list[CheckResult] = []
        for source, destination in permutations(free_port_targets, 2):
            format_pair = network.format_pair(source, destination)
            found = [each for each in attempts.get(source, ()) if each.target == free_port_targets[destination]]
            results += with_place([_make_connection_result(found, network, source, destination)], format_pair)
            reached = next((each for each in found if each.outcome == "reached"), None)
            if reached is not None:
                self._reached_targets[source, destination] = ConnectionTarget(
                    host_index=destination, address=reached.address, port=reached.target.port
                )
            if destination == 0 and reached is not None and self.address_of_first is None:
                self.address_of_first = reached.address
            if destination == 0 and control_target is not None:
                found = [each for each in attempts.get(source, ()) if each.target == control_target]
                results += with_place(
                    [_make_control_port_result(found, network, reached is not None, source)], format_pair
                )
        self.all_reached = len(self._reached_targets) == len(network.names) * (len(network.names) - 1)
        return results

    def measure_speeds(self) -> list[CheckResult]:
        """How fast the ways are, where there is one."""
        results: list[CheckResult] = []
        for round_pairs in schedule_rounds(
            sorted({host_index for format_pair in self._reached_targets for host_index in format_pair})
        ):
            requests: dict[int, ProbeRequest] = {
                source: MeasureLink(target=self._reached_targets[source, destination], secret=self._secret)
                for source, destination in round_pairs
                if (source, destination) in self._reached_targets
            }
            destinations = dict(round_pairs)
            for source, found in self._probes.request(requests).items():
                assert isinstance(found, LinkSpeed | ProbeFailed)
                results += with_place(
                    [_make_speed_result(found)], self._hosts.format_pair(source, destinations[source])
                )
        return results

    def _listen(self) -> tuple[dict[int, ConnectionTarget], ConnectionTarget | None]:
        """Where each host listens for this, and host 0 for the others' agents, if it can."""
        network = self._hosts
        requests: dict[int, ProbeRequest] = {
            host_index: OpenListeners(
                host_index=host_index,
                secret=self._secret,
                port=None if host_index else network.port,
                address=network.address(host_index),
            )
            for host_index in self._probes.ready.keys() & network.reports.keys()
        }
        listening = {
            host_index: found
            for host_index, found in self._probes.request(requests).items()
            if isinstance(found, ListenersOpened)
        }
        free_port_targets = {
            host_index: ConnectionTarget(
                host_index=host_index, address=network.address(host_index), port=found.high_port
            )
            for host_index, found in listening.items()
        }
        # Where host 0 cannot have the port, its own row says why.
        if 0 in listening and listening[0].has_port:
            return free_port_targets, ConnectionTarget(host_index=0, address=network.names[0], port=network.port)
        return free_port_targets, None

    def _attempt_connections(
        self, free_port_targets: Mapping[int, ConnectionTarget], control_target: ConnectionTarget | None
    ) -> dict[int, tuple[ConnectionAttempt, ...]]:
        requests: dict[int, ProbeRequest] = {}
        for source in free_port_targets:
            targets = [target for destination, target in free_port_targets.items() if destination != source]
            if source and control_target is not None:
                targets.append(control_target)
            requests[source] = ConnectToTargets(targets=tuple(targets), secret=self._secret)
        answers = self._probes.request(requests)
        return {
            host_index: found.attempts for host_index, found in answers.items() if isinstance(found, ConnectionAttempts)
        }


def _make_connection_result(
    found: Sequence[ConnectionAttempt], network: HostNetwork, source: int, destination: int
) -> CheckResult:
    reached = next((each for each in found if each.outcome == "reached"), None)
    if reached is not None:
        return make_pass(_CONNECTION, f"reached at {reached.address}, port {reached.target.port}")
    if not found:
        return make_failure(_CONNECTION, "not tried: the program has failed", "run rankless doctor again")
    return make_failure(_CONNECTION, *_explain_failure(found[0], network, source, destination))


def _make_control_port_result(
    found: Sequence[ConnectionAttempt], network: HostNetwork, is_reached: bool, source: int
) -> CheckResult:
    check_name, name = f"port {network.port}", network.names[0]
    failures = [each for each in found if each.outcome != "reached"]
    if found and not failures:
        return make_pass(check_name, "reached, where the agents meet")
    if not found:
        return make_failure(check_name, "not tried: the program has failed", "run rankless doctor again")
    if len(failures) < len(found):
        lost = ", ".join(f"{each.address} ({_describe_outcome(each)})" for each in failures)
        fix = f"take {failures[0].address} out of the name {name} there, or list {name} by its address"
        return make_warning(check_name, f"reached, but {name} also means {lost} there: each start may wait for it", fix)
    seen, fix = _explain_failure(failures[0], network, source, 0)
    if is_reached and failures[0].outcome in ("dropped", "refused"):  # so it is this port alone
        fix = f"let TCP port {network.port} through to {name}, or choose another with --port"
        if network.container(0) is not None:
            fix += f"; in a container: --net=host, or -p {network.port}:{network.port}"
    return make_failure(check_name, seen, fix)


def _explain_failure(
    attempt: ConnectionAttempt, network: HostNetwork, source: int, destination: int
) -> tuple[str, str]:
    """What was seen, and the fix."""
    here, there, port = network.names[source], network.names[destination], attempt.target.port
    at = f"{attempt.address}:{port}"
    if attempt.outcome == "no name":
        fix = f"write {there} into /etc/hosts on {here}, or list the hosts by addresses"
        return f"the name {there} does not resolve on {here}", fix
    if attempt.outcome == "another":
        fix = f"list {there} by an address that is its own on every host; see what {attempt.address} is on {here}"
        return f"{at} is another machine, or {here} itself", fix
    if attempt.outcome == "no way":
        return f"no way leads to {at}: {attempt.text}", f"see `ip route` on {here}, and cable and network of {there}"
    both = " and ".join(sorted((here, there)))
    fix = f"let all TCP ports through between {both}: besides {network.port}, workers meet on ports that are free"
    container = network.container(destination, source)
    if container is not None:
        fix += f"; in a container ({container}): start it with --net=host, for single ports by -p are not enough"
    if attempt.outcome == "dropped":
        return f"no answer from {at}: a firewall drops packets, or the port is not mapped out of a container", fix
    if attempt.outcome == "refused":
        return f"{at} is refused, though its program listens: a firewall, or the address of a container's host", fix
    return f"{at}: {attempt.text}", fix


def _describe_outcome(attempt: ConnectionAttempt) -> str:
    return "no answer" if attempt.outcome == "dropped" else attempt.text or attempt.outcome


def _make_speed_result(found: LinkSpeed | ProbeFailed) -> CheckResult:
    if isinstance(found, ProbeFailed) or not found.round_trip_seconds:
        text = found.text if isinstance(found, ProbeFailed) else found.error
        return make_warning(_SPEED, f"could not be measured: {text}", "run rankless doctor again")
    trip = f"{format_seconds(found.round_trip_seconds)} there and back"
    if found.error:
        fix = "the largest packet differs on the way: set the same MTU on both cards, and on tunnels between them"
        return make_failure(_SPEED, f"{trip}; {found.error}", fix)
    seen = f"{trip}, {format_bit_rate(found.bytes_per_second)} ({format_bytes(found.bytes_per_second)}/s)"
    if found.round_trip_seconds > SLOW_ROUND_TRIP_SECONDS or found.bytes_per_second < SLOW_BYTES_PER_SECOND:
        fix = "gradients would wait for it: see which card leads there, its speed (ethtool), and who else uses it"
        return make_warning(_SPEED, seen, fix)
    return make_pass(_SPEED, seen)


def schedule_rounds(host_indices: Sequence[int]) -> list[list[tuple[int, int]]]:
    """All ordered pairs in turns, in each of which a host takes part once: measurements must not share a card."""
    slots: list[int | None] = [*host_indices] if len(host_indices) % 2 == 0 else [*host_indices, None]
    rounds = []
    for _ in range(len(slots) - 1):
        half = len(slots) // 2
        pairs = [
            (one, other)
            for one, other in zip(slots[:half], reversed(slots[half:]), strict=True)
            if one is not None and other is not None
        ]
        rounds += [pairs, [(other, one) for one, other in pairs]]
        slots = [slots[0], slots[-1], *slots[1:-1]]
    return rounds
