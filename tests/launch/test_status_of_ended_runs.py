"""`rankless status` of runs that have ended, or whose agent is gone, elsewhere or of another version."""

import json
import os
import platform
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.jobs import is_alive, kill_job, start_script, wait_until
from support.status_calls import HOLDING, read_one, read_status, wait_for_ranks
from support.warm_runs import rankless, run_script

from rankless.records.run_json_format import decode_run_summary

pytestmark = pytest.mark.slow
QUICK = ("-n", "2", "--no-warm", "--quiet")


def summary_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "log" / "latest" / "run.json").read_text())


def change_summary(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    summary = summary_of(folder)
    change(summary)
    (folder / "log" / "latest" / "run.json").write_text(json.dumps(summary))


def test_a_run_that_has_succeeded_says_so_and_names_no_agent(tmp_path: Path):
    job = run_script("print('done')", *QUICK, "--seed", "3", folder=tmp_path)
    assert job.returncode == 0
    assert summary_of(tmp_path)["agent"] is None
    status = read_one("log/latest", folder=tmp_path)
    assert (status["outcome"], status["exit_code"], status["verdict"]) == ("succeeded", 0, "all workers ended")
    assert (status["script"], status["seed"], status["worker_count"]) == ("script.py", 3, 2)
    assert [(worker["state"], worker["exit_code"]) for worker in status["workers"]] == [("ended", 0)] * 2
    assert status["agent_process_id"] is None
    assert status["run_id"] not in [each["run_id"] for each in read_status(folder=tmp_path)]
    text = rankless("status", status["run_id"], folder=tmp_path).stdout
    assert text.startswith(f"{status['run_id']}: script.py\n  started ")
    assert ", exit code 0: all workers ended\n" in text


def test_a_run_that_has_failed_is_answered_with_its_root_cause(tmp_path: Path):
    script = "import os, time\nwhile os.environ['RANK'] != '1':\n    time.sleep(0.1)\nraise ValueError('no data')\n"
    run_script(script, *QUICK, folder=tmp_path)
    status = read_one("log/latest", folder=tmp_path)
    assert (status["outcome"], status["exit_code"]) == ("failed", 1)
    assert status["verdict"] == "rank 1 raised ValueError: no data"
    assert "failed after " in rankless("status", "log/latest", folder=tmp_path).stdout


def test_a_run_that_ctrl_c_has_ended_is_interrupted(tmp_path: Path):
    job = start_script(HOLDING, *QUICK, folder=tmp_path)
    try:
        wait_for_ranks(job, tmp_path, 0, 1)
        job.send_signal(signal.SIGINT)
        job.communicate(timeout=60)
    finally:
        kill_job(job)
    status = read_one("log/latest", folder=tmp_path)
    assert (status["outcome"], status["exit_code"]) == ("interrupted", 130)


def test_a_run_whose_agent_was_killed_is_called_killed(tmp_path: Path):
    job = start_script(HOLDING, *QUICK, folder=tmp_path)
    try:
        wait_for_ranks(job, tmp_path, 0, 1)
        running = read_one("log/latest", folder=tmp_path)
    finally:
        kill_job(job)
    wait_until(lambda: not any(is_alive(worker["process_id"]) for worker in running["workers"]))
    status = read_one("log/latest", folder=tmp_path)
    assert (status["outcome"], status["exit_code"], status["run_id"]) == ("killed", None, running["run_id"])
    assert status["verdict"] == f"its agent, process {job.pid}, is gone and has left no verdict"
    assert status["run_id"] not in [each["run_id"] for each in read_status(folder=tmp_path)]


AGENT = {"process_id": 1, "start_ticks": 1, "host": "elsewhere", "system": "another", "descriptor": 5}


@pytest.fixture
def interrupted_summary(tmp_path: Path) -> Path:
    """Return the folder of a run that has ended, whose `run.json` says that it runs."""
    run_script("", *QUICK, folder=tmp_path)
    change_summary(tmp_path, lambda summary: summary.update(outcome="running", verdict="", exit_code=None))
    return tmp_path


@pytest.mark.exhaustive
def test_a_process_that_has_got_the_id_of_an_agent_is_not_taken_for_it(interrupted_summary: Path, tmp_path: Path):
    other = tmp_path / "other"
    other.mkdir()
    job = start_script(HOLDING, *QUICK, folder=other)
    try:
        wait_for_ranks(job, other, 0, 1)
        agent = summary_of(other)["agent"]
        assert (agent["process_id"], agent["host"]) == (job.pid, platform.node())
        # The very process, and so its record, is another run's.
        change_summary(interrupted_summary, lambda summary: summary.update(agent=agent))
        status = read_one("log/latest", folder=interrupted_summary)
        assert (status["outcome"], status["run_id"] == read_one("log/latest", folder=other)["run_id"]) == (
            "unknown",
            False,
        )
        # The id is used again by a process that started later.
        agent["start_ticks"] -= 1
        change_summary(interrupted_summary, lambda summary: summary.update(agent=agent))
        assert read_one("log/latest", folder=interrupted_summary)["outcome"] == "killed"
    finally:
        kill_job(job)


def test_a_run_of_an_earlier_version_that_may_go_on_is_unknown(interrupted_summary: Path):
    def remove_fields(summary: dict[str, Any]) -> None:
        for name in ("agent", "servers", "server_restarts"):
            del summary[name]

    change_summary(interrupted_summary, remove_fields)
    status = read_one("log/latest", folder=interrupted_summary)
    assert status["outcome"] == "unknown"
    assert "earlier version" in status["verdict"]
    change_summary(interrupted_summary, lambda summary: summary.update(outcome="succeeded", exit_code=0))
    assert read_one("log/latest", folder=interrupted_summary)["outcome"] == "succeeded"
    assert decode_run_summary((interrupted_summary / "log" / "latest" / "run.json").read_bytes()).agent is None


def test_a_run_of_another_host_names_that_host(interrupted_summary: Path):
    change_summary(interrupted_summary, lambda summary: summary.update(agent=AGENT))
    status = read_one("log/latest", folder=interrupted_summary)
    assert status["outcome"] == "unknown"
    assert status["verdict"] == "its agent was process 1 of the host elsewhere: call rankless status there"
    assert "call rankless status there" in rankless("status", "log/latest", folder=interrupted_summary).stdout


@pytest.mark.ci_sample(3)
@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"outcome": 3}', '{"outcome": "running"}', "\0" * 100, '{"script": 5}', "null"]
)
def test_a_file_that_is_no_summary_is_an_error(content: str, tmp_path: Path):
    (tmp_path / "run.json").write_text(content)
    for name in (".", "run.json"):
        done = rankless("status", name, folder=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert "expected: the summary of a run in " in done.stderr


@pytest.mark.ci_sample(4)
@pytest.mark.parametrize(
    "name", ["", "nonsense", "log", "log/latest", "log/nothing", "/", "script.py", "x" * 5000, "a/" * 3000, "loop", "-"]
)
def test_a_name_of_no_run_is_an_error_with_a_fix(name: str, tmp_path: Path):
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "latest").symlink_to("gone")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "script.py").touch()
    (tmp_path / "running.json").touch()
    done = rankless("status", name, folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "expected: RUN: the id of a run, its log folder, or its run.json\n" in done.stderr
    assert re.search(
        "fix:      (name one that runs: |no run is in progress; name one of the folders in log)", done.stderr
    )


def test_other_files_in_a_log_folder_are_no_summaries(interrupted_summary: Path):
    change_summary(interrupted_summary, lambda summary: summary.update(outcome="succeeded", exit_code=0))
    for name in ("running.json", "run-old.json", "run.json.new"):
        (interrupted_summary / "log" / "latest" / name).write_text("{")
    assert read_one("log/latest", folder=interrupted_summary)["outcome"] == "succeeded"


def test_the_variable_for_log_folders_counts_for_ids(tmp_path: Path):
    run_script("", *QUICK, folder=tmp_path, RANKLESS_LOG_DIR="elsewhere")
    (run_id,) = [path.name for path in (tmp_path / "elsewhere").iterdir() if not path.is_symlink()]
    assert read_one(run_id, folder=tmp_path, RANKLESS_LOG_DIR="elsewhere")["outcome"] == "succeeded"
    assert read_one("latest", folder=tmp_path, RANKLESS_LOG_DIR="elsewhere")["run_id"] == run_id
    assert rankless("status", run_id, folder=tmp_path).returncode == 2


def test_a_summary_that_nobody_may_read_is_an_error(interrupted_summary: Path):
    path = interrupted_summary / "log" / "latest" / "run.json"
    path.unlink()
    path.mkdir()
    assert "expected: the summary of a run in " in rankless("status", "log/latest", folder=interrupted_summary).stderr
    assert os.listdir(path) == []
