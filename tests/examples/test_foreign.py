"""Scripts of plain torch, Accelerate and Fabric, unchanged: under `rankless run` they print and save what they do under
the launchers they were written for.
"""

import filecmp
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.warm_runs import rankless
from torch import nn

pytestmark = pytest.mark.slow

FOREIGN = Path(__file__).parents[2] / "examples" / "foreign"
LINES = {"ddp": 6, "fsdp2": 3, "collectives": 78, "accelerate_digits": 3, "fabric_digits": 3}
IN_CI = {"collectives", "fabric_digits"}
SAVED = {
    "ddp": ["0.ckpt", "1.ckpt"],
    "fsdp2": ["fsdp2.ckpt"],
    "accelerate_digits": [f"accelerate_state/{name}" for name in ("model.safetensors", "optimizer.bin")],
    "fabric_digits": ["fabric.ckpt"],
}
# A worker's stderr is shown on the same stream: warnings between the lines, a bar, perhaps padded, before some of them.
RESULT = re.compile(
    r"(?:^|\] *)((?:epoch|saved|processes|world|group|alone|all_reduce|.*_object|send and).*)$", re.MULTILINE
)


def environment() -> dict[str, str]:
    # One thread per process, as torchrun gives: sums in another order would round otherwise.
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def python(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=200)


def torchrun(script: str, *arguments: str, folder: Path) -> list[str]:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    # Plain torch, taking itself apart after all is done, aborts now and then, and torchrun ends the other rank for it.
    for _ in range(3):
        done = python(*launcher, str(FOREIGN / f"{script}.py"), *arguments, folder=folder)
        if "terminate called without an active exception" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    printed = RESULT.findall(done.stdout)
    assert printed == done.stdout.splitlines(), "the pattern of results misses some"
    return printed


def run_rankless(
    script: str | Path, *arguments: str, folder: Path, workers: int = 2
) -> subprocess.CompletedProcess[str]:
    path = str(FOREIGN / f"{script}.py") if isinstance(script, str) else str(script)
    folder.mkdir(exist_ok=True)
    return rankless("run", "-n", str(workers), path, *arguments, folder=folder, OMP_NUM_THREADS="1")


def results(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    assert "both write" not in done.stderr
    assert "set_epoch" not in done.stderr
    return RESULT.findall(done.stdout)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "script", [each if each in IN_CI else pytest.param(each, marks=pytest.mark.exhaustive) for each in LINES]
)
def test_a_script_prints_and_saves_what_it_does_under_torchrun(script: str, tmp_path: Path):
    wanted = torchrun(script, folder=tmp_path / "torchrun")
    assert len(wanted) == LINES[script]
    assert results(run_rankless(script, folder=tmp_path / "ours")) == wanted
    for name in SAVED.get(script, []):
        assert filecmp.cmp(tmp_path / "torchrun" / name, tmp_path / "ours" / name, shallow=False), name


@pytest.mark.exhaustive
def test_ddp_broadcasts_a_checkpoint_that_only_rank_0_loads(tmp_path: Path):
    layers = (nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(), nn.Linear(128, 10))
    torch.save(nn.Sequential(*layers).state_dict(), tmp_path / "pretrained.pt")
    options = ("--pretrained", str(tmp_path / "pretrained.pt"), "--epochs", "1", "--lr", "0")
    wanted = torchrun("ddp", *options, folder=tmp_path / "torchrun")
    assert results(run_rankless("ddp", *options, folder=tmp_path / "ours")) == wanted
    saved, loaded = torch.load(tmp_path / "ours" / "0.ckpt"), torch.load(tmp_path / "pretrained.pt")
    assert all(torch.equal(saved[name], loaded[name]) for name in loaded)


@pytest.fixture(scope="module")
def joined_at_an_address(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return what two processes without a launcher print: torchrun accepts no address of the script."""
    folder = tmp_path_factory.mktemp("by_hand")
    place = ("--init_method", f"tcp://127.0.0.1:{free_port()}")
    command = [sys.executable, str(FOREIGN / "init_methods.py"), *place]
    processes = [
        subprocess.Popen(
            command, cwd=folder, env={**environment(), "RANK": str(rank), "WORLD_SIZE": "2"}, stdout=-1, text=True
        )
        for rank in range(2)
    ]
    printed = [process.communicate(timeout=60)[0] for process in processes]
    # As above; by then they have printed what they had to.
    assert {process.returncode for process in processes} <= {0, -signal.SIGABRT}
    assert printed[1] == ""
    return RESULT.findall(printed[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "place", ["tcp", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("env", "file"))]
)
def test_processes_join_by_the_environment_at_an_address_and_through_a_file(
    place: str, joined_at_an_address: list[str], tmp_path: Path
):
    where = {"env": "env://", "tcp": f"tcp://127.0.0.1:{free_port()}", "file": f"file://{tmp_path}/meet"}
    assert len(joined_at_an_address) == 2
    assert results(run_rankless("init_methods", "--init_method", where[place], folder=tmp_path)) == joined_at_an_address


@pytest.mark.exhaustive
def test_a_script_that_spawns_prints_the_same_under_one_worker(tmp_path: Path):
    plain = python(str(FOREIGN / "spawn.py"), folder=tmp_path / "plain")
    assert len(RESULT.findall(plain.stdout)) == 2, plain.stderr
    one = run_rankless("spawn", folder=tmp_path / "ours", workers=1)
    assert one.stdout == plain.stdout
    assert "starts processes itself" not in one.stderr


@pytest.mark.exhaustive  # tests/runtime/test_script_mistakes.py has a smaller script
def test_a_script_that_spawns_under_several_workers_is_warned_about(tmp_path: Path):
    for _ in range(3):  # plain torch in a process that the script started may abort when it ends, as under torchrun
        two = run_rankless("spawn", folder=tmp_path)
        if "SIGABRT" not in two.stderr:
            break
    assert len(results(two)) == 2  # each worker's processes have found a port of their own
    warning = "the script starts processes itself, and each of the 2 workers does so; start such a script with `python`"
    assert two.stderr.count(f"spawn.py:49: {warning}") == 1
