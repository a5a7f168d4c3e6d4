"""Joint participants, as a process without an agent has them."""

import pytest

from rankless.context.joint_events import JointEvents, JointParticipant

CLOSED: list[str] = []


class Failing(JointParticipant):
    def close(self) -> None:
        CLOSED.append("failing")
        raise ValueError("no connection")


class Second(JointParticipant):
    def close(self) -> None:
        CLOSED.append("second")


def test_all_participants_are_closed_also_if_one_raises_an_error():
    events = JointEvents()
    events._participants |= {"failing": Failing(), "second": Second()}
    with pytest.raises(ValueError, match="no connection"):
        events.close()
    assert CLOSED == ["failing", "second"]
    events.close()
    assert CLOSED == ["failing", "second"]
