"""No process stays behind, whichever process dies and however it dies."""

import os
import signal
from pathlib import Path

import psutil
import pytest
from support.jobs import is_alive, kill_job, read_process_ids, start_script, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="the guard's tree is Linux's"),
]

MARK = """
import os, sys, time, signal, subprocess
def mark(name, pid=None):
    with open(f"{name}.pid", "w") as f:
        f.write(f"{pid or os.getpid()}\\n")
RANK = os.environ["RANK"]
"""

WORKERS = {
    "idle": "mark('worker' + RANK)\ntime.sleep(600)",
    "holding the interpreter lock": (
        "import ctypes\nmark('worker' + RANK)\nctypes.PyDLL(None).sleep(600)"  # PyDLL keeps the lock
    ),
    "stopped": "mark('worker' + RANK)\nos.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(600)",
    "ignoring signals": (
        "for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.signal(n, signal.SIG_IGN)\n"
        "mark('worker' + RANK)\ntime.sleep(600)"
    ),
    "with a subprocess": (
        "p = subprocess.Popen(['sleep', '600'])\nmark('child' + RANK, p.pid)\nmark('worker' + RANK)\ntime.sleep(600)"
    ),
    "with a daemon in a session of its own": (
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "        mark('daemon' + RANK)\n"
        "        time.sleep(600)\n"
        "    os._exit(0)\n"
        "mark('worker' + RANK)\ntime.sleep(600)"
    ),
}


# The others are met in other tests here, and in the fault matrix.
IN_CI = {"holding the interpreter lock", "stopped", "ignoring signals", "with a daemon in a session of its own"}
KINDS = [each if each in IN_CI else pytest.param(each, marks=pytest.mark.exhaustive) for each in WORKERS]


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_no_process_survives_a_killed_agent_by_two_seconds(kind: str, tmp_path: Path) -> None:
    job = start_script(MARK + WORKERS[kind], "-n", "2", folder=tmp_path)
    try:
        expected = 2 * len({name for name in ("worker", "child", "daemon") if f"mark('{name}'" in WORKERS[kind]})
        wait_until(lambda: len(read_process_ids(tmp_path)) == expected)
        if kind == "stopped":
            stopped = psutil.STATUS_STOPPED
            wait_until(
                lambda: all(psutil.Process(pid).status() == stopped for pid in read_process_ids(tmp_path).values())
            )
        everyone = [child.pid for child in psutil.Process(job.pid).children(recursive=True)]
        everyone += read_process_ids(tmp_path).values()
        job.kill()
        wait_until(lambda: not any(is_alive(pid) for pid in everyone), seconds=2.0)
    finally:
        kill_job(job)


@pytest.mark.exhaustive
def test_no_process_survives_a_killed_agent_with_a_stopped_fork_server(tmp_path: Path) -> None:
    job = start_script(MARK + WORKERS["idle"], "-n", "2", folder=tmp_path)
    try:
        wait_until(lambda: len(read_process_ids(tmp_path)) == 2)
        (guard,) = psutil.Process(job.pid).children()
        everyone = [guard.pid, *read_process_ids(tmp_path).values()]
        guard.suspend()
        job.kill()
        wait_until(lambda: not any(is_alive(pid) for pid in everyone), seconds=2.0)
    finally:
        kill_job(job)


@pytest.mark.exhaustive
def test_a_killed_fork_server_fails_the_job_and_leaves_no_process(tmp_path: Path) -> None:
    job = start_script(MARK + WORKERS["with a daemon in a session of its own"], "-n", "2", folder=tmp_path)
    try:
        wait_until(lambda: len(read_process_ids(tmp_path)) == 4)
        (guard,) = psutil.Process(job.pid).children()
        everyone = read_process_ids(tmp_path).values()
        guard.kill()
        wait_until(lambda: not any(is_alive(pid) for pid in everyone), seconds=2.0)
        _, err = job.communicate(timeout=10)
        assert job.returncode != 0
        assert "ended with -9" in err
    finally:
        kill_job(job)


@pytest.mark.exhaustive
def test_a_daemon_does_not_outlive_a_job_that_ends_well(tmp_path: Path) -> None:
    daemon = WORKERS["with a daemon in a session of its own"].removesuffix("time.sleep(600)")
    wait = "while not os.path.exists('daemon' + RANK + '.pid'): time.sleep(0.01)"
    job = start_script(MARK + daemon + "\n" + wait, "-n", "1", folder=tmp_path)
    try:
        job.communicate(timeout=30)
        assert job.returncode == 0
        assert "daemon0" in read_process_ids(tmp_path)
        assert not is_alive(read_process_ids(tmp_path)["daemon0"])
    finally:
        kill_job(job)


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_agent_ends_all_with_its_exit_code(number: int, code: int, tmp_path: Path) -> None:
    job = start_script(MARK + WORKERS["idle"], "-n", "2", folder=tmp_path)
    try:
        wait_until(lambda: len(read_process_ids(tmp_path)) == 2)
        os.kill(job.pid, number)
        took = wait_until(lambda: job.poll() is not None, seconds=5)
        assert took < 2.5
        assert job.returncode == code
        assert not any(is_alive(pid) for pid in read_process_ids(tmp_path).values())
    finally:
        kill_job(job)


def test_ctrl_c_reaches_the_script_as_keyboard_interrupt(tmp_path: Path) -> None:
    script = MARK + (
        "mark('worker' + RANK)\ntry:\n    time.sleep(600)\n"
        "except KeyboardInterrupt:\n    print('saved by rank', RANK)\n    raise"
    )
    job = start_script(script, "-n", "2", folder=tmp_path)
    try:
        wait_until(lambda: len(read_process_ids(tmp_path)) == 2)
        os.kill(job.pid, signal.SIGINT)
        out, _ = job.communicate(timeout=10)
        assert job.returncode == 130
        assert "saved by rank 0" in out
    finally:
        kill_job(job)


def test_a_second_ctrl_c_kills_at_once_what_ignores_the_first(tmp_path: Path) -> None:
    job = start_script(MARK + WORKERS["ignoring signals"], "-n", "2", folder=tmp_path)
    try:
        wait_until(lambda: len(read_process_ids(tmp_path)) == 2)
        worker = read_process_ids(tmp_path)["worker0"]
        assert is_alive(worker)

        def killed_after_another() -> bool:
            # Two signals of a kind that wait for a busy process become one, so a second one may have to be repeated.
            os.kill(job.pid, signal.SIGINT)
            return not is_alive(worker)

        # The first alone would leave the worker its three seconds of grace.
        wait_until(killed_after_another, seconds=2.5)
        job.communicate(timeout=10)
        assert job.returncode == 130
    finally:
        kill_job(job)
