"""Runs that follow each other share the import of torch, and nothing else. No process stays behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.jobs import is_alive, kill_job, read_process_ids, start_rankless, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="a fork server needs Linux"),
]

RUNS = """
import json, os, sys
from rankless.launch import agent
from rankless.launch.supervisor.fork_server_client import ForkServerPoolClient
from rankless.config.make_run_config import make_run_config
from rankless.config.run_config import Program, RunRequest

open_files = []
with ForkServerPoolClient() as server:
    for number, seed in enumerate(json.loads(sys.argv[1])):
        # The descriptors of later runs have other numbers here than those of the first, and than they get there.
        open_files += [open(os.devnull) for _ in range(3 * number)]
        program = Program(kind="script", target="script.py", arguments=(str(number),))
        plan = make_run_config(program, RunRequest(worker_count=2, seed=seed, progress=False))
        context = agent.AgentContext(fork_server=server)
        code = agent.run(plan, on_record=lambda _: None, out=sys.stdout, err=sys.stderr, context=context)
        print(json.dumps({"code": code, "agent": os.getpid(), "server": server.process_id}))
"""

REPORTING_SCRIPT = """
import json, os, random, sys
import psutil, torch
import torch.distributed as dist
dist.init_process_group()
seen = torch.full((3,), float(os.environ["RANK"]) + 1)
dist.all_reduce(seen)
parent = psutil.Process(os.getppid())
if os.environ["RANK"] == "0":
    print(json.dumps({
        "number": int(sys.argv[1]), "sum": seen.tolist(), "drawn": [random.random(), torch.rand(()).item()],
        "parent": parent.pid, "session": os.getsid(parent.pid), "above": parent.ppid(),
        "import": "pool" if any("from a pool" in word for word in parent.cmdline()) else "own",
        "state": "changed" if hasattr(torch, "changed_by_a_run") else "clean",
    }))
torch.changed_by_a_run = True
if sys.argv[1] == "2":
    sys.exit(7)
"""


def runs(folder: Path, *seeds: int) -> tuple[list[dict], list[dict]]:
    """What rank 0 of each of several runs in a row has seen, and what their agent."""
    (folder / "script.py").write_text(REPORTING_SCRIPT)
    command = [sys.executable, "-c", RUNS, json.dumps(seeds)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return lines[0::2], lines[1::2]


def test_each_run_has_its_own_fork_server_and_exit_code(tmp_path: Path) -> None:
    seen, agents = runs(tmp_path, 5, 5, 5)
    assert [run["number"] for run in seen] == [0, 1, 2]
    assert [run["code"] for run in agents] == [0, 0, 7]
    assert len({run["parent"] for run in seen}) == 3
    assert all(run["session"] == run["parent"] for run in seen)
    assert {run["above"] for run in seen} == {run["agent"] for run in agents}
    assert {run["import"] for run in seen} == {"pool"}
    assert {run["state"] for run in seen} == {"clean"}
    assert [run["sum"] for run in seen] == [[3.0, 3.0, 3.0]] * 3
    assert seen[0]["drawn"] == seen[1]["drawn"] == seen[2]["drawn"]
    assert len({run["server"] for run in agents}) == 1
    assert not is_alive(agents[0]["server"])


@pytest.mark.exhaustive
def test_a_run_with_another_environment_imports_torch_itself(tmp_path: Path) -> None:
    seen, agents = runs(tmp_path, 5, 6)  # another seed is another order of hashes, fixed when Python starts
    assert [run["code"] for run in agents] == [0, 0]
    assert [run["import"] for run in seen] == ["pool", "own"]


VERIFIED = """
import os, signal, sys, time
import psutil, torch
import rankless

def mark(name):
    with open(f"{name}.pid", "w") as file:
        file.write(f"{os.getpid()}\\n")

model = torch.nn.Linear(3, 2)

@rankless.job(model=model)
def predict(inputs):
    return model(inputs)

predict(torch.ones(4, 3))
"""

DAEMON = """
if os.environ["WORLD_SIZE"] == "2":
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            mark("daemon" + os.environ["RANK"])
            time.sleep(600)
        os._exit(0)
    mark("worker" + os.environ["RANK"])
    time.sleep(600)
"""

KILLING = """
agent = psutil.Process(os.getppid()).parent()
if os.environ["WORLD_SIZE"] == "1" and not os.path.exists("server.pid"):
    (server,) = [child for child in agent.children() if child.pid != os.getppid()]
    server.{action}()
    mark("server")
"""


def start_verify(script: str, folder: Path) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(script)
    return start_rankless("verify", "-n", "2", "--devices", "cpu", "train.py", folder=folder)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "killed",
    [
        "agent",
        "parent",
        pytest.param("agent while the parent is stopped", marks=pytest.mark.exhaustive),
        pytest.param("agent and server", marks=pytest.mark.exhaustive),
    ],
)
def test_no_process_survives_a_kill_in_a_later_run_by_two_seconds(killed: str, tmp_path: Path) -> None:
    job = start_verify(VERIFIED + DAEMON, tmp_path)
    try:
        wait_until(lambda: len(read_process_ids(tmp_path)) == 4)
        agent = psutil.Process(job.pid)
        parent = psutil.Process(read_process_ids(tmp_path)["worker0"]).parent()
        assert parent is not None
        (server,) = [child for child in agent.children() if child.pid != parent.pid]
        everyone = [parent.pid, server.pid, *read_process_ids(tmp_path).values()]
        if "stopped" in killed:
            parent.suspend()
        if "server" in killed:
            server.kill()
        (parent if killed == "parent" else agent).kill()
        if killed == "parent":
            wait_until(lambda: not any(is_alive(pid) for pid in everyone if pid != server.pid), seconds=2.0)
            out, err = job.communicate(timeout=10)
            assert job.returncode == 2, out + err
            assert "ended with -9" in err
        wait_until(lambda: not any(is_alive(pid) for pid in everyone), seconds=2.0)
    finally:
        kill_job(job)


@pytest.mark.exhaustive
@pytest.mark.parametrize("action", ["kill", pytest.param("suspend", marks=pytest.mark.exhaustive)])
def test_without_the_pool_a_run_imports_torch_itself(action: str, tmp_path: Path) -> None:
    job = start_verify(VERIFIED + KILLING.replace("{action}", action), tmp_path)
    try:
        out, err = job.communicate(timeout=240)  # three runs after each other
        assert job.returncode == 0, out + err
        assert "server" in read_process_ids(tmp_path)
        assert "same training" in out
    finally:
        kill_job(job)


@pytest.mark.exhaustive
def test_ctrl_c_during_the_import_of_torch_ends_everything(tmp_path: Path) -> None:
    job = start_verify(VERIFIED, tmp_path)
    try:
        agent = psutil.Process(job.pid)
        wait_until(lambda: len(agent.children()) == 1)
        (server,) = agent.children()
        os.kill(job.pid, signal.SIGINT)
        job.communicate(timeout=10)
        assert job.returncode == 130
        assert not is_alive(server.pid)
    finally:
        kill_job(job)
