"""The crews of an elastic job: one on this machine, whatever its names among the hosts, and one on each other."""

import os
import selectors
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from rankless.config.elastic import Elastic
from rankless.config.environment import exported_variables, loopback_name, user_interfaces
from rankless.config.hosts import interface_of, is_here
from rankless.config.run_config import JobStart, RunConfig
from rankless.launch.elastic.local_workers import LocalWorkers
from rankless.launch.elastic.member import ElasticWorker
from rankless.launch.elastic.membership import RoundState
from rankless.launch.elastic.remote_workers import RemoteWorkers
from rankless.launch.elastic.ssh_protocol import Task
from rankless.launch.profile import load_profile
from rankless.launch.worker_configs import ElasticSlot, make_elastic_worker
from rankless.launch.worker_output import Source, Terminal, Write
from rankless.records.elastic_messages import DriverMessage, RoundStarted, WorkerMessage
from rankless.records.events import AnyRecord

HERE = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class LaunchContext:
    """What workers are started by."""

    config: RunConfig
    elastic: Elastic
    start: JobStart
    folder: str
    tell: Callable[[str], None]
    writes: Mapping[Source, Write]


def _named(numbers: Sequence[int]) -> str:
    return f"worker{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


class AllWorkers:
    """All workers by their numbers, wherever they are."""

    def __init__(self, orders: LaunchContext, selector: selectors.BaseSelector) -> None:
        self._orders = orders
        self._selector = selector
        self._terminal = Terminal([], writers=orders.writes)
        self._here = LocalWorkers(orders.config, log_path=os.path.join(orders.folder, "parent.log"), selector=selector)
        self._there: dict[str, RemoteWorkers] = {}
        self._crew_of: dict[int, LocalWorkers | RemoteWorkers] = {}
        self._is_ending = False

    def start(self, worker: ElasticWorker) -> None:
        """Start a worker."""
        if not is_here(worker.host):
            crew = self._there.get(worker.host) or self._reach(worker.host)
            self._crew_of[worker.number] = crew
            crew.start(worker)
            return
        orders = self._orders
        self._crew_of[worker.number] = self._here
        slot = ElasticSlot(number=worker.number, host=worker.host, slot=worker.slot)
        launch = make_elastic_worker(orders.config, orders.start, slot, folder=orders.folder, interface=None)
        profile = load_profile(orders.config.launcher)
        for stream in profile.shown_streams(orders.config, orders.folder, [launch.config]):
            self._terminal.add(stream)
        self._here.start(launch)

    def tell(self, number: int, word: DriverMessage, seating: RoundState | None) -> None:
        """Say something to a worker; to begin a round, with the address where its members meet."""
        crew = self._crew_of[number]
        if isinstance(word, RoundStarted) and seating is not None:
            word = self._addressed(word, number, seating)
        crew.tell(number, word)

    def end(self, number: int, why: str) -> None:
        """End one worker as soon as it stands still; one that computes is left alone."""
        self._crew_of[number].end(number, why)

    def turn(self) -> Iterator[tuple[int, WorkerMessage] | AnyRecord]:
        """What is new."""
        self._terminal.pump()
        yield from self._here.turn()
        for host, crew in list(self._there.items()):
            yield from crew.turn()
            if crew.has_ended():
                if not self._is_ending:
                    went = f", and with it {_named(crew.lost)}" if crew.lost else ""
                    self._orders.tell(f"host {host} is lost{went}: {crew.why_lost()}")
                crew.close()
                del self._there[host]

    def signal(self, number: int) -> None:
        """Send a signal to all workers, and start no others."""
        self._is_ending = True
        for crew in self._all():
            crew.signal(number)

    def kill(self) -> None:
        """End all workers at once."""
        for crew in self._all():
            crew.kill()

    def is_broken(self) -> bool:
        """Whether no worker can be started here any more."""
        return self._here.has_ended()

    def have_ended(self) -> bool:
        """Whether nothing lives any more; hosts that are told to end are let go of as they do."""
        return self._here.has_ended() and all(crew.has_ended() for crew in self._there.values())

    def close(self) -> None:
        """See to it that nothing is left."""
        for crew in self._all():
            crew.close()
        self._terminal.close()

    def _all(self) -> list[LocalWorkers | RemoteWorkers]:
        return [self._here, *self._there.values()]

    def _reach(self, host: str) -> RemoteWorkers:
        orders = self._orders
        task = Task(
            program=orders.config.program,
            request=msgspec.structs.replace(orders.config.request, seed=orders.config.seed),
            start=orders.start,
            folder=orders.folder,
            environment=exported_variables(),
        )
        crew = RemoteWorkers(host, task, orders.elastic, selector=self._selector, writes=orders.writes)
        self._there[host] = crew
        return crew

    def _addressed(self, begin: RoundStarted, number: int, seating: RoundState) -> RoundStarted:
        """Where the members of a round meet: on loopback if all are here, else where the hosts reach each other."""
        lead = next(member for member, assignment in seating.assignments.items() if assignment.rank == 0)
        crews = {self._crew_of[member] for member in seating.assignments}
        outward = [
            crew.here.driver_address for crew in crews if isinstance(crew, RemoteWorkers) and crew.here is not None
        ]
        here = (outward[0], interface_of(outward[0])) if outward else (HERE, loopback_name())

        def way(member: int) -> tuple[str, str]:
            crew = self._crew_of[member]
            if isinstance(crew, RemoteWorkers) and crew.here is not None:
                return crew.here.address, crew.here.interface
            return here

        return msgspec.structs.replace(
            begin,
            address=way(lead)[0],
            interface=None if self._has_chosen_interface() else way(number)[1],
        )

    def _has_chosen_interface(self) -> bool:
        return self._orders.elastic.has_chosen_interface or "GLOO_SOCKET_IFNAME" in user_interfaces()
