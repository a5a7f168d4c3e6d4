"""What an agent publishes about its run, and who takes it for a run."""

import os
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from rankless.launch.live_run_publisher import LiveRunPage
from rankless.launch.status.run_lookup import find_running_runs, read_live_run
from rankless.records.events import Exited, Notice, ScriptFinished, Started
from rankless.records.live_run import LAYOUT, LiveRun, LiveWorker, ProcessRow

SIZE = 1 << 16


@pytest.fixture
def page() -> Iterator[LiveRunPage]:
    page = LiveRunPage(SIZE)
    yield page
    page.close()


def make_run(**changes: Any) -> LiveRun:
    run = LiveRun(
        layout=LAYOUT,
        process_id=os.getpid(),
        run_id=f"test-{os.getpid()}",
        log_folder="/log/run",
        script="train.py",
        arguments=(),
        seed=None,
        started="2026-11-27T00:00:00+00:00",
        started_monotonic=0.0,
        host=0,
        host_names=("",),
        workers=tuple(LiveWorker(rank=rank, host=0, device="cpu", log_file="") for rank in range(2)),
        process_counts={"server": 1},
    )
    return msgspec.structs.replace(run, **changes)


def published(page: LiveRunPage) -> LiveRun | None:
    assert page.descriptor is not None
    return read_live_run(os.getpid(), page.descriptor)


def test_a_run_is_found_once_as_long_as_its_page_is_open(page: LiveRunPage):
    assert published(page) is None
    page.begin(make_run())
    assert [run.run_id for run in find_running_runs()].count(make_run().run_id) == 1
    page.close()
    assert make_run().run_id not in [run.run_id for run in find_running_runs()]


def test_starts_and_ends_of_workers_and_servers_are_published_together(page: LiveRunPage):
    page.begin(make_run())
    page.receive(Started(rank=1, time_ns=0, pid=77, log_file=""))
    page.receive(ScriptFinished(rank=1, time_ns=0, exit_code=0))
    page.receive(Exited(rank=0, time_ns=0, exit_code=-9))
    page.receive(Notice(rank=0, time_ns=0, text="not about a process"))
    page.receive(Started(rank=5, time_ns=0, pid=1, log_file=""))  # no rank of the run
    page.set_processes(
        [ProcessRow(role="server", index=0, process_id=8, address="ipc:///s", log_file="s.log", restarts=2)]
    )
    before = published(page)
    assert before is not None
    assert (before.processes, before.workers[1].process_id) == ((), None)
    page.publish()
    after = published(page)
    assert after is not None
    found = [(each.process_id, each.has_finished, each.exit_code) for each in after.workers]
    assert found == [(None, False, -9), (77, True, None)]
    assert [(each.process_id, each.restarts, each.stage) for each in after.processes] == [(8, 2, "serves")]
    assert after.processes[0].log_file == os.path.abspath("s.log")


def test_a_record_of_another_layout_or_of_another_process_is_no_run(page: LiveRunPage):
    page.begin(make_run(layout=LAYOUT + 1))
    assert published(page) is None
    page.begin(make_run(process_id=os.getpid() + 1))
    assert published(page) is None
    page.begin(make_run())
    assert published(page) is not None


def test_a_run_with_an_argument_that_is_no_text_has_a_record(page: LiveRunPage):
    page.begin(make_run(arguments=("\udcff",)))
    assert published(page) is not None


def test_a_run_that_cannot_be_written_goes_on_without_a_record(page: LiveRunPage):
    page.begin(make_run(arguments=("x" * SIZE,)))
    assert published(page) is None
    page.begin(make_run())
    assert published(page) is not None


def test_descriptors_of_other_files_are_no_runs(page: LiveRunPage):
    page.begin(make_run())
    with open(os.devnull, "rb") as file:
        assert read_live_run(os.getpid(), file.fileno()) is None
    assert read_live_run(os.getpid(), 10**6) is None
    assert page.descriptor is not None
    assert read_live_run(2**22 + 1, page.descriptor) is None
