"""`rankless status` beside real runs: what each worker does, however the user names the run."""

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.jobs import is_alive, kill_job, start_rankless, start_script, wait_until
from support.status_calls import (
    HOLDING,
    TRAINING,
    line_of,
    read_one,
    read_status,
    wait_for_ranks,
    wait_for_state,
)
from support.warm_runs import rankless

pytestmark = pytest.mark.slow
HERE, THERE = line_of(TRAINING, "here"), line_of(TRAINING, "there")


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder of a training whose rank 1 waits in its sixth step, until this module's tests have ended."""
    folder = tmp_path_factory.mktemp("held")
    job = start_script(TRAINING, "-n", "2", "--devices", "cpu", "--seed", "7", "--hang-timeout", "0", folder=folder)
    try:
        wait_for_ranks(job, folder, 1)
        wait_for_state(folder, 0, "waits")
        yield folder
    finally:
        (folder / "go").touch()
        _, messages = job.communicate(timeout=60)
        kill_job(job)
    assert job.returncode == 0, messages
    assert "10 steps" in messages


def test_each_worker_has_its_state_its_steps_and_its_line(held: Path):
    status = wait_for_state(held, 1, "idle")
    assert (status["script"], status["arguments"], status["seed"]) == ("script.py", [], 7)
    assert (status["outcome"], status["verdict"], status["exit_code"]) == ("running", "", None)
    assert (status["worker_count"], status["server_count"], status["steps"], status["servers"]) == (2, 0, 5, [])
    assert status["seconds"] > 0
    waiting, idle = status["workers"]
    assert [(each["rank"], each["steps"], each["device"]) for each in (waiting, idle)] == [(0, 5, "cpu"), (1, 5, "cpu")]
    assert (waiting["state"], waiting["operation"]) == ("waits", "a job's call")
    assert waiting["place"] == f"script.py:{THERE}"
    assert (idle["state"], idle["operation"]) == ("idle", "")
    assert idle["place"].startswith(f"hold() at script.py:{HERE}, called from script.py:")
    for worker in (waiting, idle):
        assert is_alive(worker["process_id"])
        assert Path(worker["log_file"]).is_file()
        assert worker["memory_bytes"] > 50 * 2**20
        assert worker["seconds_since_step"] > 0
        assert worker["exit_code"] is None
    assert is_alive(status["agent_process_id"])


def test_a_worker_that_makes_no_step_has_a_rate_that_falls(held: Path):
    first = read_one("log/latest", folder=held)
    later = read_one("log/latest", folder=held)
    for before, after in zip(first["workers"], later["workers"], strict=True):
        assert before["steps_per_second"] > after["steps_per_second"] > 0
    assert first["samples_per_second"] > later["samples_per_second"] > 0


def test_the_table_shows_the_same_for_people(held: Path):
    wait_until(lambda: read_one("log/latest", folder=held)["workers"][0]["seconds_since_step"] > 3)
    text = rankless("status", "log/latest", folder=held).stdout
    status = read_one("log/latest", folder=held)
    assert f"{status['run_id']}: script.py\n" in text
    assert re.search(r"runs since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC, for [\d.]+ s; agent \d+\n", text)
    assert re.search(r"  2 workers, 5 steps, [\d.,]+ samples/s; logs in log/\S+\n", text)
    assert re.search(rf"^ +0 +\d+ +waits +5 .* a job's call at script\.py:{THERE}; last step .* ago$", text, re.M)
    assert re.search(rf"^ +1 +\d+ +idle +5 .* hold\(\) at script\.py:{HERE}, called from .*$", text, re.M)


@pytest.mark.ci_sample(2)
@pytest.mark.parametrize("name", ["id", "folder", "log/latest", "log/latest/", "log/../log/latest", "run.json", "path"])
def test_a_run_has_many_names(name: str, held: Path):
    folder = (held / "log" / "latest").resolve()
    names = {"id": folder.name, "folder": f"log/{folder.name}", "run.json": "log/latest/run.json", "path": str(folder)}
    status = read_one(names.get(name, name), folder=held)
    assert (status["run_id"], status["outcome"]) == (folder.name, "running")


def test_the_id_is_enough_in_any_folder(held: Path, tmp_path: Path):
    run_id = (held / "log" / "latest").resolve().name
    assert read_one(run_id, folder=tmp_path)["run_id"] == run_id
    assert run_id in [each["run_id"] for each in read_status(folder=tmp_path)]


@pytest.mark.exhaustive
def test_two_runs_at_once_are_both_shown_and_one_can_be_chosen(held: Path, tmp_path: Path):
    job = start_script(HOLDING, "-n", "2", "--no-warm", "--quiet", "--hang-timeout", "0", folder=tmp_path)
    try:
        wait_for_ranks(job, tmp_path, 0, 1)
        # On a loaded machine a worker may not answer in time where it is.
        wait_until(lambda: all(each["place"] for each in read_one("log/latest", folder=tmp_path)["workers"]))
        own = read_one("log/latest", folder=tmp_path)
        shown = read_status(folder=tmp_path)
        ids = [each["run_id"] for each in shown]
        assert ids.index((held / "log" / "latest").resolve().name) < ids.index(own["run_id"])
        assert {worker["place"] for worker in own["workers"]} == {"script.py:4"}
        assert [worker["steps"] for worker in own["workers"]] == [0, 0]
        assert own["samples_per_second"] is None
    finally:
        kill_job(job)


@pytest.mark.exhaustive
def test_many_calls_at_once_get_the_same_answer_and_disturb_nothing(held: Path):
    calls = [start_rankless("status", "log/latest", "--json", folder=held) for _ in range(6)]
    texts = [call.communicate(timeout=60)[0] for call in calls]
    places = [[worker["place"] for worker in json.loads(text)["workers"]] for text in texts]
    assert [call.returncode for call in calls] == [0] * 6
    assert all(each[1].startswith(f"hold() at script.py:{HERE}") for each in places)
    assert read_one("log/latest", folder=held)["workers"][1]["steps"] == 5


def test_a_stopped_worker_is_called_stopped_and_the_command_does_not_wait_for_it(held: Path):
    process_id = read_one("log/latest", folder=held)["workers"][1]["process_id"]
    os.kill(process_id, signal.SIGSTOP)
    try:
        status = wait_for_state(held, 1, "stopped")
        assert status["workers"][1]["place"] == ""
        assert status["workers"][0]["place"] == f"script.py:{THERE}"
    finally:
        os.kill(process_id, signal.SIGCONT)
    wait_for_state(held, 1, "idle")


def test_watch_shows_a_run_until_it_has_ended(tmp_path: Path):
    script = HOLDING.replace("signal.pause()", "while not os.path.exists('go'): pass")
    job = start_script(script, "-n", "1", "--no-warm", "--quiet", folder=tmp_path)
    watch = None
    try:
        wait_for_ranks(job, tmp_path, 0)
        watch = start_rankless("status", "--json", "--watch", "0.1", "log/latest", folder=tmp_path)
        assert watch.stdout is not None
        shown = [json.loads(watch.stdout.readline()) for _ in range(3)]
        assert [each["outcome"] for each in shown] == ["running"] * 3
        assert shown[0]["seconds"] < shown[1]["seconds"] < shown[2]["seconds"]
        assert shown[2]["workers"][0]["state"] == "computes"
        (tmp_path / "go").touch()
        rest, messages = watch.communicate(timeout=60)
        last = json.loads(rest.splitlines()[-1])
        assert (watch.returncode, messages, last["outcome"], last["exit_code"]) == (0, "", "succeeded", 0)
    finally:
        kill_job(job)
        if watch is not None:
            kill_job(watch)


@pytest.mark.exhaustive
def test_watch_ends_with_a_run_whose_launcher_leaves_no_summary(tmp_path: Path):
    (tmp_path / "script.py").write_text(HOLDING.replace("signal.pause()", "while not os.path.exists('go'): pass"))
    job = start_rankless("torchrun", "--nproc-per-node", "1", "--log-dir", "logs", "script.py", folder=tmp_path)
    watch = None
    try:
        wait_for_ranks(job, tmp_path, 0)
        (run_id,) = [path.name for path in (tmp_path / "logs").iterdir() if not path.is_symlink()]
        watch = start_rankless("status", "--watch", "0.1", f"logs/{run_id}", folder=tmp_path)
        assert watch.stdout is not None
        assert watch.stdout.readline() == f"{run_id}: script.py\n"
        (tmp_path / "go").touch()
        text, messages = watch.communicate(timeout=60)
        assert (watch.returncode, messages) == (0, "")
        last = text.strip().split("\n\n")[-1].splitlines()
        assert last[0] == f"{run_id}: script.py"
        assert last[1].endswith("; it has ended, and its launcher writes no run.json")
        assert rankless("status", f"logs/{run_id}", folder=tmp_path).returncode == 2
    finally:
        kill_job(job)
        if watch is not None:
            kill_job(watch)


@pytest.mark.exhaustive
def test_a_worker_in_c_code_that_keeps_the_lock_gets_no_signal(tmp_path: Path):
    script = HOLDING.replace("signal.pause()", "import ctypes\nctypes.PyDLL(None).pause()\nopen('woken', 'w')")
    job = start_script(script, "-n", "1", "--no-warm", "--quiet", "--hang-timeout", "0", folder=tmp_path)
    try:
        wait_for_ranks(job, tmp_path, 0)
        worker = wait_for_state(tmp_path, 0, "idle")["workers"][0]
        assert worker["place"] == ""
        assert is_alive(worker["process_id"])
        assert not (tmp_path / "woken").exists()
    finally:
        kill_job(job)


LAUNCHERS = {
    "torchrun": ("torchrun", "--nproc-per-node", "2", "--log-dir", "logs", "script.py"),
    "fleetrun": ("fleetrun", "--nproc_per_node=2", "--log_dir=logs", "script.py"),
    "horovodrun": ("horovodrun", "-np", "2", "python", "script.py"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_runs_of_other_launchers_are_shown_too(launcher: str, tmp_path: Path):
    (tmp_path / "script.py").write_text(
        HOLDING.replace("RANK", "HOROVOD_RANK") if launcher == "horovodrun" else HOLDING
    )
    job = start_rankless(*LAUNCHERS[launcher], folder=tmp_path)
    try:
        wait_for_ranks(job, tmp_path, 0, 1)
        (status,) = [each for each in read_status(folder=tmp_path) if each["agent_process_id"] == job.pid]
        assert [worker["rank"] for worker in status["workers"]] == [0, 1]
        assert {worker["state"] for worker in status["workers"]} <= {"idle", "computes"}
        again = read_one(status["log_folder"], folder=tmp_path)
        assert again["run_id"] == status["run_id"]
    finally:
        kill_job(job)


@pytest.mark.exhaustive
def test_a_run_of_a_notebook_or_of_no_script_is_shown_by_its_code(tmp_path: Path):
    command = ("run", "-n", "1", "--no-warm", "-q", "-c", HOLDING, "--name", "a b")
    job = start_rankless(*command, folder=tmp_path)
    try:
        wait_for_ranks(job, tmp_path, 0)
        status = read_one("log/latest", folder=tmp_path)
        assert (status["script"], status["arguments"]) == ("-c " + HOLDING, ["--name", "a b"])
        lines = rankless("status", "log/latest", folder=tmp_path).stdout.splitlines()
        assert lines[0].startswith(f"{status['run_id']}: -c import os, signal open(")
    finally:
        kill_job(job)


def test_a_script_that_has_closed_all_descriptors_has_a_state_and_no_place(tmp_path: Path):
    script = HOLDING.replace("signal.pause()", "os.closerange(3, 200)\nopen('closed', 'w').close()\nsignal.pause()")
    job = start_script(script, "-n", "1", "--no-warm", "--quiet", "--hang-timeout", "0", folder=tmp_path)
    try:
        wait_until(lambda: (tmp_path / "closed").exists())
        assert wait_for_state(tmp_path, 0, "idle")["workers"][0]["place"] == ""
    finally:
        kill_job(job)


@pytest.mark.exhaustive
def test_a_worker_whose_script_has_ended_and_whose_process_goes_on_says_so(tmp_path: Path):
    script = "import atexit, time\n" + HOLDING.replace("signal.pause()", "atexit.register(lambda: time.sleep(1000))")
    job = start_script(script, "-n", "1", "--no-warm", "--quiet", "--hang-timeout", "0", folder=tmp_path)
    try:
        wait_for_ranks(job, tmp_path, 0)
        wait_until(
            lambda: read_one("log/latest", folder=tmp_path)["workers"][0]["place"] == "the end of its script",
            seconds=60,
        )
        assert read_one("log/latest", folder=tmp_path)["workers"][0]["exit_code"] is None
    finally:
        kill_job(job)


@pytest.mark.exhaustive
def test_a_stopped_agent_is_read_as_well(tmp_path: Path):
    job = start_script(HOLDING, "-n", "1", "--no-warm", "--quiet", "--hang-timeout", "0", folder=tmp_path)
    try:
        wait_for_ranks(job, tmp_path, 0)
        wait_for_state(tmp_path, 0, "idle")
        os.kill(job.pid, signal.SIGSTOP)
        assert read_one("log/latest", folder=tmp_path)["workers"][0]["place"] == "script.py:4"
    finally:
        os.kill(job.pid, signal.SIGCONT)
        kill_job(job)


@pytest.mark.exhaustive
def test_a_run_whose_log_folder_is_gone_is_found_by_its_id(tmp_path: Path):
    job = start_script(HOLDING, "-n", "1", "--no-warm", "--quiet", "--hang-timeout", "0", folder=tmp_path)
    try:
        wait_for_ranks(job, tmp_path, 0)
        run_id = read_one("log/latest", folder=tmp_path)["run_id"]
        (tmp_path / "log").rename(tmp_path / "moved")
        assert read_one(run_id, folder=tmp_path)["outcome"] == "running"
        assert rankless("status", "log/latest", folder=tmp_path).returncode == 2
        moved = read_one("moved/latest", folder=tmp_path)
        assert (moved["run_id"], moved["outcome"]) == (run_id, "running")
    finally:
        kill_job(job)


@pytest.mark.exhaustive
def test_the_agent_survives_a_status_that_is_killed(held: Path):
    call = start_rankless("status", "log/latest", "--watch", "0.1", folder=held)
    assert call.stdout is not None
    assert call.stdout.readline()
    call.kill()
    call.communicate()
    assert call.returncode == -signal.SIGKILL
    assert read_one("log/latest", folder=held)["outcome"] == "running"


def test_ctrl_c_ends_watching(held: Path):
    call = start_rankless("status", "--watch", folder=held)
    assert call.stdout is not None
    assert call.stdout.readline()
    call.send_signal(signal.SIGINT)
    _, messages = call.communicate(timeout=60)
    assert (call.returncode, messages) == (130, "rankless: ended by SIGINT\n")
    assert is_alive(read_one("log/latest", folder=held)["agent_process_id"])
