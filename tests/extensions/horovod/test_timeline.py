"""The timeline without processes: nested events, waiting for a device's data and for others of a group."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankless.extensions.horovod.engine.coordinator import Coordinator
from rankless.extensions.horovod.engine.messages import RequestMetadata
from rankless.extensions.horovod.engine.timeline import Timeline


class Late:
    """A device event that is reached at the n-th query."""

    def __init__(self, times: int) -> None:
        self._left = times

    def query(self) -> bool:
        self._left -= 1
        return self._left <= 0


@pytest.fixture
def timeline(tmp_path: Path) -> Iterator[Timeline]:
    made = Timeline()
    made.start(str(tmp_path / "timeline.json"))
    yield made
    made.stop()


def read_events(timeline: Timeline, folder: Path) -> list[tuple[str, str]]:
    """The key and name of each event, with an empty name where it ends. Leaves the ranks' marks out."""
    timeline.stop()
    events = json.loads((folder / "timeline.json").read_text())[:-1]
    keys = {one["pid"]: one["args"]["name"] for one in events if one["ph"] == "M"}
    return [(keys[one["pid"]], one.get("name", "")) for one in events if one["ph"] in "BE"]


def test_an_operation_waits_for_its_own_data_and_then_for_the_others(timeline: Timeline, tmp_path: Path):
    timeline.wait_for_data({"slow": Late(3), "quick": Late(1)})
    assert read_events(timeline, tmp_path) == [
        ("slow", "WAIT_FOR_DATA"),
        ("quick", "WAIT_FOR_DATA"),
        ("quick", ""),
        ("quick", "WAIT_FOR_OTHER_TENSOR_DATA"),
        ("slow", ""),
        ("slow", "WAIT_FOR_OTHER_TENSOR_DATA"),
        ("slow", ""),
        ("quick", ""),
    ]


def test_a_member_of_a_group_waits_for_the_others(timeline: Timeline, tmp_path: Path):
    coordinator = Coordinator(1, combine=lambda *_: b"", timeline=timeline)
    for name in ("x_1of2", "x_2of2"):
        coordinator.submit(0, RequestMetadata(kind="allreduce", key=name, group="x", group_size=2), b"", 0.0)
    assert read_events(timeline, tmp_path) == [
        ("x_1of2", "NEGOTIATE_ALLREDUCE"),
        ("x_1of2", ""),
        ("x_1of2", "WAIT_FOR_OTHER_TENSOR_DATA"),
        ("x_2of2", "NEGOTIATE_ALLREDUCE"),
        ("x_2of2", ""),
        ("x_1of2", ""),
    ]


def test_a_name_submitted_again_before_its_end_uses_another_thread_id(timeline: Timeline, tmp_path: Path):
    timeline.begin_execution("x", "allreduce", is_queued=True)
    timeline.end_queue(["x"])
    timeline.record_submission("x", "allreduce", 1)
    timeline.end_execution(["x"])
    timeline.record_submission("x", "allreduce", 0)
    timeline.end_negotiation("x", is_whole=True)
    timeline.stop()
    events = json.loads((tmp_path / "timeline.json").read_text())
    threads = {thread_id: [one["ph"] for one in events if one.get("tid") == thread_id] for thread_id in (0, 1)}
    assert threads == {0: ["B", "X", "X", "E"], 1: ["B", "B", "E", "E"]}


def test_an_event_that_began_before_the_start_has_no_end(timeline: Timeline, tmp_path: Path):
    timeline.end_queue(["x"])
    timeline.end_execution(["x"])
    timeline.end_negotiation("x", is_whole=True)
    assert read_events(timeline, tmp_path) == []


def test_nothing_is_written_before_the_start_and_after_the_stop(tmp_path: Path):
    timeline = Timeline()
    with timeline.activity(["x"], "GLOO_ALLREDUCE"):
        timeline.record_submission("x", "allreduce", 0)
    timeline.start(str(tmp_path / "timeline.json"), mark_cycles=True)
    timeline.stop()
    timeline.mark_cycle()
    timeline.wait_for_data({"x": Late(1)})
    assert json.loads((tmp_path / "timeline.json").read_text()) == [{}]


def test_events_that_are_open_at_the_stop_end_there(timeline: Timeline, tmp_path: Path):
    timeline.record_submission("barrier", "barrier", 1)
    timeline.begin_execution("allreduce.x", "allreduce", is_queued=True)
    assert read_events(timeline, tmp_path) == [
        ("barrier", "NEGOTIATE_BARRIER"),
        ("allreduce.x", "ALLREDUCE"),
        ("allreduce.x", "QUEUE"),
        ("barrier", ""),
        ("allreduce.x", ""),
        ("allreduce.x", ""),
    ]
    timeline.end_negotiation("barrier", is_whole=True)


def test_the_file_has_every_event_while_the_timeline_runs(timeline: Timeline, tmp_path: Path):
    path = tmp_path / "timeline.json"
    for count, name in enumerate(("first", "second"), 1):
        timeline.record_submission(name, "allreduce", 0)
        begun = [one for one in json.loads(path.read_text().rstrip(",\n") + "]") if one["ph"] == "B"]
        assert [one["name"] for one in begun] == ["NEGOTIATE_ALLREDUCE"] * count
