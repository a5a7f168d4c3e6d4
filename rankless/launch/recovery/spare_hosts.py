"""Gives a run its number of hosts back: spare hosts take the places of lost ones, and lost hosts return.

A worker on another host has nothing of what the script has in its variables. So the run saves at its next step, as
before a preemption, and starts again on the new hosts (decision 0078). Meanwhile the workers that are left train on.
"""

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from rankless.config.hosts_and_addresses import Host
from rankless.config.make_run_config import make_run_config
from rankless.config.run_config import Cluster, RunConfig
from rankless.errors import JoinError
from rankless.launch.rendezvous.ssh import SshSession, make_command_in_this_folder
from rankless.launch.signal_reader import Interrupts
from rankless.records.events import AnyRecord, HostLost, StopsHeeded
from rankless.records.run_json_format import RunSummary

ANSWER_SECONDS = 15.0
RETURN_SECONDS = 20.0
"""How long after its loss a host may return, if it was lost once. After each further loss it is twice as long."""
PAUSE_SECONDS = 2.0
"""Between two searches."""
MOST_FAILED_STARTS = 3
"""How often a run is begun once more whose new host has gone meanwhile."""


RunOnce = Callable[[RunConfig, "HostReplacements | None"], RunSummary | None]
"""Runs the script once, observed by the second argument if it is given, and returns the summary of the attempt. There
is none where no worker has started."""


class HostReplacements:
    """The hosts of a run that host 0 starts by ssh, from one attempt to the next."""

    def __init__(
        self, config: RunConfig, *, notify: Callable[[str], None], explain_absence: Callable[[Host], str] | None = None
    ) -> None:
        """Know the hosts.

        Args:
            config: The run, on several hosts.
            notify: Shows a line to the user, between two attempts.
            explain_absence: Returns why no agent can be started on a host; "" if one can. Default: ssh tells.
        """
        assert config.cluster is not None
        self._config, self._cluster, self._notify = config, config.cluster, notify
        self._explain_absence = explain_absence or (lambda host: explain_absence_by_ssh(self._cluster, host))
        self._notices: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._interrupts: Interrupts | None = None
        """The signals of this attempt."""
        self._lost: set[int] = set()
        """The places of lost hosts."""
        self._found: dict[int, Host] = {}
        self._losses: dict[str, tuple[int, float]] = {}
        """How often each host was lost, and when last."""
        self._is_heeded = self._has_asked = self._has_ended = False
        threading.Thread(target=self._search, name="spare hosts", daemon=True).start()

    def run(self, run: RunOnce) -> RunSummary | None:
        """Run until an attempt ends for another reason than that a host can join. Return the summary of the last."""
        failed, is_again = 0, False
        while True:
            try:
                summary = run(self._make_config(), self)
            except JoinError as error:
                failed += 1
                if not is_again or failed > MOST_FAILED_STARTS:
                    raise
                self._notify(f"the run could not start again on its new hosts, and tries once more{error}")
                self._take_absent_for_lost()
                self.replace_lost()
                continue
            if summary is None or self._is_interrupted:
                return summary
            failed = 0 if summary.steps else failed
            if is_again and summary.outcome == "failed" and not summary.steps and self._lost:
                failed += 1
                if failed > MOST_FAILED_STARTS:
                    return summary
                self._notify("a host was lost before the first step")
            elif not self._has_asked or summary.outcome != "preempted":
                return summary
            is_again = True
            self.replace_lost()

    @property
    def _is_interrupted(self) -> bool:
        """Whether somebody else has asked this attempt to stop."""
        return self._interrupts is not None and self._interrupts.have_arrived

    def replace_lost(self) -> None:
        """Before another attempt: wait for hosts in the places of lost ones, if there are any, as for hosts to join."""
        seconds = self._cluster.join_timeout_seconds
        with self._changed:
            self._interrupts = None
            self._changed.notify_all()
            if not self._is_complete():
                places = ", ".join(f"host {self._cluster.hosts[place]}" for place in sorted(self._lost))
                self._notify(f"waits for a host in the place of {places}, at most {seconds:g} s (--join-timeout)")
            self._changed.wait_for(self._is_complete, seconds)
            changes = self._use_found()
        if changes:
            self._notify(f"{changes}; started again")

    def _take_absent_for_lost(self) -> None:
        absent = {place for place, host in enumerate(self._cluster.hosts) if place and self._explain_absence(host)}
        with self._changed:
            self._lost |= absent

    def _make_config(self) -> RunConfig:
        if self._cluster is self._config.cluster:
            return self._config
        request = msgspec.structs.replace(self._config.request, cluster=self._cluster, seed=self._config.seed)
        return make_run_config(self._config.program, request)

    def begin(self, interrupts: Interrupts) -> None:
        """See `launch.agent.AttemptObserver`."""
        with self._changed:
            self._interrupts, self._is_heeded, self._has_asked = interrupts, False, False

    def receive(self, record: AnyRecord) -> None:
        """Take note of lost hosts, and of a script that heeds requests to stop."""
        with self._changed:
            if isinstance(record, HostLost) and record.host_index:
                self._lost.add(record.host_index)
                host = self._cluster.hosts[record.host_index]
                count, _ = self._losses.get(host.address, (0, 0.0))
                self._losses[host.address] = count + 1, time.monotonic()
            elif isinstance(record, StopsHeeded):
                self._is_heeded = True
            else:
                return
            self._changed.notify_all()

    def take_notices(self) -> Sequence[str]:
        """See `launch.agent.AttemptObserver`."""
        return [self._notices.get() for _ in range(self._notices.qsize())]

    def _use_found(self) -> str:
        """Have the next attempt use the hosts that were found, and return what changes."""
        hosts, spares = list(self._cluster.hosts), list(self._cluster.spares)
        changes = []
        for place, host in sorted(self._found.items()):
            before, hosts[place] = hosts[place], host
            if host != before:
                spares = [*(each for each in spares if each != host), before]
            changes.append(f"host {host}" + (f" takes the place of host {before}" if host != before else " is back"))
        self._lost.clear()
        self._found.clear()
        self._cluster = msgspec.structs.replace(self._cluster, hosts=tuple(hosts), spares=tuple(spares))
        return ", ".join(changes)

    def close(self) -> None:
        """Search no more."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _is_complete(self) -> bool:
        return self._lost == self._found.keys()

    def _search(self) -> None:
        """Find a host for each place of a lost one, then ask the workers to stop. Runs in a thread."""
        for spare in self._cluster.spares:
            if reason := self._explain_absence(spare):
                self._notices.put(f"the spare host {spare} cannot be used: {reason}")
        has_explained = False
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._has_ended or self._lost)
                if self._has_ended:
                    return
                wanted, cluster = sorted(self._lost - self._found.keys()), self._cluster
            for place in wanted:
                found = self._find_host(self._list_candidates(cluster, place))
                with self._changed:
                    if found is not None and cluster is self._cluster:  # no other attempt has begun meanwhile
                        self._found[place] = found
                        self._changed.notify_all()
            with self._changed:
                interrupts, is_stopping = self._interrupts, self._has_asked or self._is_interrupted
                if interrupts is not None and not is_stopping and self._lost and self._is_complete():
                    names = ", ".join(f"host {host}" for _, host in sorted(self._found.items()))
                    if self._is_heeded:
                        self._has_asked, has_explained = True, False
                        self._notices.put(f"{names} can join: the run saves, and starts again")
                        interrupts.request()
                    elif not has_explained:
                        has_explained = True
                        self._notices.put(
                            f"{names} could join, if the script saved when it is asked to stop: "
                            "rankless.checkpoints(…, autosave=True) or rankless.stopping()"
                        )
                self._changed.wait(PAUSE_SECONDS)

    def _list_candidates(self, cluster: Cluster, place: int) -> list[Host]:
        """Return the hosts that may take the place of a lost one, with as many workers, in the order of preference."""
        lost = cluster.hosts[place]
        taken = set(self._found.values())
        alike = [each for each in cluster.spares if (each.workers, each.heterogeneous) == _count(lost)]
        return [each for each in (*alike, lost) if each not in taken and self._may_return(each)]

    def _may_return(self, host: Host) -> bool:
        count, lost_at = self._losses.get(host.address, (0, 0.0))
        has_failed = self._interrupts is None
        return not count or has_failed or time.monotonic() >= lost_at + RETURN_SECONDS * 2 ** (count - 1)

    def _find_host(self, candidates: Iterable[Host]) -> Host | None:
        return next((each for each in candidates if not self._explain_absence(each)), None)


def _count(host: Host) -> tuple[int, int]:
    return host.workers, host.heterogeneous


def explain_absence_by_ssh(cluster: Cluster, host: Host) -> str:
    """Return why no agent can be started on a host; "" if one can.

    Args:
        cluster: How ssh reaches hosts.
        host: The host.
    """
    other = msgspec.structs.replace(cluster, hosts=(cluster.hosts[0], host))
    command = make_command_in_this_folder([sys.executable, "-c", "import rankless"])
    session = SshSession(other, 1, command, on_line=lambda _: None)
    deadline = time.monotonic() + ANSWER_SECONDS
    try:
        while session.is_running():
            if time.monotonic() > deadline:
                return f"ssh does not answer within {ANSWER_SECONDS:g} s"
            time.sleep(0.05)
        return "" if session.has_succeeded() else session.explain_end()
    finally:
        session.close()
