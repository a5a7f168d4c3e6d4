"""Host 0 before the start: it waits for all hosts, checks that they agree, and tells them to start their workers."""

import selectors
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

from rankless.config.run_config import AgreedJobConfig, Cluster
from rankless.errors import JoinError
from rankless.launch.rendezvous.control_server import (
    INTERRUPTED,
    ConnectionRejected,
    ControlServer,
    HostDisconnected,
    HostJoined,
    ServerEvent,
    announced_failures,
)
from rankless.launch.rendezvous.host_consistency import HostFacts, find_differences
from rankless.launch.rendezvous.messages import JobStarted, JoinProgress
from rankless.launch.rendezvous.tcp_connect_and_reachability import ReachabilityProbe
from rankless.launch.signal_reader import Interrupts, RendezvousInterrupted
from rankless.records.unauthenticated_client_limits import RejectedClients

PROGRESS_SECONDS = 5.0


class AgentStarter(Protocol):
    """Starts the agent of another host."""

    def find_failure(self) -> str | None:
        """Return why the start has failed, or None while it has not."""
        ...

    def mark_joined(self) -> None:
        """Note that the agent has joined."""
        ...


def wait_for_hosts(
    server: ControlServer,
    cluster: Cluster,
    *,
    own: HostFacts,
    starters: Mapping[int, AgentStarter],
    interrupts: Interrupts,
    notify: Callable[[str], None],
) -> dict[int, HostFacts]:
    """Wait until all hosts have joined and agree with `own`. Returns the other hosts' facts by host index.

    Raises `JoinError`, and sends it to the hosts that have joined, if a host is missing at the timeout, cannot be
    started, or differs. Raises `RendezvousInterrupted` on a signal.
    """
    joined: dict[int, HostFacts] = {}
    rejected = RejectedClients("the port for other hosts", notify)
    expected = range(1, len(cluster.hosts))
    start = last_progress_at = time.monotonic()
    probes = {
        index: ReachabilityProbe(cluster, index) for index in expected if index not in starters and cluster.is_listed
    }
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        selector.register(interrupts, selectors.EVENT_READ)
        while missing := [index for index in expected if index not in joined]:
            selector.select(0.1)
            if numbers := interrupts.read():
                server.broadcast(INTERRUPTED)
                raise RendezvousInterrupted(numbers[0])
            now = time.monotonic()
            with announced_failures(server):
                reject = partial(rejected.add, now=now)
                _process_events(server.poll(now), cluster, own=own, joined=joined, notify=notify, reject=reject)
                rejected.report(now)
                for index in joined.keys() & starters.keys():
                    starters[index].mark_joined()
                _check_missing(cluster, missing, joined, starters, probes, waited=now - start)
            if now - last_progress_at > PROGRESS_SECONDS:
                last_progress_at = now
                text = format_progress(cluster, missing, probes, now - start)
                notify(text)
                server.broadcast(JoinProgress(text=text))
    return joined


def format_progress(
    cluster: Cluster, missing: Sequence[int], probes: Mapping[int, ReachabilityProbe], waited: float
) -> str:
    """Return a line such as "waiting: 1/2 hosts, missing 10.7.0.2, 12 s"."""
    count = len(cluster.hosts)
    names = [f"{cluster.hosts[index]}{_format_probe(probes.get(index))}" for index in missing]
    return f"waiting: {count - len(missing)}/{count} hosts, missing {', '.join(names)}, {waited:.0f} s"


def _format_probe(probe: ReachabilityProbe | None) -> str:
    result = None if probe is None else probe.read_result()
    return "" if result is None else f" ({result})"


def _process_events(
    events: Iterable[ServerEvent],
    cluster: Cluster,
    *,
    own: HostFacts,
    joined: dict[int, HostFacts],
    notify: Callable[[str], None],
    reject: Callable[[str, str], None],
) -> None:
    for event in events:
        if isinstance(event, HostJoined):
            _check_agreement(own, event, str(cluster.hosts[event.host]), f"{cluster.hosts[0]}")
            joined[event.host] = event.facts
        elif isinstance(event, HostDisconnected):
            joined.pop(event.host, None)
            notify(f"{cluster.hosts[event.host]} joined and disconnected: {event.reason}")
        elif isinstance(event, ConnectionRejected):
            reject(event.address, event.reason)


def _check_agreement(own: HostFacts, event: HostJoined, name: str, own_name: str) -> None:
    differences = find_differences(own, event.facts, received_seconds=event.received_seconds)
    if differences:
        raise JoinError(
            expected="all hosts to have the same " + ", ".join(item.what.removeprefix("the ") for item in differences),
            found="; ".join(
                f"{item.what}: {name} has {item.there}, {own_name} has {item.here}" for item in differences
            ),
            fix="; ".join(item.fix for item in differences),
        )


def _check_missing(
    cluster: Cluster,
    missing: Sequence[int],
    joined: Mapping[int, HostFacts],
    starters: Mapping[int, AgentStarter],
    probes: Mapping[int, ReachabilityProbe],
    *,
    waited: float,
) -> None:
    """Raise `JoinError` if a missing host cannot be started, or at the timeout."""
    for index in missing:
        if index in starters and index not in joined and (reason := starters[index].find_failure()) is not None:
            raise JoinError(
                expected=f"ssh from here to {cluster.hosts[index]}",
                found=reason,
                fix=f"try it by hand: ssh {cluster.hosts[index]} true; or use --no-ssh and start the job on each host",
            )
    late = [index for index in missing if index not in joined]
    if late and waited > cluster.join_timeout_seconds:
        names = ", ".join(str(cluster.hosts[index]) for index in late)
        probed = "; ".join(f"{cluster.hosts[index]}{_format_probe(probes.get(index))}" for index in late)
        raise JoinError(
            expected=f"all {len(cluster.hosts)} hosts within {cluster.join_timeout_seconds:g} s (--join-timeout)",
            found=f"no answer from {probed}",
            fix=f"check the agent on {names}: it may be unable to connect to {cluster.hosts[0]}:{cluster.port}"
            if cluster.agent_start == "ssh"
            else f"start the same command line on {names}",
        )


def start_hosts(server: ControlServer, start: AgreedJobConfig) -> None:
    """Tell all hosts to start their workers."""
    for index in server.connected_hosts:
        server.send(index, JobStarted(start=start, host_index=index))
