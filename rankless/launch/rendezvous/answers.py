"""Host 0's requests to the hosts that have joined: it waits for their answers, and tells them of failures."""

import contextlib
import selectors
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar

from rankless.errors import JoinError, RanklessError
from rankless.launch.rendezvous.control_server import ControlServer, HostDisconnected, HostReport, HostReported
from rankless.launch.rendezvous.messages import JoinRefused
from rankless.launch.signals import Interrupts, RendezvousInterrupted

ANSWER_TIMEOUT_SECONDS = 20.0
"""For one host's answer. An overloaded host may be late."""
_POLL_SECONDS = 0.05
INTERRUPTED = JoinRefused(expected="a job that starts", found="host 0 received a signal", fix="start it again")

_Answer = TypeVar("_Answer", bound=HostReport)


def receive_answers(
    server: ControlServer,
    kinds: tuple[type[_Answer], ...],
    hosts: Collection[int],
    *,
    names: Sequence[str],
    interrupts: Interrupts,
    own_answer: Callable[[], _Answer | None] = lambda: None,
) -> dict[int, _Answer]:
    """Return the answers of these hosts. Those that are not there in time are missing.

    Args:
        server: The connections to the hosts.
        kinds: The classes of the answers.
        hosts: The indices of the hosts; 0 for this one.
        names: The name of every host.
        interrupts: The signals of this process.
        own_answer: Returns this host's answer once it has one.

    Raises:
        JoinError: A host leaves.
        RendezvousInterrupted: On a signal. The other hosts receive it too.
    """
    found: dict[int, _Answer] = {}
    deadline = time.monotonic() + ANSWER_TIMEOUT_SECONDS
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        selector.register(interrupts, selectors.EVENT_READ)
        while (missing := set(hosts) - found.keys()) and time.monotonic() < deadline:
            selector.select(_POLL_SECONDS)
            if numbers := interrupts.read():
                server.broadcast(INTERRUPTED)
                raise RendezvousInterrupted(numbers[0])
            for event in server.poll(time.monotonic()):
                if isinstance(event, HostReported) and isinstance(event.message, kinds):
                    found[event.host] = event.message
                elif isinstance(event, HostDisconnected):
                    raise JoinError(
                        expected="all hosts to stay in the job until it starts",
                        found=f"{names[event.host]} left: {event.reason}",
                        fix="look at its terminal, or its agent's messages here; then start the job again",
                    )
            own = own_answer() if 0 in missing else None
            if own is not None:
                found[0] = own
    return found


@contextlib.contextmanager
def announced_failures(server: ControlServer) -> Iterator[None]:
    """Send the other hosts an error that is raised within the context."""
    try:
        yield
    except RanklessError as error:
        server.broadcast(JoinRefused(expected=str(error.expected), found=str(error.found), fix=error.fix))
        raise
