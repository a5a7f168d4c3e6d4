"""The start of a run's processes beside its workers, on all its hosts.

No worker of any host starts before all these processes of all hosts serve.
"""

import selectors
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from rankless.config.extensions import find_extension
from rankless.errors import JoinError, LaunchError, RanklessError
from rankless.launch.extension_process_role import ProcessRole
from rankless.launch.other_hosts_interface import Peers
from rankless.launch.rendezvous.control_server import INTERRUPTED
from rankless.launch.rendezvous.messages import JoinRefused, ProcessesStarted, StartRefused
from rankless.launch.rendezvous.other_hosts_during_run import FollowerPeers, LeaderPeer
from rankless.launch.signal_reader import Interrupts, RendezvousInterrupted, name_signal
from rankless.records.events import HostInterrupted, HostLost, Notice
from rankless.records.live_run import ProcessRow

_POLL_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class CommonStart:
    """Starts the processes of all roles on this host, and waits for those of the others.

    Args:
        roles: The roles of the run.
        peers: The other hosts.
        names: The name of every host.
        notify: Shows a line to the user.
    """

    roles: Sequence[ProcessRole]
    peers: Peers
    names: Sequence[str]
    notify: Callable[[str], None]

    def run(self, interrupts: Interrupts) -> list[ProcessRow]:
        """Return all processes, on another host than host 0 only its own, once all of them serve.

        Raises:
            LaunchError: A process does not serve. The other hosts learn of it.
            JoinError: The same, on a host that learns of it, or a host is lost.
            RendezvousInterrupted: On a signal, also of another host.
        """
        try:
            for role in self.roles:
                role.start(interrupts, on_wait=self._poll)
            rows = [row for role in self.roles for row in role.list_rows()]
            if isinstance(leader := self.peers, LeaderPeer):
                # This host's descriptors mean nothing on another one.
                sent = tuple(msgspec.structs.replace(row, status_descriptor=None) for row in rows)
                leader.send_start(ProcessesStarted(processes=sent))
                self._wait(interrupts, until=lambda: leader.may_start_workers)
            elif isinstance(self.peers, FollowerPeers):
                self._wait(interrupts, until=lambda: len(self._started) == len(self.names) - 1)
                answers = [answer for answer in self._started.values() if isinstance(answer, ProcessesStarted)]
                others = (row for answer in answers for row in answer.processes)
                rows = sorted([*rows, *others], key=lambda row: row.name)
                self.peers.start_workers()
        except RanklessError as error:
            self._announce(error)
            raise
        except RendezvousInterrupted as error:
            self._announce_interrupt(error.number)
            raise
        return rows

    @property
    def _titles(self) -> str:
        """What the processes of the roles are called, as "the clocks"."""
        extensions = [find_extension(role.name) for role in self.roles]
        return " and ".join(each.role.title for each in extensions if each is not None and each.role is not None)

    @property
    def _started(self) -> dict[int, ProcessesStarted | StartRefused]:
        return self.peers.started_processes if isinstance(self.peers, FollowerPeers) else {}

    def _wait(self, interrupts: Interrupts, *, until: Callable[[], bool]) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(interrupts, selectors.EVENT_READ)
            while not until():
                selector.select(_POLL_SECONDS)
                if numbers := interrupts.read():
                    raise RendezvousInterrupted(numbers[0])
                self._poll()

    def _poll(self) -> None:
        """Take what other hosts have sent. Raises an error if the run cannot start any more."""
        if isinstance(self.peers, LeaderPeer):
            self._poll_leader(self.peers)
        elif isinstance(self.peers, FollowerPeers):
            self._poll_followers(self.peers)

    def _poll_leader(self, leader: LeaderPeer) -> None:
        leader.receive(time.monotonic())
        if leader.refusal is not None:
            raise JoinError(expected=leader.refusal.expected, found=leader.refusal.found, fix=leader.refusal.fix)
        if leader.lost_reason is not None:
            raise JoinError(
                expected=f"host 0, {self.names[0]}, to start the workers",
                found=leader.lost_reason,
                fix="look at its terminal",
            )

    def _poll_followers(self, followers: FollowerPeers) -> None:
        for record in followers.poll(time.monotonic()).records:
            if isinstance(record, HostLost):
                raise JoinError(
                    expected=f"all hosts to start {self._titles}",
                    found=f"host {record.host} {record.how}",
                    fix="look at its terminal, or its agent's messages here; then start the job again",
                )
            if isinstance(record, HostInterrupted):
                self.notify(f"host {record.host} received {name_signal(record.signal)}")
                raise RendezvousInterrupted(record.signal)
            if isinstance(record, Notice):
                self.notify(record.text)
        for host, answer in self._started.items():
            if isinstance(answer, StartRefused):
                name = self.names[host]
                raise LaunchError(
                    expected=f"{answer.expected}, on {name}", found=answer.found, fix=f"{answer.fix}, on {name}"
                )

    def _announce(self, error: RanklessError) -> None:
        expected, found = str(error.expected), str(error.found)
        if isinstance(self.peers, LeaderPeer) and self.peers.refusal is None:
            self.peers.send_start(StartRefused(expected=expected, found=found, fix=error.fix))
        elif isinstance(self.peers, FollowerPeers):
            self.peers.refuse_start(JoinRefused(expected=expected, found=found, fix=error.fix))

    def _announce_interrupt(self, number: int) -> None:
        if isinstance(self.peers, LeaderPeer):
            self.peers.send_interrupt(number)
        elif isinstance(self.peers, FollowerPeers):
            self.peers.refuse_start(INTERRUPTED)
