"""Calls `rankless status` as a user does, beside jobs that wait inside a step."""

import subprocess
from pathlib import Path
from typing import Any

from support.jobs import wait_until
from support.json_schema import check_result
from support.warm_runs import rankless

TRAINING = """
import os, time, torch, rankless
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(80, 4))
model = torch.nn.Linear(4, 1)

@rankless.job(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
def train(x):
    return model(x).square().mean()

def hold():
    open(f"held{os.environ['RANK']}", "w").close()
    while not os.path.exists("go"):
        time.sleep(0.1)  # here

for number, (x,) in enumerate(rankless.loader(data, batch_size=8)):
    if number == 5 and os.environ["RANK"] == "1":
        hold()
    train(x)  # there
"""
"""Rank 1 waits before its sixth step until there is a file `go`, and rank 0 waits for rank 1."""
HOLDING = """
import os, signal
open(f"held{os.environ['RANK']}", "w").close()
signal.pause()
"""
"""A script without PyTorch that waits until it is killed."""


def line_of(script: str, mark: str) -> int:
    return next(number for number, line in enumerate(script.splitlines(), 1) if f"# {mark}" in line)


def read_status(*arguments: str, folder: Path, **environment: str) -> list[dict[str, Any]]:
    """Return what `rankless status --json` prints, compared with its schema."""
    done = rankless("status", *arguments, "--json", folder=folder, **environment)
    assert (done.returncode, done.stderr) == (0, "")
    return [check_result(line, "status") for line in done.stdout.splitlines()]


def read_one(*arguments: str, folder: Path, **environment: str) -> dict[str, Any]:
    (status,) = read_status(*arguments, folder=folder, **environment)
    return status


def wait_for_ranks(job: subprocess.Popen[str], folder: Path, *ranks: int) -> None:
    """Wait until these ranks of a job have written that they are held."""
    wait_until(lambda: all((folder / f"held{rank}").exists() for rank in ranks) or job.poll() is not None)
    assert job.poll() is None, job.communicate()


def wait_for_state(folder: Path, rank: int, state: str, name: str = "log/latest") -> dict[str, Any]:
    """Wait until `rankless status` shows a rank in a state, and return the status."""
    found: list[dict[str, Any]] = []

    def is_there() -> bool:
        found[:] = read_status(name, folder=folder)
        return found[0]["workers"][rank]["state"] == state

    wait_until(is_there)
    return found[0]
