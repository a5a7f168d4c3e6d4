"""The whole examination of one host or several: who is looked at, in which order, and what comes of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rankless.config.environment import carried_variables
from rankless.config.hosts import Host, addresses_of, own_addresses
from rankless.launch.doctor.collective_test import prepare, try_collective
from rankless.launch.doctor.host_pairs import Network, Pairs
from rankless.launch.doctor.probe_protocol import Apply, Failed, Look, Looked, Question
from rankless.launch.doctor.remote_probes import Visits
from rankless.launch.doctor.startup_test import SmallJob
from rankless.launch.rendezvous.host_facts import MOST_SKEW_SECONDS, differences
from rankless.launch.rendezvous.host_probe import seen_of
from rankless.records.check_results import Row, failed, passed, placed, warned
from rankless.records.quantities import timed

NOTICED_SKEW_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is to be looked at."""

    hosts: tuple[Host, ...]
    """Empty: this host alone."""
    workers: int = 1
    """On this host alone."""
    port: int
    log_folder: str
    by_hand: bool = False
    """Do not use ssh: of the other hosts only what can be seen from here."""
    quick: bool = False
    """Leave out what imports torch."""


@dataclass
class Findings:
    """The rows so far, and what could not be looked at, with the reason."""

    rows: list[Row] = field(default_factory=list)
    not_looked_at: list[str] = field(default_factory=list)


def examine(case: Case, tell: Callable[[str], None]) -> Findings:
    """All rows. `tell` is given what is being done."""
    findings = Findings()
    hosts = case.hosts or (Host(address="this host", workers=case.workers),)
    own = [0]
    if case.hosts:
        own = _own_places(hosts)
        findings.rows += _own_rows(hosts, own)
    here = own[0] if own else None
    skipped = [place for place in range(len(hosts)) if place != here] if case.by_hand else own[1:]
    tell("reaching the hosts" if len(hosts) > 1 else "looking at this host")
    with Visits(hosts, here=here, skipped=skipped) as visits:
        _Examination(case, hosts, own, visits, findings).run(tell)
    return findings


class _Examination:
    """One examination, while its programs are on the hosts."""

    def __init__(
        self, case: Case, hosts: Sequence[Host], own: Sequence[int], visits: Visits, findings: Findings
    ) -> None:
        self._case = case
        self._hosts = hosts
        self._names = [host.address for host in hosts]
        self._own = own
        """The places of this host: one, unless it is not on the list or is named twice."""
        self._here = own[0] if own else None
        self._visits = visits
        self._rows = findings.rows
        self._missed = findings.not_looked_at
        self._looked: dict[int, Looked] = {}

    def run(self, tell: Callable[[str], None]) -> None:
        with SmallJob(is_wanted=self._here is not None and not self._case.quick) as job:
            self._open()
            if not self._case.quick and len(self._hosts) > 1:
                prepare(self._visits)
            tell("looking at each host")
            self._look()
            pairs = None
            if len(self._hosts) > 1:
                self._compare()
                self._clocks()
                tell("trying the ways between the hosts")
                pairs = Pairs(self._visits, Network(self._names, self._case.port, self._looked))
                self._rows += pairs.connections()
            if self._here is not None and not self._case.quick:
                tell("starting a small job")
                self._rows += placed([job.row()], self._names[self._here])
        if pairs is not None:
            tell("measuring the ways between the hosts")
            self._reduce(pairs)
            self._rows += pairs.speeds()

    def _open(self) -> None:
        for place, row in self._visits.opened().items():
            self._rows += placed([row], self._names[place])
            self._missed.append(f"{self._names[place]} itself, for want of {row.name}")
        self._drop_twins()
        for place, visit in self._visits.open.items():
            if place != self._here:
                self._rows += placed(
                    [passed("ssh", f"in {timed(visit.opening_seconds)}, without a password")], self._names[place]
                )
        if self._case.by_hand:
            for place, name in enumerate(self._names):
                if place not in self._own:
                    self._rows += placed([_from_outside(name)], name)
                    self._missed.append(f"{name} itself (--no-ssh): type the line there too")

    def _drop_twins(self) -> None:
        """Of two names for one host, the first is looked at."""
        first: dict[str, int] = {}
        for place, visit in list(self._visits.open.items()):
            twin = first.setdefault(visit.identity, place)
            if twin != place:
                self._rows += placed([_one_host([self._hosts[twin], self._hosts[place]])], self._names[twin])
                self._visits.open.pop(place)

    def _look(self) -> None:
        variables = carried_variables()
        self._visits.ask({place: Apply(environment=variables) for place in self._visits.open if place != self._here})
        questions: dict[int, Question] = {
            place: Look(
                name=self._names[place],
                others=tuple(self._names[other] for other in self._visits.open if other != place),
                is_first=place == 0,
                has_several=len(self._hosts) > 1,
                workers=self._hosts[place].workers,
                port=self._case.port,
                log_folder=self._case.log_folder,
            )
            for place in self._visits.open
        }
        for place, answer in self._visits.ask(questions).items():
            if isinstance(answer, Looked):
                self._looked[place] = answer
                self._rows += placed(answer.rows, self._names[place])
            else:
                text = answer.text if isinstance(answer, Failed) else "another answer than was asked for"
                row = failed("program", f"it broke off: {text}", "run rankless doctor there, alone")
                self._rows += placed([row], self._names[place])
                self._visits.open.pop(place)

    def _compare(self) -> None:
        """Versions."""
        if not self._looked:
            return
        first = min(self._looked)
        own = self._looked[first].facts
        for place, looked in self._looked.items():
            parted = differences(own, looked.facts, received_seconds=looked.facts.time_seconds)
            rows = [
                failed(
                    item.what.removeprefix("the "), f"{item.there}, but {self._names[first]} has {item.here}", item.fix
                )
                for item in parted
            ]
            versions = ", ".join(f"{name} {version}" for name, version in looked.facts.versions.items())
            self._rows += placed(rows or [passed("versions", versions)], self._names[place])

    def _clocks(self) -> None:
        others = [place for place in self._visits.open if place != self._here]
        for place, found in self._visits.clocks(others).items():
            if found is not None:
                self._rows += placed([_clock_row(skew=found[0], doubt=found[1])], self._names[place])

    def _reduce(self, pairs: Pairs) -> None:
        if self._case.quick:
            return
        interfaces = {place: found.interface for place, found in self._looked.items() if found.interface is not None}
        if pairs.all_reached and pairs.address_of_first is not None and len(interfaces) == len(self._hosts):
            self._rows += try_collective(
                self._visits, self._names, address=pairs.address_of_first, interfaces=interfaces
            )
        else:
            self._missed.append("a collective of all hosts, until the above is mended")


def _own_places(hosts: Sequence[Host]) -> list[int]:
    own = own_addresses()
    return [place for place, host in enumerate(hosts) if addresses_of(host.address) & own]


def _own_rows(hosts: Sequence[Host], own: Sequence[int]) -> list[Row]:
    """Whether this host is one of the list, and one only."""
    listed = ", ".join(map(str, hosts))
    if not own:
        row = warned("hosts", f"this host is none of {listed}", "start jobs on a host of the list: it is host 0")
        return placed([row], "this host")
    if len(own) > 1:
        return placed([_one_host([hosts[place] for place in own])], str(hosts[own[0]]))
    return []


def _one_host(hosts: Sequence[Host]) -> Row:
    fix = f"name it once, with all its workers: {hosts[0]}:{sum(host.workers for host in hosts)}"
    return failed("hosts", f"{' and '.join(map(str, hosts))} are one host", fix)


def _from_outside(name: str) -> Row:
    """What can be seen of a host without ssh."""
    seen = seen_of(name)
    if seen.startswith("it is up"):
        return passed("from here", "it is up")
    return failed("from here", seen, "see that the name is right, the host is up, and no firewall stands between")


def _clock_row(*, skew: float, doubt: float) -> Row:
    seen = f"{timed(abs(skew))} {'ahead of' if skew > 0 else 'behind'} this host's (± {timed(doubt)})"
    fix = "set the clocks: timedatectl set-ntp true, or chrony"
    if abs(skew) - doubt > MOST_SKEW_SECONDS:
        return failed("clock", seen, fix)
    return warned("clock", seen, fix) if abs(skew) - doubt > NOTICED_SKEW_SECONDS else passed("clock", seen)
