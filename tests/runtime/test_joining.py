"""A process joins its world: as a worker, under torchrun, with a group of the script's own, or alone."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.warm_runs import rankless, run_script

pytestmark = pytest.mark.slow

WHO = "import rankless\nprint(rankless.rank(), rankless.world_size(), rankless.local_rank())\n"
NOTICES = "import rankless.api\nnotify = rankless.api._world().notify\nnotify('look here')\nnotify('look here')\n"


def run_alone(script: str, *prefix: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script)
    command = [sys.executable, *prefix, "script.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


def test_a_script_alone_is_rank_0_of_1_and_prints_a_notice_once(tmp_path: Path) -> None:
    done = run_alone(WHO + NOTICES, folder=tmp_path)
    assert (done.stdout, done.stderr) == ("0 1 0\n", "rankless: look here\n")


def test_each_worker_knows_its_rank(tmp_path: Path) -> None:
    job = run_script(WHO, "-n", "3", "--show", "all", folder=tmp_path)
    assert sorted(job.stdout.splitlines()) == ["[0] 0 3 0", "[1] 1 3 1", "[2] 2 3 2"]
    assert run_script(WHO, "-n", "2", "--no-warm", folder=tmp_path).stdout == "0 2 0\n"


@pytest.mark.exhaustive
def test_a_script_under_torchrun_joins(tmp_path: Path) -> None:
    # One write per line: both workers write to one pipe, and buffering may be switched off.
    script = """
import rankless
same = rankless.once(lambda: "same")
print(f"{same} {rankless.rank()} {rankless.world_size()} {rankless.local_rank()}\\n", end="")
"""
    prefix = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    job = run_alone(script, *prefix, folder=tmp_path)
    assert sorted(job.stdout.split("\n")) == ["", "same 0 2 0", "same 1 2 1"], job.stderr


def test_a_process_group_of_the_script_is_used_and_not_destroyed(tmp_path: Path) -> None:
    script = (
        "import torch.distributed as dist\ndist.init_process_group('gloo')\n" + WHO + "print(rankless.once(int, 7))\n"
        "dist.barrier()\ndist.destroy_process_group()\nprint('left')\n"
    )
    job = run_script(script, "-n", "2", folder=tmp_path)
    assert (job.stdout, job.returncode) == ("0 2 0\n7\nleft\n", 0)


def test_workers_listen_on_no_port(tmp_path: Path) -> None:
    script = """
import os, psutil, rankless
rankless.rank()
print([c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"])
"""
    job = run_script(script, "-n", "2", folder=tmp_path)
    assert job.stdout == "[]\n"  # the agent serves the store


def test_once_runs_on_rank_0_and_returns_its_result_on_all(tmp_path: Path) -> None:
    script = """
import os, rankless
def make(name, *, size):
    with open("made", "a") as file:
        file.write("x")
    return {"name": name, "size": size, "bytes": b"1", "list": [1, None, 2.5]}
print(rankless.once(make, "data", size=3))
"""
    job = run_script(script, "-n", "3", "--show", "all", folder=tmp_path)
    expected = "{'name': 'data', 'size': 3, 'bytes': b'1', 'list': [1, None, 2.5]}"
    assert sorted(job.stdout.splitlines()) == [f"[{rank}] {expected}" for rank in range(3)]
    assert (tmp_path / "made").read_text() == "x"


def test_once_that_fails_raises_everywhere_and_rank_0_is_the_root_cause(tmp_path: Path) -> None:
    job = run_script("import rankless\nrankless.once(lambda: 1 / 0)\n", "-n", "2", folder=tmp_path)
    assert job.returncode == 1
    assert "rank 0 raised ZeroDivisionError" in job.stderr
    caught = (
        "import rankless\ntry:\n    rankless.once(lambda: 1 / 0)\n"
        "except (ZeroDivisionError, rankless.RanklessError) as error:\n    print(type(error).__name__)\n"
        "print(rankless.once(int, 3))\n"
    )
    job = run_script(caught, "-n", "2", "--show", "all", folder=tmp_path)
    assert sorted(job.stdout.splitlines()) == ["[0] 3", "[0] ZeroDivisionError", "[1] 3", "[1] ZeroDivisionError"]


@pytest.mark.exhaustive
def test_once_raises_for_results_that_are_not_plain_data(tmp_path: Path) -> None:
    script = "import rankless\nrankless.once(lambda: object())\n"
    for job in (run_script(script, "-n", "2", folder=tmp_path), run_alone(script, folder=tmp_path)):
        assert job.returncode == 1
        assert "tensors, arrays, paths, dataclasses or plain data" in job.stderr + job.stdout


@pytest.mark.exhaustive
def test_children_of_a_worker_are_not_the_worker(tmp_path: Path) -> None:
    script = """
import os, subprocess, sys, rankless
print(rankless.rank(), rankless.world_size())
if os.environ["RANK"] == "0":
    code = "import rankless; print('child', rankless.rank(), rankless.world_size())"
    print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout, end="")
    pid = os.fork()
    if pid == 0:
        print("fork", rankless.rank(), rankless.world_size())
        sys.exit(5)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(rankless.once(int, 9))
"""
    job = run_script(script, "-n", "2", folder=tmp_path)
    assert job.stdout == "0 2\nchild 0 1\nfork 0 1\n5\n9\n"
    assert job.returncode == 0


@pytest.mark.parametrize(
    "options", [pytest.param((), id="warm"), pytest.param(("--no-warm",), id="plain", marks=pytest.mark.exhaustive)]
)
def test_a_notice_is_shown_once_by_rank_0(options: tuple[str, ...], tmp_path: Path) -> None:
    job = run_script(NOTICES, "-n", "2", *options, folder=tmp_path)
    assert job.stderr.splitlines().count("rankless: look here") == 1


SLOW_TO_JOIN = """
import os, sys, time
import torch.distributed as dist
import rankless

join = dist.init_process_group

def slowly(*args, store, **kwargs):
    store.set(os.environ["RANK"], str(os.getpid()))
    join(*args, store=store, **kwargs)
    if os.environ["RANK"] == sys.argv[1]:
        time.sleep(1)
        for rank in "012":
            os.kill(int(store.get(rank)), 0)

dist.init_process_group = slowly
print(rankless.rank())
"""


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("slow", ["0", "1"])
def test_no_rank_leaves_while_another_still_joins(slow: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SLOW_TO_JOIN)
    job = rankless("run", "-n", "3", "script.py", slow, folder=tmp_path)
    assert (job.stdout, job.returncode) == ("0\n", 0), job.stderr


SHORT_TIMEOUTS = """
from datetime import timedelta
from rankless.runtime import process_groups as process_group
process_group.STORE_TIMEOUT, process_group.NOTICE_AFTER_SECONDS = timedelta(seconds=0.5), 0.1
"""


def test_a_rank_that_does_not_join_in_time_ends_the_job(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SHORT_TIMEOUTS + SLOW_TO_JOIN)
    job = rankless("run", "-n", "3", "script.py", "1", folder=tmp_path)
    assert job.returncode == 1
    assert "2 of 3 ranks have joined; waiting for the others" in job.stdout + job.stderr
    assert "expected: all 3 ranks to make their process group within 0.5 s" in job.stderr
    assert "2 that have" in job.stderr


def test_a_module_that_python_m_runs_joins(tmp_path: Path) -> None:
    (tmp_path / "who.py").write_text(WHO)
    job = rankless("run", "-n", "2", "-m", "who", folder=tmp_path)
    assert (job.stdout, job.returncode) == ("0 2 0\n", 0), job.stderr
