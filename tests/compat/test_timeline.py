"""The timeline without processes: lanes that nest, waiting for a device's data and for a group's others."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankless.compat.horovod.engine.coordinator import Coordinator
from rankless.compat.horovod.engine.messages import Request
from rankless.compat.horovod.engine.timeline import Timeline


class Late:
    """An event that has happened when it is asked about for the n-th time."""

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


def written(timeline: Timeline, folder: Path) -> list[tuple[str, str]]:
    """Key and what begins, or the empty word where something ends; ranks' marks left out."""
    timeline.stop()
    events = json.loads((folder / "timeline.json").read_text())[:-1]
    keys = {one["pid"]: one["args"]["name"] for one in events if one["ph"] == "M"}
    return [(keys[one["pid"]], one.get("name", "")) for one in events if one["ph"] in "BE"]


def test_who_waits_for_its_own_data_and_who_for_the_others(timeline: Timeline, tmp_path: Path):
    timeline.await_data({"slow": Late(3), "quick": Late(1)})
    assert written(timeline, tmp_path) == [
        ("slow", "WAIT_FOR_DATA"),
        ("quick", "WAIT_FOR_DATA"),
        ("quick", ""),
        ("quick", "WAIT_FOR_OTHER_TENSOR_DATA"),
        ("slow", ""),
        ("slow", "WAIT_FOR_OTHER_TENSOR_DATA"),
        ("slow", ""),
        ("quick", ""),
    ]


def test_a_groups_member_waits_for_the_others(timeline: Timeline, tmp_path: Path):
    made = Coordinator(1, combine=lambda *_: b"", timeline=timeline)
    for name in ("x_1of2", "x_2of2"):
        made.submit(0, Request(kind="allreduce", key=name, group="x", group_size=2), b"", 0.0)
    assert written(timeline, tmp_path) == [
        ("x_1of2", "NEGOTIATE_ALLREDUCE"),
        ("x_1of2", ""),
        ("x_1of2", "WAIT_FOR_OTHER_TENSOR_DATA"),
        ("x_2of2", "NEGOTIATE_ALLREDUCE"),
        ("x_2of2", ""),
        ("x_1of2", ""),
    ]


def test_a_name_submitted_again_before_its_end_has_a_lane_of_its_own(timeline: Timeline, tmp_path: Path):
    timeline.decided("x", "allreduce", is_queued=True)
    timeline.started(["x"])
    timeline.negotiating("x", "allreduce", 1)
    timeline.finished(["x"])
    timeline.negotiating("x", "allreduce", 0)
    timeline.negotiated("x", is_whole=True)
    timeline.stop()
    events = json.loads((tmp_path / "timeline.json").read_text())
    lanes = {lane: [one["ph"] for one in events if one.get("tid") == lane] for lane in (0, 1)}
    assert lanes == {0: ["B", "X", "X", "E"], 1: ["B", "B", "E", "E"]}


def test_what_began_before_the_start_does_not_end(timeline: Timeline, tmp_path: Path):
    timeline.started(["x"])
    timeline.finished(["x"])
    timeline.negotiated("x", is_whole=True)
    assert written(timeline, tmp_path) == []


def test_nothing_is_written_before_and_after(tmp_path: Path):
    timeline = Timeline()
    with timeline.activity(["x"], "GLOO_ALLREDUCE"):
        timeline.negotiating("x", "allreduce", 0)
    timeline.start(str(tmp_path / "timeline.json"), mark_cycles=True)
    timeline.stop()
    timeline.cycle()
    timeline.await_data({"x": Late(1)})
    assert json.loads((tmp_path / "timeline.json").read_text()) == [{}]


def test_what_is_under_way_at_the_stop_ends_there(timeline: Timeline, tmp_path: Path):
    timeline.negotiating("barrier", "barrier", 1)
    timeline.decided("allreduce.x", "allreduce", is_queued=True)
    assert written(timeline, tmp_path) == [
        ("barrier", "NEGOTIATE_BARRIER"),
        ("allreduce.x", "ALLREDUCE"),
        ("allreduce.x", "QUEUE"),
        ("barrier", ""),
        ("allreduce.x", ""),
        ("allreduce.x", ""),
    ]
    timeline.negotiated("barrier", is_whole=True)
