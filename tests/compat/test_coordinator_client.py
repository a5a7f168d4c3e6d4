"""A rank's desk without processes: what it says by numbers, and what it describes anew when it is asked."""

import selectors
import socket
from collections.abc import Iterator, Sequence

import pytest

from rankless.compat.horovod.engine.coordinator_client import Ended, Spoke
from rankless.compat.horovod.engine.messages import (
    Again,
    Execute,
    FromCoordinator,
    FromRank,
    Item,
    Request,
    Resend,
    Submit,
    decode_from_rank,
    encode,
)


class Wire:
    """A link whose other side is the test."""

    has_more_to_send = False

    def __init__(self) -> None:
        self._ends = socket.socketpair()
        self.said: list[FromRank] = []
        self.answers: list[FromCoordinator] = []

    def fileno(self) -> int:
        return self._ends[0].fileno()

    def keep(self, said: bytes, _values: Sequence[bytes] = ()) -> None:
        self.said.append(decode_from_rank(said))

    send = keep

    def flush(self) -> None:
        return

    def receive(self) -> Iterator[tuple[bytes, bytes]]:
        answers, self.answers = self.answers, []
        return iter([(encode(one), b"") for one in answers])

    def close(self) -> None:
        for end in self._ends:
            end.close()


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire()
    yield made
    made.close()


def desk(wire: Wire, capacity: int) -> Spoke:
    return Spoke(wire, selectors.SelectSelector(), capacity=capacity)  # type: ignore[arg-type]  # it is told all it asks for


def request(name: str) -> Request:
    return Request(kind="allreduce", key=name)


def submit(made: Spoke, *names: str) -> None:
    for name in names:
        made.submit((0, name), request(name), b"")


def executed(made: Spoke, wire: Wire, **numbers: int) -> None:
    wire.answers.append(Execute(0, tuple(Item(key=name, number=number) for name, number in numbers.items())))
    list(made.told(is_idle=True))


def test_what_has_a_number_is_called_by_it(wire: Wire):
    made = desk(wire, 10)
    submit(made, "a")
    executed(made, wire, a=7)
    submit(made, "a")
    assert wire.said == [Submit(request("a")), Again(7)]


def test_what_is_asked_for_is_described_though_its_number_had_to_make_room_meanwhile(wire: Wire):
    made = desk(wire, 1)
    submit(made, "a", "b")
    executed(made, wire, a=0, b=1)
    submit(made, "a", "c", "d")
    executed(made, wire, c=2, d=3)  # at most twice the capacity is kept: a's and b's numbers go
    wire.said.clear()
    wire.answers.append(Resend(0))
    list(made.told(is_idle=True))
    assert wire.said == [Submit(request("a"))]


def test_a_number_that_was_never_said_ends_it(wire: Wire):
    made = desk(wire, 1)
    submit(made, "a")
    wire.answers.append(Resend(5))
    with pytest.raises(Ended, match="asks for number 5, which is not known here"):
        list(made.told(is_idle=True))
