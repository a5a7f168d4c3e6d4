"""Check every host pair: whether one reaches the other, on which ports, at which address, and how fast."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from rankless.launch.doctor.probe_protocol import (
    ConnectionAttempts,
    ConnectToTargets,
    HostReport,
    ListenersOpened,
    MeasureLink,
    OpenListeners,
    ProbeFailed,
    ProbeRequest,
)
from rankless.launch.doctor.remote_probes import HostProbes
from rankless.launch.rendezvous.connect_and_measure import SECRET_BYTES
from rankless.records.doctor_records import CheckResult, make_failure, make_pass, make_warning, with_place
from rankless.records.host_connection_tests import ConnectionAttempt, ConnectionTarget, LinkSpeed
from rankless.records.number_formatting import format_bit_rate, format_bytes, format_seconds

SLOW_ROUND_TRIP_SECONDS = 0.01
SLOW_BYTES_PER_SECOND = 50e6
_CONNECTION, _SPEED = "connection", "speed"


@dataclass(frozen=True)
class PairCheckContext:
    """What the pair checks know about the hosts."""

    names: Sequence[str]
    port: int
    reports: Mapping[int, HostReport]

    def address(self, index: int) -> str:
        """Return the address that the host's workers announce to the others, or its name if the address is unknown."""
        return self.reports[index].address or self.names[index]

    def container(self, *indices: int) -> str | None:
        """Return the kind of container of the first of these hosts that is one."""
        return next((kind for index in indices if (kind := self.reports[index].container) is not None), None)

    def format_pair(self, source: int, destination: int) -> str:
        """Format a pair as "a → b"."""
        return f"{self.names[source]} → {self.names[destination]}"


class HostPairs:
    """All ordered pairs of the hosts that respond."""

    def __init__(self, probes: HostProbes, network: PairCheckContext) -> None:
        self._probes = probes
        self._network = network
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._reached_targets: dict[tuple[int, int], ConnectionTarget] = {}
        self.all_reached = False
        self.address_of_first: str | None = None
        """The address at which another host reached host 0."""

    def check_connections(self) -> list[CheckResult]:
        """Check that every host reaches every other on a free port, and host 0 also on the job's port."""
        network = self._network
        free_port_targets, control_target = self._listen()
        attempts = self._attempt_connections(free_port_targets, control_target)
        results: list[CheckResult] = []
        for source, destination in permutations(free_port_targets, 2):
            pair = network.format_pair(source, destination)
            found = [each for each in attempts.get(source, ()) if each.target == free_port_targets[destination]]
            results += with_place([_make_connection_result(found, network, source, destination)], pair)
            reached = next((each for each in found if each.outcome == "reached"), None)
            if reached is not None:
                self._reached_targets[source, destination] = ConnectionTarget(
                    host_index=destination, address=reached.address, port=reached.target.port
                )
            if destination == 0 and reached is not None and self.address_of_first is None:
                self.address_of_first = reached.address
            if destination == 0 and control_target is not None:
                found = [each for each in attempts.get(source, ()) if each.target == control_target]
                results += with_place([_make_control_port_result(found, network, reached is not None, source)], pair)
        self.all_reached = len(self._reached_targets) == len(network.names) * (len(network.names) - 1)
        return results

    def measure_speeds(self) -> list[CheckResult]:
        """Measure the link of every pair that is connected."""
        results: list[CheckResult] = []
        for round_pairs in schedule_rounds(sorted({index for pair in self._reached_targets for index in pair})):
            requests: dict[int, ProbeRequest] = {
                source: MeasureLink(target=self._reached_targets[source, destination], secret=self._secret)
                for source, destination in round_pairs
                if (source, destination) in self._reached_targets
            }
            destinations = dict(round_pairs)
            for source, found in self._probes.request(requests).items():
                assert isinstance(found, LinkSpeed | ProbeFailed)
                results += with_place(
                    [_make_speed_result(found)], self._network.format_pair(source, destinations[source])
                )
        return results

    def _listen(self) -> tuple[dict[int, ConnectionTarget], ConnectionTarget | None]:
        """Return where each host listens on a free port, and where host 0 listens on the job's port, if it can."""
        network = self._network
        requests: dict[int, ProbeRequest] = {
            index: OpenListeners(
                host_index=index,
                secret=self._secret,
                port=None if index else network.port,
                address=network.address(index),
            )
            for index in self._probes.ready.keys() & network.reports.keys()
        }
        listening = {
            index: found
            for index, found in self._probes.request(requests).items()
            if isinstance(found, ListenersOpened)
        }
        free_port_targets = {
            index: ConnectionTarget(host_index=index, address=network.address(index), port=found.high_port)
            for index, found in listening.items()
        }
        # If the job's port is taken on host 0, that host's own check reports why.
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
        return {index: found.attempts for index, found in answers.items() if isinstance(found, ConnectionAttempts)}


def _make_connection_result(
    found: Sequence[ConnectionAttempt], network: PairCheckContext, source: int, destination: int
) -> CheckResult:
    reached = next((each for each in found if each.outcome == "reached"), None)
    if reached is not None:
        return make_pass(_CONNECTION, f"reached at {reached.address}, port {reached.target.port}")
    if not found:
        return make_failure(_CONNECTION, "not tried: the probe failed", "run rankless doctor again")
    return make_failure(_CONNECTION, *_explain_failure(found[0], network, source, destination))


def _make_control_port_result(
    found: Sequence[ConnectionAttempt], network: PairCheckContext, is_reached: bool, source: int
) -> CheckResult:
    check_name, name = f"port {network.port}", network.names[0]
    failures = [each for each in found if each.outcome != "reached"]
    if found and not failures:
        return make_pass(check_name, "reached, for the rendezvous of the agents")
    if not found:
        return make_failure(check_name, "not tried: the probe failed", "run rankless doctor again")
    if len(failures) < len(found):
        lost = ", ".join(f"{each.address} ({_describe_outcome(each)})" for each in failures)
        fix = f"remove {failures[0].address} from the addresses of {name} there, or list {name} by its address"
        seen = f"reached, but {name} also resolves to {lost} there: each start may wait for that address"
        return make_warning(check_name, seen, fix)
    seen, fix = _explain_failure(failures[0], network, source, 0)
    if is_reached and failures[0].outcome in ("dropped", "refused"):  # only this port is blocked
        fix = f"open TCP port {network.port} on {name}, or choose another with --port"
        if network.container(0) is not None:
            fix += f"; start a container with --net=host, or with -p {network.port}:{network.port}"
    return make_failure(check_name, seen, fix)


def _explain_failure(
    attempt: ConnectionAttempt, network: PairCheckContext, source: int, destination: int
) -> tuple[str, str]:
    """Return what was seen, and the fix."""
    here, there, port = network.names[source], network.names[destination], attempt.target.port
    at = f"{attempt.address}:{port}"
    if attempt.outcome == "no name":
        fix = f"add {there} to /etc/hosts on {here}, or list the hosts by address"
        return f"the name {there} does not resolve on {here}", fix
    if attempt.outcome == "another":
        fix = f"list {there} by an address that is unique on all hosts; check what {attempt.address} is on {here}"
        return f"{at} is another machine, or {here} itself", fix
    if attempt.outcome == "no route":
        return f"no route to {at}: {attempt.text}", f"check `ip route` on {here}, and the cable and network of {there}"
    both = " and ".join(sorted((here, there)))
    fix = f"open all TCP ports between {both}: besides {network.port}, workers use random free ports"
    container = network.container(destination, source)
    if container is not None:
        fix += f"; start the container ({container}) with --net=host: published ports (-p) are not enough"
    if attempt.outcome == "dropped":
        return f"no answer from {at}: a firewall drops packets, or a container does not publish the port", fix
    if attempt.outcome == "refused":
        seen = f"{at} refuses although the probe listens: a firewall rejects it, or a container's host has that address"
        return seen, fix
    return f"{at}: {attempt.text}", fix


def _describe_outcome(attempt: ConnectionAttempt) -> str:
    return "no answer" if attempt.outcome == "dropped" else attempt.text or attempt.outcome


def _make_speed_result(found: LinkSpeed | ProbeFailed) -> CheckResult:
    if isinstance(found, ProbeFailed) or not found.round_trip_seconds:
        text = found.text if isinstance(found, ProbeFailed) else found.error
        return make_warning(_SPEED, f"could not be measured: {text}", "run rankless doctor again")
    round_trip = f"{format_seconds(found.round_trip_seconds)} round trip"
    if found.error:
        fix = "set the same MTU on both network cards and on all tunnels between them"
        return make_failure(_SPEED, f"{round_trip}; {found.error}", fix)
    seen = f"{round_trip}, {format_bit_rate(found.bytes_per_second)} ({format_bytes(found.bytes_per_second)}/s)"
    if found.round_trip_seconds > SLOW_ROUND_TRIP_SECONDS or found.bytes_per_second < SLOW_BYTES_PER_SECOND:
        fix = "check the network card, its speed (ethtool) and its other traffic: gradients would wait for this link"
        return make_warning(_SPEED, seen, fix)
    return make_pass(_SPEED, seen)


def schedule_rounds(indices: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return all ordered pairs in rounds, with each host at most once per round: measurements must not share a card.

    This is the circle method for round-robin tournaments.
    """
    slots: list[int | None] = [*indices] if len(indices) % 2 == 0 else [*indices, None]
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
