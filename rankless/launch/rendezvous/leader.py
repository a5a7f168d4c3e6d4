"""Host 0, until all hosts are there: who is missing and why, whether all agree, and the word to start."""

import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from rankless.config.run_config import Cluster, JobStart
from rankless.errors import JoinError
from rankless.launch.rendezvous.control_server import ConnectionRejected, ControlServer, HostDisconnected, HostJoined
from rankless.launch.rendezvous.host_facts import HostFacts, find_differences
from rankless.launch.rendezvous.host_probe import Probe
from rankless.launch.rendezvous.messages import JobStarted, JoinProgress, JoinRefused
from rankless.launch.signals import Interrupts

TELL_EVERY_SECONDS = 5.0


class RendezvousInterrupted(Exception):
    """A signal has ended the waiting."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Starter(Protocol):
    """What starts the agent of another host."""

    def ended(self) -> str | None:
        """Why it has ended, if it has, without the agent having come."""
        ...

    def joined(self) -> None:
        """The agent has come."""
        ...


def wait_for_hosts(
    hub: ControlServer,
    cluster: Cluster,
    *,
    own: HostFacts,
    starters: Mapping[int, Starter],
    interrupts: Interrupts,
    tell: Callable[[str], None],
) -> dict[int, HostFacts]:
    """What the other hosts told of themselves, by their places, once all are there and agree with `own`.

    Raises JoinError for a host that does not come, cannot be started or differs, and tells those that are there;
    Interrupted on a signal.
    """
    found: dict[int, HostFacts] = {}
    wanted = range(1, len(cluster.hosts))
    start = told = time.monotonic()
    probes = {place: Probe(cluster, place) for place in wanted if place not in starters and cluster.is_listed}
    with selectors.DefaultSelector() as selector:
        selector.register(hub, selectors.EVENT_READ)
        selector.register(interrupts, selectors.EVENT_READ)
        while missing := [place for place in wanted if place not in found]:
            selector.select(0.1)
            if numbers := interrupts.read():
                hub.tell_all(
                    JoinRefused(expected="a job that starts", found="host 0 was told to end", fix="start it again")
                )
                raise RendezvousInterrupted(numbers[0])
            now = time.monotonic()
            try:
                _hear(hub, cluster, own=own, found=found, tell=tell, now=now)
                for place in found.keys() & starters.keys():
                    starters[place].joined()
                _require_hope(cluster, missing, found, starters, probes, waited=now - start)
            except JoinError as error:
                hub.tell_all(JoinRefused(expected=str(error.expected), found=str(error.found), fix=error.fix))
                raise
            if now - told > TELL_EVERY_SECONDS:
                told = now
                text = waiting_text(cluster, missing, probes, now - start)
                tell(text)
                hub.tell_all(JoinProgress(text=text))
    return found


def waiting_text(cluster: Cluster, missing: Sequence[int], probes: Mapping[int, Probe], waited: float) -> str:
    """As "waiting: 1/2 hosts, missing 10.7.0.2, 12 s"."""
    count = len(cluster.hosts)
    there = f"waiting: {count - len(missing)}/{count} hosts, missing "
    seen = [f"{cluster.hosts[place]}{_seen(probes.get(place))}" for place in missing]
    return there + ", ".join(seen) + f", {waited:.0f} s"


def _seen(probe: Probe | None) -> str:
    found = None if probe is None else probe.found()
    return "" if found is None else f" ({found})"


def _hear(
    hub: ControlServer,
    cluster: Cluster,
    *,
    own: HostFacts,
    found: dict[int, HostFacts],
    tell: Callable[[str], None],
    now: float,
) -> None:
    for news in hub.turn(now):
        if isinstance(news, HostJoined):
            _require_alike(own, news, str(cluster.hosts[news.host]), f"{cluster.hosts[0]}")
            found[news.host] = news.facts
        elif isinstance(news, HostDisconnected):
            found.pop(news.host, None)
            tell(f"{cluster.hosts[news.host]} has come and gone again: {news.how}")
        elif isinstance(news, ConnectionRejected):
            tell(f"{news.address} tried to join, and was turned away: {news.why}")


def _require_alike(own: HostFacts, news: HostJoined, name: str, own_name: str) -> None:
    parted = find_differences(own, news.facts, received_seconds=news.received_seconds)
    if parted:
        raise JoinError(
            expected="all hosts to have the same " + ", ".join(item.what.removeprefix("the ") for item in parted),
            found="; ".join(f"{item.what}: {name} has {item.there}, {own_name} has {item.here}" for item in parted),
            fix="; ".join(item.fix for item in parted),
        )


def _require_hope(
    cluster: Cluster,
    missing: Sequence[int],
    found: Mapping[int, HostFacts],
    starters: Mapping[int, Starter],
    probes: Mapping[int, Probe],
    *,
    waited: float,
) -> None:
    for place in missing:
        if place in starters and place not in found and (why := starters[place].ended()) is not None:
            raise JoinError(
                expected=f"ssh from here to {cluster.hosts[place]}",
                found=why,
                fix=f"try it by hand: ssh {cluster.hosts[place]} true; or use --no-ssh and start the job on each host",
            )
    late = [place for place in missing if place not in found]
    if late and waited > cluster.join_timeout_seconds:
        names = ", ".join(str(cluster.hosts[place]) for place in late)
        seen = "; ".join(f"{cluster.hosts[place]}{_seen(probes.get(place))}" for place in late)
        raise JoinError(
            expected=f"all {len(cluster.hosts)} hosts within {cluster.join_timeout_seconds:g} s (--join-timeout)",
            found=f"no word from {seen}",
            fix=f"see what the agent does on {names}: its way to {cluster.hosts[0]}:{cluster.port} may be closed"
            if cluster.agent_start == "ssh"
            else f"start the same line on {names}",
        )


def start_hosts(hub: ControlServer, start: JobStart) -> None:
    """Tell all hosts to start their workers."""
    for place in hub.present:
        hub.tell(place, JobStarted(start=start, host_index=place))
