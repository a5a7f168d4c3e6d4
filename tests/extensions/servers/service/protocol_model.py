"""Workers and servers of one run in one process, whose messages, kills and restarts happen in any chosen order.

The code is that of real runs: `ServerClient` for workers, `TableServer` with durable tables for servers. Simulated are
only what lies between them, the clock, the deaths of servers, and the meetings in which workers wait for each other.
Each worker is a thread. At most one of them runs, and only until it waits for a message or for the others. Then the
model makes one of the actions that are possible.

What is lost follows ZeroMQ. If a connection breaks, the first requests on it are lost, and the later ones reach the
next process; of the answers, the last ones are lost. If a worker closes a connection, its requests may still arrive.
"""

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from rankless.extensions.servers.config import ServerConfig, ServersConfig
from rankless.extensions.servers.service import server_connection, server_requests, table_server
from rankless.extensions.servers.service.client import ServerClient
from rankless.extensions.servers.service.server_connection import ConnectionSettings
from rankless.extensions.servers.service.table_server import TableServer
from rankless.extensions.servers.service.wire.setting_formats import decode_table_settings
from rankless.extensions.servers.tables import durable_memory
from rankless.extensions.servers.tables.durable_tables import DurableTables

MEMORY_BYTES = 1 << 40
"""The address space of one server's memory: those of a run share one process."""
PATIENCE_SECONDS = 1e6
"""How long workers wait for a server that is away, or that lets them leave."""
WAIT_SECONDS = 0.25
QUIET_ROUNDS = 12
"""Rounds in which every worker looks at its connections and nothing is sent: longer than a greeting is not repeated."""
MOST_ACTIONS = 20_000


class StandsStillError(AssertionError):
    """Nothing can happen any more, and workers still wait."""


class AbandonedError(BaseException):
    """Ends the thread of a worker whose run is over."""


class SimulatedSocket:
    """A connection of a worker to a server, with the methods of `WorkerSocket`."""

    def __init__(self, worker: int, server: int) -> None:
        self.worker, self.server = worker, server
        self.identity: bytes | None = None
        """By which the server's present process knows it; None while it is not connected."""
        self.requests: deque = deque()
        self.answers: deque = deque()
        self.inbox: deque = deque()
        self.broken = self.closed = False

    def send(self, frames) -> None:
        self.requests.append(frames)

    def receive(self):
        return self.inbox.popleft() if self.inbox else None

    def has_broken(self) -> bool:
        broken, self.broken = self.broken, False
        return broken

    def close(self) -> None:
        self.closed = True


class SimulatedSockets:
    """The connections of a worker, with the methods of `WorkerSockets`."""

    def __init__(self, model: "ProtocolModel", worker: int) -> None:
        self._model, self._worker = model, worker

    def open(self, server: int) -> SimulatedSocket:
        socket = SimulatedSocket(self._worker, server)
        self._model.sockets.append(socket)
        return socket

    def wait(self, sockets, seconds: float) -> bool:  # noqa: ARG002
        if any(each.inbox for each in sockets):
            return True
        return self._model.pause(self._worker, sockets)

    def keep_calling(self, action: Callable[[], None]) -> None:
        self._model.workers[self._worker].tend = action

    def end_calls(self) -> None:
        self._model.workers[self._worker].tend = None

    def close(self) -> None:
        pass


@dataclass
class SimulatedWorker:
    """A thread, and what it waits for: sockets, a meeting (None), or nothing any more."""

    thread: threading.Thread
    baton: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    waits_for: list | None = None
    meets: bool = False
    ended: bool = False
    tend: Callable[[], None] | None = None
    message_arrived: bool = False
    result: object = None
    error: BaseException | None = None


@dataclass
class SimulatedServer:
    """A server's memory, and its present process."""

    memory: int
    process: TableServer | None = None
    incarnation: int = -1


Action = tuple
"""What can happen next: its name, and on what."""


class ProtocolModel:
    """A run. `choose` returns the next one of the actions that are possible; see `list_actions`."""

    def __init__(self, script, *, workers: int = 2, servers: int = 2, replicas: int = 0, mode: str = "sync", **options):
        self._mode = {"mode": mode, **options}
        self._parts, self._replicas = servers, replicas
        count = servers * (1 + replicas)
        self.config = ServersConfig(
            addresses=tuple(f"ipc:///{index}" for index in range(count)), token="secret", mode=mode, replicas=replicas
        )
        self.sockets: list[SimulatedSocket] = []
        self.late: list[tuple[SimulatedServer, int, bytes, list[memoryview]]] = []
        """Requests of connections that workers have closed, on their way."""
        self.clock = 0.0
        self.kills = self.breaks = self.actions = 0
        self.log: list[Action] = []
        self._identities = 0
        self._scheduler = threading.Semaphore(0)
        self._is_over = False
        self.servers = [SimulatedServer(os.memfd_create(f"tables {index}")) for index in range(count)]
        self.workers = [
            SimulatedWorker(threading.Thread(target=self._run_script, args=(script, number), daemon=True))
            for number in range(workers)
        ]

    # What scripts call

    def client(self, worker: int) -> ServerClient:
        settings = ConnectionSettings(
            PATIENCE_SECONDS,
            defers=self.config.mode != "sync",
            open_sockets=lambda _: SimulatedSockets(self, worker),
        )
        return ServerClient(
            self.config,
            worker=worker,
            worker_count=len(self.workers),
            settings=settings,
            connect_timeout=PATIENCE_SECONDS,
        )

    def meet(self, worker: int) -> None:
        """Wait for all other workers, as in a collective."""
        self.workers[worker].meets = True
        if all(each.meets for each in self.workers):
            for each in self.workers:
                each.meets = False
            return
        while self.workers[worker].meets:
            self.pause(worker, None)

    def pause(self, worker: int, sockets) -> bool:
        """Let others run until a message has arrived (True), time is over (False), or all meet."""
        state = self.workers[worker]
        state.waits_for = sockets
        self._scheduler.release()
        state.baton.acquire()
        if self._is_over:
            raise AbandonedError
        return state.message_arrived

    # The run

    def run(self, choose: Callable[["ProtocolModel", list[Action]], Action]) -> list:
        """Run to the end, and return what the scripts return. Raises their errors, and StandsStillError."""
        modules = (server_connection, server_requests, table_server)
        honest = [module.time for module in modules]
        most_bytes, durable_memory.MOST_BYTES = durable_memory.MOST_BYTES, MEMORY_BYTES
        leave_seconds, server_requests.LEAVE_SECONDS = server_requests.LEAVE_SECONDS, PATIENCE_SECONDS
        for module in modules:
            module.time = self
        try:
            for server in self.servers:
                self._start(server)
            for worker in self.workers:
                worker.thread.start()
                self._scheduler.acquire()
            self._act_until_all_have_ended(choose)
            return [worker.result for worker in self.workers]
        finally:
            self._abandon_workers()
            for module, time in zip(modules, honest, strict=True):
                module.time = time
            durable_memory.MOST_BYTES, server_requests.LEAVE_SECONDS = most_bytes, leave_seconds
            for server in self.servers:
                os.close(server.memory)
                _end(server)

    def monotonic(self) -> float:
        """Stand for the module `time`."""
        return self.clock

    def list_actions(self) -> list[Action]:
        """Return what can happen beside faults and the passing of time."""
        actions: list[Action] = [("restart", server) for server in self.servers if server.process is None]
        for socket in self.sockets:
            alive = self.servers[socket.server].process is not None
            if not socket.closed and socket.identity is None and alive:
                actions.append(("connect", socket))
            if socket.identity is not None and socket.requests and not socket.closed:
                actions.append(("request", socket))
            if socket.answers and not socket.closed:
                actions.append(("answer", socket))
        actions += [("late", index) for index in range(len(self.late))]
        return actions

    def list_passing_time(self) -> list[Action]:
        """Return what can happen when time passes: workers look at their connections."""
        waiting = [each for each in self.workers if not each.ended]
        return [("time", each) if each.waits_for is not None else ("tend", each) for each in waiting]

    def _act_until_all_have_ended(self, choose) -> None:
        quiet = 0
        while not all(each.ended for each in self.workers):
            self._collect()
            actions = self.list_actions()
            if actions:
                quiet = 0
                self._act(choose(self, actions))
            elif quiet < QUIET_ROUNDS:
                quiet += 1
                for action in self.list_passing_time():
                    self._act(action)
            else:
                raise StandsStillError(self._describe())
            for worker in self.workers:
                if worker.error is not None:
                    raise worker.error
            if self.actions > MOST_ACTIONS:
                raise StandsStillError(f"{MOST_ACTIONS} actions: {self._describe()}")

    def _collect(self) -> None:
        """Let requests of closed connections arrive late."""
        for socket in [each for each in self.sockets if each.closed]:
            self.sockets.remove(socket)
            server = self.servers[socket.server]
            if socket.identity is not None:
                self.late += [
                    (server, server.incarnation, socket.identity, copy_frames(each)) for each in socket.requests
                ]

    def _act(self, action: Action) -> None:
        self.actions += 1
        self.log.append(action)
        name, subject, *details = action
        match name:
            case "restart":
                self._start(subject)
            case "connect":
                self._identities += 1
                subject.identity = self._identities.to_bytes(5, "big")
            case "request":
                self.servers[subject.server].process.take(subject.identity, copy_frames(subject.requests.popleft()))
            case "late":
                server, incarnation, identity, frames = self.late.pop(subject)
                if server.process is not None and server.incarnation == incarnation:
                    server.process.take(identity, frames)
            case "answer":
                subject.inbox.append(subject.answers.popleft())
                worker = self.workers[subject.worker]
                if worker.waits_for is not None and subject in worker.waits_for:
                    self._resume(worker, message_arrived=True)
            case "time":
                self.clock += WAIT_SECONDS
                self._resume(subject, message_arrived=False)
            case "tend":
                self.clock += WAIT_SECONDS
                if subject.tend is not None:
                    subject.tend()
            case "kill":
                self.kills += 1
                _end(subject)
                for socket in self.sockets:
                    if self.servers[socket.server] is subject:
                        _break(socket, *details)
            case "break":
                self.breaks += 1
                _break(subject, *details)
        for worker in self.workers:  # whom a meeting has ended
            if worker.waits_for is None and not worker.meets and not worker.ended:
                self._resume(worker, message_arrived=False)

    def _resume(self, worker: SimulatedWorker, *, message_arrived: bool) -> None:
        worker.message_arrived = message_arrived
        worker.baton.release()
        self._scheduler.acquire()

    def _start(self, server: SimulatedServer) -> None:
        server.incarnation += 1
        incarnation = server.incarnation
        index = self.servers.index(server)
        config = ServerConfig(
            index=index,
            server_count=self._parts,
            replicas=self._replicas,
            worker_count=len(self.workers),
            address=f"ipc:///{index}",
            token="secret",
            run_id="run",
            incarnation=server.incarnation,
            **self._mode,
        )

        def send(identity: bytes, frames) -> bool:
            if server.incarnation != incarnation:
                return False
            for socket in self.sockets:
                if socket.server == index and socket.identity == identity and not socket.closed:
                    socket.answers.append(copy_frames(frames))
                    return True
            return False

        durable = DurableTables(server.memory, decode_table_settings)
        server.process = TableServer(config, send, lambda _: None, durable)

    def _run_script(self, script, number: int) -> None:
        worker = self.workers[number]
        try:
            worker.result = script(self, number)
        except AbandonedError:
            pass
        except BaseException as error:
            worker.error = error
        worker.ended, worker.waits_for, worker.tend = True, None, None
        self._scheduler.release()

    def _abandon_workers(self) -> None:
        self._is_over = True
        for worker in self.workers:
            if worker.thread.ident is not None and not worker.ended:
                self._resume(worker, message_arrived=False)
            if worker.thread.ident is not None:
                worker.thread.join()

    def _describe(self) -> str:
        lines = []
        for number, worker in enumerate(self.workers):
            where = "has ended" if worker.ended else "meets" if worker.waits_for is None else "waits for servers "
            if worker.waits_for is not None and not worker.ended:
                where += str([socket.server for socket in worker.waits_for])
            lines.append(f"worker {number} {where}")
        faults = [(place, action[0]) for place, action in enumerate(self.log) if action[0] in ("kill", "break")]
        return f"{'; '.join(lines)} after {self.actions} actions, with the faults {faults}"


def _break(socket: SimulatedSocket, lost_requests: float, lost_answers: float) -> None:
    """Break a connection. Fractions of what is on its way are lost: of requests the first, of answers the last ones."""
    if socket.identity is None or socket.closed:
        return
    socket.identity, socket.broken = None, True
    for _ in range(round(lost_requests * len(socket.requests))):
        socket.requests.popleft()
    for _ in range(round(lost_answers * len(socket.answers))):
        socket.answers.pop()


def _end(server: SimulatedServer) -> None:
    """End a server's process. Its mapping is released at once, so that many runs fit into one address space."""
    process, server.process = server.process, None
    if process is not None:
        vars(process.requests).clear()  # a cycle of references


def copy_frames(frames) -> list[memoryview]:
    return [memoryview(bytes(frame)) for frame in frames]
