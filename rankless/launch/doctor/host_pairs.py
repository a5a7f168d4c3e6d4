"""Every host to every other: is it reached, on which ports, by which of its addresses, and how fast."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from rankless.launch.doctor.link_test import SECRET_BYTES
from rankless.launch.doctor.probe_protocol import (
    Attempt,
    Connect,
    Connected,
    Failed,
    Listen,
    Listening,
    Looked,
    Measure,
    Question,
    Speed,
    Target,
)
from rankless.launch.doctor.remote_probes import Visits
from rankless.records.check_results import Row, failed, passed, placed, warned
from rankless.records.quantities import bit_rate, sized, timed

SLOW_ROUND_TRIP_SECONDS = 0.01
SLOW_BYTES_PER_SECOND = 50e6
_REACH, _SPEED = "connection", "speed"


@dataclass(frozen=True)
class Network:
    """The hosts of one examination as the pairs see them."""

    names: Sequence[str]
    port: int
    looked: Mapping[int, Looked]

    def address(self, place: int) -> str:
        """What the host's workers would tell the others; its name where that is not known."""
        return self.looked[place].address or self.names[place]

    def container(self, *places: int) -> str | None:
        """The kind of container of the first that is one."""
        return next((kind for place in places if (kind := self.looked[place].container) is not None), None)

    def pair(self, origin: int, goal: int) -> str:
        """As "a → b"."""
        return f"{self.names[origin]} → {self.names[goal]}"


class Pairs:
    """All ordered pairs of the hosts that are open."""

    def __init__(self, visits: Visits, network: Network) -> None:
        self._visits = visits
        self._network = network
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._good: dict[tuple[int, int], Target] = {}
        self.all_reached = False
        self.address_of_first: str | None = None
        """Host 0's, as another host has reached it."""

    def connections(self) -> list[Row]:
        """Whether each is reached, on a free port and, host 0, on the job's."""
        network = self._network
        high, control = self._listen()
        attempts = self._tried(high, control)
        rows: list[Row] = []
        for origin, goal in permutations(high, 2):
            pair = network.pair(origin, goal)
            found = [each for each in attempts.get(origin, ()) if each.target == high[goal]]
            rows += placed([_reach_row(found, network, origin, goal)], pair)
            through = next((each for each in found if each.outcome == "reached"), None)
            if through is not None:
                self._good[origin, goal] = Target(place=goal, address=through.address, port=through.target.port)
            if goal == 0 and through is not None and self.address_of_first is None:
                self.address_of_first = through.address
            if goal == 0 and control is not None:
                found = [each for each in attempts.get(origin, ()) if each.target == control]
                rows += placed([_control_row(found, network, through is not None, origin)], pair)
        self.all_reached = len(self._good) == len(network.names) * (len(network.names) - 1)
        return rows

    def speeds(self) -> list[Row]:
        """How fast the ways are, where there is one."""
        rows: list[Row] = []
        for turn in rounds(sorted({place for pair in self._good for place in pair})):
            questions: dict[int, Question] = {
                origin: Measure(target=self._good[origin, goal], secret=self._secret)
                for origin, goal in turn
                if (origin, goal) in self._good
            }
            goals = dict(turn)
            for origin, found in self._visits.ask(questions).items():
                assert isinstance(found, Speed | Failed)
                rows += placed([_speed_row(found)], self._network.pair(origin, goals[origin]))
        return rows

    def _listen(self) -> tuple[dict[int, Target], Target | None]:
        """Where each host listens for this, and host 0 for the others' agents, if it can."""
        network = self._network
        asked: dict[int, Question] = {
            place: Listen(
                place=place, secret=self._secret, port=None if place else network.port, address=network.address(place)
            )
            for place in self._visits.open.keys() & network.looked.keys()
        }
        listening = {place: found for place, found in self._visits.ask(asked).items() if isinstance(found, Listening)}
        high = {
            place: Target(place=place, address=network.address(place), port=found.high_port)
            for place, found in listening.items()
        }
        # Where host 0 cannot have the port, its own row says why.
        if 0 in listening and listening[0].has_port:
            return high, Target(place=0, address=network.names[0], port=network.port)
        return high, None

    def _tried(self, high: Mapping[int, Target], control: Target | None) -> dict[int, tuple[Attempt, ...]]:
        questions: dict[int, Question] = {}
        for origin in high:
            targets = [target for goal, target in high.items() if goal != origin]
            if origin and control is not None:
                targets.append(control)
            questions[origin] = Connect(targets=tuple(targets), secret=self._secret)
        answers = self._visits.ask(questions)
        return {place: found.attempts for place, found in answers.items() if isinstance(found, Connected)}


def _reach_row(found: Sequence[Attempt], network: Network, origin: int, goal: int) -> Row:
    through = next((each for each in found if each.outcome == "reached"), None)
    if through is not None:
        return passed(_REACH, f"reached at {through.address}, port {through.target.port}")
    if not found:
        return failed(_REACH, "not tried: the program has failed", "run rankless doctor again")
    return failed(_REACH, *_told(found[0], network, origin, goal))


def _control_row(found: Sequence[Attempt], network: Network, is_reached: bool, origin: int) -> Row:
    what, name = f"port {network.port}", network.names[0]
    failures = [each for each in found if each.outcome != "reached"]
    if found and not failures:
        return passed(what, "reached, where the agents meet")
    if not found:
        return failed(what, "not tried: the program has failed", "run rankless doctor again")
    if len(failures) < len(found):
        lost = ", ".join(f"{each.address} ({_said(each)})" for each in failures)
        fix = f"take {failures[0].address} out of the name {name} there, or list {name} by its address"
        return warned(what, f"reached, but {name} also means {lost} there: each start may wait for it", fix)
    seen, fix = _told(failures[0], network, origin, 0)
    if is_reached and failures[0].outcome in ("dropped", "refused"):  # so it is this port alone
        fix = f"let TCP port {network.port} through to {name}, or choose another with --port"
        if network.container(0) is not None:
            fix += f"; in a container: --net=host, or -p {network.port}:{network.port}"
    return failed(what, seen, fix)


def _told(attempt: Attempt, network: Network, origin: int, goal: int) -> tuple[str, str]:
    """What was seen, and the fix."""
    here, there, port = network.names[origin], network.names[goal], attempt.target.port
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
    container = network.container(goal, origin)
    if container is not None:
        fix += f"; in a container ({container}): start it with --net=host, for single ports by -p are not enough"
    if attempt.outcome == "dropped":
        return f"no answer from {at}: a firewall drops packets, or the port is not mapped out of a container", fix
    if attempt.outcome == "refused":
        return f"{at} is refused, though its program listens: a firewall, or the address of a container's host", fix
    return f"{at}: {attempt.text}", fix


def _said(attempt: Attempt) -> str:
    return "no answer" if attempt.outcome == "dropped" else attempt.text or attempt.outcome


def _speed_row(found: Speed | Failed) -> Row:
    if isinstance(found, Failed) or not found.round_trip_seconds:
        text = found.text if isinstance(found, Failed) else found.error
        return warned(_SPEED, f"could not be measured: {text}", "run rankless doctor again")
    trip = f"{timed(found.round_trip_seconds)} there and back"
    if found.error:
        fix = "the largest packet differs on the way: set the same MTU on both cards, and on tunnels between them"
        return failed(_SPEED, f"{trip}; {found.error}", fix)
    seen = f"{trip}, {bit_rate(found.bytes_per_second)} ({sized(found.bytes_per_second)}/s)"
    if found.round_trip_seconds > SLOW_ROUND_TRIP_SECONDS or found.bytes_per_second < SLOW_BYTES_PER_SECOND:
        fix = "gradients would wait for it: see which card leads there, its speed (ethtool), and who else uses it"
        return warned(_SPEED, seen, fix)
    return passed(_SPEED, seen)


def rounds(places: Sequence[int]) -> list[list[tuple[int, int]]]:
    """All ordered pairs in turns, in each of which a host takes part once: measurements must not share a card."""
    seats: list[int | None] = [*places] if len(places) % 2 == 0 else [*places, None]
    turns = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = [
            (one, other)
            for one, other in zip(seats[:half], reversed(seats[half:]), strict=True)
            if one is not None and other is not None
        ]
        turns += [pairs, [(other, one) for one, other in pairs]]
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return turns
