"""Meeting as the processes of Horovod's own launcher do: at its HTTP key-value server rank 0 tells where it serves.

That server takes PUT and GET of /scope/key, and answers 404 for what is not there. One key of ours is used, for a
moment: the store at which ranks meet is rank 0's, as everywhere.

Note [the key is blank before anybody goes on]: a process may join again, or a shell may run a second program in the
same job. So rank 0 takes its address back before the meeting is over. It does so by an empty value: older servers of
Horovod fail at DELETE in a scope that they do not know.
"""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from http.client import HTTPConnection, HTTPException

import msgspec

from rankless.config.horovod_variables import HorovodWorker
from rankless.config.hosts import interface_towards
from rankless.errors import JoinError
from rankless.runtime.rendezvous.address import RendezvousParameters
from rankless.runtime.rendezvous.tcp import JoinDeadline, Notify, Rendezvous, join_tcp_rendezvous

PATH = "/rankless/meeting"
TAKEN_BACK = "rankless/taken-back"
ANSWER_SECONDS = 5.0
SILENT_SECONDS = 30.0
"""How long the server may be without an answer: it is there before any worker is."""
LONGEST_NAP_SECONDS = 0.25


class Served(msgspec.Struct, frozen=True):
    """Where rank 0 serves the store of the job."""

    host: str
    port: int


def join_horovod_rendezvous(told: HorovodWorker, notify: Notify) -> tuple[Rendezvous, Served]:
    """Meet, told by Horovod's launcher: the meeting, and where. Raises JoinError."""
    server = KeyValueServer(told, notify)
    if told.rank != 0:
        served = _told_by_rank_0(server)
        rendezvous = join_tcp_rendezvous(_invitation(told, served), notify)
        rendezvous.store.wait([TAKEN_BACK], timedelta(seconds=told.timeout_seconds))
        return rendezvous, served
    with _reserved(server.own_address()) as served:
        server.put(msgspec.json.encode(served))
        rendezvous = join_tcp_rendezvous(_invitation(told, served), notify)
    server.put(b"")
    rendezvous.store.set(TAKEN_BACK, "")
    return rendezvous, served


class KeyValueServer:
    """The launcher's server, as one of its workers sees it: a place for one value."""

    def __init__(self, told: HorovodWorker, notify: Notify) -> None:
        self._told = told
        host = f"[{told.address}]" if ":" in told.address else told.address
        self._name = f"http://{host}:{told.port}"
        self._patience = JoinDeadline(_invitation(told, Served(told.address, told.port)), notify)
        self._nap = 0.0

    def own_address(self) -> str:
        """This host's, on the way to the server: whoever reaches the server reaches it, too. Raises JoinError."""
        try:
            return interface_towards(self._told.address)[1]
        except (OSError, UnicodeError) as error:
            raise self._unreachable(str(error)) from None

    def put(self, value: bytes) -> None:
        """Make `value` what others get. Raises JoinError."""
        self._asked("PUT", value)

    def get(self) -> bytes:
        """The value; empty where there is none. Raises JoinError."""
        return self._asked("GET", None)

    def wait_for_rank_0(self) -> None:
        """Nap between two looks. Raises JoinError when the time is over."""
        self._patience.wait(
            lambda: f"{self._name}: waiting for rank 0, which is to say there where it serves",
            "look at rank 0: does it call hvd.init, and of the same Rankless? HOROVOD_START_TIMEOUT waits longer",
        )
        time.sleep(self._nap)  # on top of the nap of patience: one server may have a thousand ranks at its door
        self._nap = min(self._nap + 0.01, LONGEST_NAP_SECONDS)

    def _asked(self, method: str, body: bytes | None) -> bytes:
        start = time.monotonic()
        while True:
            try:
                return self._answer(method, body)
            except (socket.gaierror, UnicodeError) as error:
                raise self._unreachable(str(error)) from None
            except (OSError, HTTPException) as error:
                why = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
            if time.monotonic() - start > min(SILENT_SECONDS, self._told.timeout_seconds):
                raise self._unreachable(why)
            self._patience.wait(self._no_answer(why), self._fix())

    def _answer(self, method: str, body: bytes | None) -> bytes:
        with contextlib.closing(HTTPConnection(self._told.address, self._told.port, timeout=ANSWER_SECONDS)) as asking:
            asking.request(method, PATH, body)
            answer = asking.getresponse()
            value = answer.read()
        if answer.status not in (200, 404):
            raise HTTPException(f"it says {answer.status} {answer.reason}")
        return value if answer.status == 200 else b""

    def _no_answer(self, why: str) -> Callable[[], str]:
        return lambda: f"{self._name}: no answer ({why})"

    def _unreachable(self, why: str) -> JoinError:
        return JoinError(
            expected=f"Horovod's launcher to answer at {self._name}, as HOROVOD_GLOO_RENDEZVOUS_ADDR and _PORT say",
            found=why,
            fix=self._fix(),
        )

    def _fix(self) -> str:
        return (
            "look whether the launcher lives and its port is open to this host; or start the job by "
            "`rankless horovodrun`, with the same options"
        )


def _told_by_rank_0(server: KeyValueServer) -> Served:
    while not (value := server.get()):
        server.wait_for_rank_0()
    try:
        return msgspec.json.decode(value, type=Served)
    except msgspec.DecodeError:
        raise JoinError(
            expected=f"at {PATH} of Horovod's server what rank 0 has said: a host and a port",
            found=repr(value[:80]),
            fix="end what else writes there; use the same version of Rankless on all ranks",
        ) from None


@contextlib.contextmanager
def _reserved(host: str) -> Iterator[Served]:
    """A port for the store, which nobody else gets while it is told: bound, and not listening yet."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((host, 0))
        yield Served(host, reserved.getsockname()[1])


def _invitation(told: HorovodWorker, served: Served) -> RendezvousParameters:
    return RendezvousParameters(
        kind="tcp",
        host=served.host,
        port=served.port,
        rank=told.rank,
        world_size=told.world_size,
        timeout_seconds=told.timeout_seconds,
    )
