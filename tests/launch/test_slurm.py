"""`srun … rankless run` is one run: one worker for each task, or `-n` workers where a node has one task."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.jobs import RANKLESS, start_rankless, wait_until
from support.slurm import Slurm, requires_slurm, started_slurm

from rankless.config.cluster_variables import expand_hosts

pytestmark = pytest.mark.slow

SUM = """
import os
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
open(f"rank{dist.get_rank()}.txt", "w").write(f"{dist.get_world_size()} {total.item():g}")
"""
SAVES = """
import os, signal, sys, time
rank = os.environ["RANK"]
def mark(name):
    open(name + rank + ".txt", "w").close()
def save(number, frame):
    mark("saving")
    time.sleep(1)
    mark("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGUSR1, lambda *_: mark("warned"))
signal.signal(signal.SIGUSR2, lambda *_: mark("asked"))
mark("ready")
while True:
    time.sleep(0.01)
"""


def results(folder: Path) -> dict[str, str]:
    return {path.stem: path.read_text() for path in folder.glob("rank*.txt")}


def task(rank: int, size: int, home: Path, *, nodes: int = 1) -> dict[str, str]:
    """Return the variables of a task of `srun`. All tasks run on this machine, whatever `nodes` says."""
    return {
        "SLURM_JOB_ID": str(os.getpid() % 2000),
        "SLURM_STEP_ID": "3",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "HOME": str(home),
    }


def end(jobs: list[subprocess.Popen[str]]) -> list[str]:
    return [job.communicate(timeout=120)[1] for job in jobs]


@pytest.mark.exhaustive
def test_tasks_of_srun_are_one_run_whose_token_only_the_user_can_read(tmp_path: Path):
    (tmp_path / "script.py").write_text(SUM)
    (tmp_path / "home").mkdir()
    jobs = [
        start_rankless("run", "script.py", folder=tmp_path, **task(rank, 2, tmp_path / "home")) for rank in range(2)
    ]
    texts = end(jobs)
    assert [job.returncode for job in jobs] == [0, 0], "\n".join(texts)
    assert results(tmp_path) == {"rank0": "2 2", "rank1": "2 2"}
    assert not list((tmp_path / "home").rglob("token-*"))


def test_a_number_of_workers_beside_several_tasks_of_a_node_is_refused(tmp_path: Path):
    (tmp_path / "script.py").write_text(SUM)
    job = start_rankless("run", "-n", "2", "script.py", folder=tmp_path, **task(0, 2, tmp_path))
    (text,) = end([job])
    assert job.returncode == 2
    assert "one worker for each task" in text
    assert "found:    -n 2" in text
    assert "--ntasks-per-node=1" in text


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["a batch script", "a step of one task"])
def test_a_batch_script_and_a_step_of_one_task_are_one_host(case: str, tmp_path: Path):
    variables = task(0, 1, tmp_path) | {"SLURM_NTASKS": "2"}
    if case == "a batch script":
        variables = {name: value for name, value in variables.items() if not name.startswith("SLURM_STEP")}
    (tmp_path / "script.py").write_text(SUM)
    job = start_rankless("run", "-n", "3", "script.py", folder=tmp_path, **variables)
    (text,) = end([job])
    assert job.returncode == 0, text
    assert set(results(tmp_path).values()) == {"3 3"}


def test_slurms_list_of_hosts_is_expanded_as_scontrol_does():
    assert expand_hosts("node[08-10,12],login1") == ["node08", "node09", "node10", "node12", "login1"]
    assert expand_hosts("r[1-2]n[3,5]-ib") == ["r1n3-ib", "r1n5-ib", "r2n3-ib", "r2n5-ib"]
    assert expand_hosts("n1") == ["n1"]
    assert expand_hosts("") == []


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with started_slurm(tmp_path_factory.mktemp("cluster")) as found:
        yield found


@requires_slurm
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("step", "options"), [(["-N2", "-n4"], []), (["-N2", "--ntasks-per-node=1"], ["-n", "2"])], ids=["tasks", "nodes"]
)
def test_a_step_of_slurm_is_one_run(step: list[str], options: list[str], slurm: Slurm, tmp_path: Path):
    (tmp_path / "script.py").write_text(SUM)
    text = slurm.run("srun", *step, *RANKLESS, "run", *options, "script.py", cwd=tmp_path)
    assert results(tmp_path) == {f"rank{rank}": "4 4" for rank in range(4)}, text


@requires_slurm
@pytest.mark.exhaustive
def test_slurms_lists_of_hosts_agree_with_ours(slurm: Slurm):
    for text in ("node[08-10,12],login1", "a[1-2],b[003-005]", "x9"):
        assert slurm.run("scontrol", "show", "hostnames", text).split() == expand_hosts(text)


@requires_slurm
@pytest.mark.exhaustive
def test_slurms_signals_reach_the_script_and_a_cancelled_step_saves(slurm: Slurm, tmp_path: Path):
    (tmp_path / "script.py").write_text(SAVES)
    step = slurm.start("srun", "-J", "saves", "-N2", "-n3", *RANKLESS, "run", "script.py", cwd=tmp_path)

    def marks(name: str) -> int:
        return len(list(tmp_path.glob(f"{name}?.txt")))

    wait_until(lambda: marks("ready") == 3)
    number = slurm.job_number("saves")
    for name, mark in (("USR1", "warned"), ("USR2", "asked")):
        slurm.run("scancel", "-s", name, number)
        wait_until(lambda mark=mark: marks(mark) == 3)
    slurm.run("scancel", number)
    text, _ = step.communicate(timeout=60)
    assert (marks("saving"), marks("saved")) == (3, 3), text
    assert "killed" not in text
