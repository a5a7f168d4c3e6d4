"""A worker is lost at the end of an operation: some others know of it, and others begin what comes next without it."""

import random
from pathlib import Path

import pytest
import torch
from collectives.backends.shared_groups import NEEDS_SHARED_GROUPS
from support.killed_jobs import KINDS, ZERO_KINDS, require_same_training, run_killed, run_plain
from support.lost_workers import KILLS_OF_WORKERS
from support.warm_process import WarmProcess
from support.warm_runs import rankless

pytestmark = [pytest.mark.slow, NEEDS_SHARED_GROUPS]  # with Gloo a killed worker ends the run

DATA = """
import os, torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 26

    def __getitem__(self, number):
        row = torch.cos(number * torch.arange(1.0, 5.0))
        sample = row, row.sum()[None].sin()
        return (*sample, f"sample {number}") if "names" in KIND else sample


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return (Samples()[number] for number in range(26))


def collate(samples):
    rows, wanted = (torch.stack(values) for values in zip(*samples))
    return rows - rows.mean() if "whole" in KIND else rows, wanted


data = Stream() if "stream" in KIND else Samples()
if "columns" in KIND:
    data = torch.utils.data.TensorDataset(*map(torch.stack, zip(*map(Samples().__getitem__, range(26)))))
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
options = {"batch_size": 2 if "few rows" in KIND else 8, "num_workers": 2 if "readers" in KIND else 0}
if "collate" in KIND:
    options["collate_fn"] = collate
"""

TRAINING = """
losses, seen, names = [], [], []
for epoch in range(2):
    for batch in loader:
        if "first" in KIND:
            seen.append((batch[0] * 2).sum().item())
        losses.append(train(*batch[:2]).item())
        seen.append(batch[1].square().sum().item())
        if "mean" in KIND:
            seen.append(batch[0][1:].mean().item())
        names += batch[2] if "names" in KIND else []
"""

RUN = (
    KILLS_OF_WORKERS
    + DATA
    + """
loader = rankless.loader(data, **options)


@rankless.job(model=model, optimizer=optimizer)
def train(rows, wanted):
    return nn.functional.mse_loss(model(rows), wanted)

"""
    + TRAINING
    + """
rankless.once(lambda: None)
torch.save([names, losses, seen, list(model.parameters())], f"results{RANK}.pt")
"""
)

PLAIN = (
    DATA
    + """
loader = torch.utils.data.DataLoader(data, **options)


def train(rows, wanted):
    loss = nn.functional.mse_loss(model(rows), wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss

"""
    + TRAINING
    + """
torch.save([names, losses, seen, list(model.parameters())], "plain.pt")
"""
)

WAYS_TO_READ = (
    "first",
    "names",
    "mean",
    "stream first",
    "columns mean",
    "collate mean",
    "collate whole mean",
    "readers first",
    "readers names",
    "few rows first",
    "few rows names",
)


def draw_loss(name: str, workers: int, most: int) -> str:
    """Return kills: one worker is killed as it passes a barrier, and another one hears of it there."""
    drawn = random.Random(name)
    lost, knowing = drawn.sample(range(workers), 2)
    moment = f"barrier{drawn.randint(1, most)}"
    return f"{lost}:{moment}:0,{knowing}:{moment}:heard"


@pytest.fixture(scope="module")
def read_by_torch(tmp_path_factory):
    """What plain PyTorch reads and trains in one process."""
    known: dict[str, list] = {}

    def find(kind: str) -> list:
        if kind not in known:
            folder = tmp_path_factory.mktemp("plain")
            (folder / "plain.py").write_text(f"KIND = {kind!r}\n{PLAIN}")
            done = WarmProcess(folder / "plain.py").wait()
            assert done.returncode == 0, done.stderr
            known[kind] = torch.load(folder / "plain.pt")
        return known[kind]

    return find


def require_same(found: list, expected: list) -> None:
    assert found.pop(0) == expected[0]
    torch.testing.assert_close(found, expected[1:], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", WAYS_TO_READ)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.ci_sample(3)
def test_all_have_the_same_batches(tmp_path: Path, read_by_torch, kind: str, seed: int):
    workers = 3 if seed < 4 else 4
    kills = draw_loss(f"{kind} {seed}", workers, 17)
    (tmp_path / "script.py").write_text(f"KIND = {kind!r}\n{RUN}")
    words = ("-n", str(workers), "--devices", "cpu", "--no-replace", "script.py")
    done = rankless("run", *words, folder=tmp_path, KILLS=kills)
    assert done.returncode == 0, kills + done.stderr
    found = [torch.load(path) for path in tmp_path.glob("results*.pt")]
    assert len(found) == workers - 1, kills
    for results in found:
        require_same(results, read_by_torch(kind))


@pytest.mark.exhaustive
def test_the_last_of_two_workers_reads_lists_of_its_own(tmp_path: Path, read_by_torch):
    (tmp_path / "script.py").write_text(f"KIND = 'names'\n{RUN}")
    command = ("run", "-n", "2", "--devices", "cpu", "script.py")
    done = rankless(*command, folder=tmp_path, KILLS="1:barrier6:0")
    assert done.returncode == 0, done.stderr
    require_same(torch.load(tmp_path / "results0.pt"), read_by_torch("names"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        *((kind, "") for kind in (*KINDS, *ZERO_KINDS)),
        ("accumulate", "data=2,tensor=2"),
        ("accumulate", "data=2,pipeline=2"),
        ("norm and dropout", "data=3,tensor=2"),
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_all_train_the_same(tmp_path: Path, tmp_path_factory, kind: str, mesh: str, seed: int):
    workers = {"": 3, "data=3,tensor=2": 6}.get(mesh, 4)
    kills = draw_loss(f"{kind} {mesh} {seed}", workers, 60)
    options = ("-n", str(workers), "--mesh", mesh) if mesh else ()
    done = run_killed(tmp_path, kind, kills, *options)
    assert done.returncode == 0, kills + done.stderr
    require_same_training(tmp_path, run_plain(tmp_path_factory.mktemp("plain"), kind), left=workers - 1)
