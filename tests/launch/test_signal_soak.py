"""Fifty small scripts under SIGTERM, Ctrl-C and Slurm's signals: no save is cut within its grace, nothing is left."""

import contextlib
import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.jobs import RANKLESS, wait_until
from support.slurm import Slurm, requires_slurm, started_slurm
from support.terminals import on_terminal

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

START = """
import atexit, os, signal, subprocess, sys, threading, time
rank = os.environ["RANK"]
def mark(name):
    open(f"{name}{rank}.txt", "w").close()
def save(*_):
    mark("saving")
    time.sleep(1)
    mark("saved")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
flag = []
def set_flag(*_):
    flag.append(1)
def on_signals(action):
    for number in SIGNALS:
        signal.signal(number, action)
def leave(*_):
    sys.exit(0)
"""
TORCH = "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
FORMS = {
    "a handler saves": "def handle(*_):\n    save()\n    sys.exit(0)\non_signals(handle)\nmark('ready')\n"
    "while True:\n    time.sleep(0.01)\n",
    "a handler sets a flag": "on_signals(set_flag)\nmark('ready')\nwhile not flag:\n    time.sleep(0.01)\nsave()\n",
    "finally saves": "on_signals(leave)\ntry:\n    mark('ready')\n    while True:\n        time.sleep(0.01)\n"
    "finally:\n    save()\n",
    "atexit saves": "on_signals(leave)\natexit.register(save)\nmark('ready')\nwhile True:\n    time.sleep(0.01)\n",
    "a thread saves": "on_signals(set_flag)\ndef work():\n    while not flag:\n        time.sleep(0.01)\n    save()\n"
    "thread = threading.Thread(target=work)\nthread.start()\nmark('ready')\n"
    "while thread.is_alive():\n    thread.join(0.05)\n",
    "a child process runs": "child = subprocess.Popen(['sleep', '600'])\non_signals(set_flag)\nmark('ready')\n"
    "while not flag:\n    time.sleep(0.01)\nsave()\n",
    "ranks agree on the flag": TORCH + "on_signals(set_flag)\nmark('ready')\nwhile True:\n"
    "    seen = torch.tensor([float(len(flag))])\n    dist.all_reduce(seen)\n    if seen:\n        break\n"
    "    time.sleep(0.01)\nsave()\ndist.barrier()\n",
    "a save with collectives": TORCH + "on_signals(set_flag)\nmark('ready')\nwhile True:\n"
    "    seen = torch.tensor([float(len(flag))])\n    dist.all_reduce(seen)\n    if seen:\n        break\n"
    "    time.sleep(0.01)\nmark('saving')\nfor _ in range(20):\n    time.sleep(0.05)\n    dist.barrier()\n"
    "mark('saved')\n",
    "a job with rankless.save": "import torch, rankless\nmodel = torch.nn.Linear(4, 2)\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "@rankless.job(model=model, optimizer=optimizer)\ndef train(x):\n    return model(x).square().mean()\n"
    "train(torch.ones(4, 4))\non_signals(set_flag)\nmark('ready')\nimport torch.distributed as dist\nwhile True:\n"
    "    train(torch.ones(4, 4))\n    seen = torch.tensor([float(len(flag))])\n    dist.all_reduce(seen)\n"
    "    if seen:\n        break\nmark('saving')\nrankless.save('checkpoint', model=model, optimizer=optimizer)\n"
    "mark('saved')\n",
    "workers of a DataLoader": "import torch\nfrom torch.utils.data import DataLoader\non_signals(set_flag)\n"
    "def endless():\n    loader = DataLoader(torch.arange(64.0), batch_size=4, num_workers=2)\n"
    "    while True:\n        yield from loader\n"
    "for number, _ in enumerate(endless()):\n    if number == 2:\n        mark('ready')\n    if flag:\n        break\n"
    "save()\n",
}
WAYS = ["SIGTERM", "Ctrl-C", "scancel", "scancel of a batch job", "Slurm's USR1"]
SLURM_WAYS = WAYS[2:]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with started_slurm(tmp_path_factory.mktemp("cluster")) as found:
        yield found


def count(folder: Path, name: str) -> int:
    return len(list(folder.glob(f"{name}[0-9].txt")))


def left_processes(mark: str) -> list[str]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get("SOAK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {process.name()}")
    return found


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.pytest")}


def stop_here(way: str, folder: Path, mark: str) -> str:
    with on_terminal("run", "-n", "2", "--no-progress", "script.py", folder=folder, SOAK=mark) as terminal:
        wait_until(lambda: count(folder, "ready") == 2 or terminal.job.poll() is not None)
        if way == "Ctrl-C":
            terminal.type("\x03")
        else:
            terminal.job.send_signal(signal.SIGTERM)
        return terminal.wait()


def stop_in_slurm(way: str, folder: Path, mark: str, slurm: Slurm) -> str:
    command = ["srun", "-J", mark, "-N2", "-n2", *RANKLESS, "run", "script.py"]
    if way == "scancel of a batch job":
        (folder / "batch.sh").write_text(
            "#!/bin/bash\nsrun -N2 -n2 " + " ".join([*RANKLESS, "run", "script.py"]) + "\n"
        )
        command = ["sbatch", "--wait", "-J", mark, "-N2", "-n2", "-o", "batch.log", "batch.sh"]
    step = slurm.start("env", f"SOAK={mark}", *command, cwd=folder)
    wait_until(lambda: count(folder, "ready") == 2 or step.poll() is not None)
    number = slurm.job_number(mark)
    slurm.run("scancel", *(["-s", "USR1"] if way == "Slurm's USR1" else []), number)
    text, _ = step.communicate(timeout=90)
    wait_until(lambda: slurm.job_number(mark) == "")
    return text


@requires_slurm
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
def test_no_save_is_cut_within_its_grace_and_nothing_is_left(
    form: str, way: str, request: pytest.FixtureRequest, tmp_path: Path
):
    (tmp_path / "script.py").write_text(START + FORMS[form])
    mark, before = f"s{uuid.uuid4().hex[:10]}", shared_memory()
    if way in SLURM_WAYS:
        text = stop_in_slurm(way, tmp_path, mark, request.getfixturevalue("slurm"))
    else:
        text = stop_here(way, tmp_path, mark)
    assert (count(tmp_path, "saving"), count(tmp_path, "saved")) == (2, 2), text
    assert "and was killed" not in text
    wait_until(lambda: not left_processes(mark), seconds=20)
    assert shared_memory() <= before
