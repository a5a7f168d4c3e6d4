"""Loaders in real runs: a failure ends the run and is named, and an interrupted run resumes."""

import time
from pathlib import Path

import pytest
from support.warm_runs import run_script

pytestmark = pytest.mark.slow

TRAINING = """
import os, time, torch, rankless
model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)).double()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

@rankless.job(model=model, optimizer=optimizer)
def train(rows):
    return (model(rows["x"]) - rows["y"]).square().mean()
"""

BROKEN = (
    TRAINING
    + """
class Broken(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 27:
            open("failed", "w").write(str(time.time()))
            raise OSError("disk gone")
        return {"x": torch.ones(3).double(), "y": torch.ones(1).double()}

for batch in rankless.loader(Broken(), batch_size=8, num_workers=READERS):
    train(batch)
print("the end")
"""
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("readers", [0, 1])
def test_an_unreadable_sample_ends_the_run_and_names_its_rank(readers: int, tmp_path: Path) -> None:
    job = run_script(BROKEN.replace("READERS", str(readers)), "-n", "2", folder=tmp_path)
    assert time.time() - float((tmp_path / "failed").read_text()) < 4.0
    assert job.returncode == 1
    assert "the end" not in job.stdout
    assert "rankless: rank 0 raised DataError" in job.stderr
    assert "OSError: disk gone (index 27)" in job.stderr
    assert "script.py" in job.stderr


ALONE = """
import time, torch, rankless
from rankless.data import logical_tensor
logical_tensor.WAIT_SECONDS = 0.3
for batch in rankless.loader(torch.arange(8.0), batch_size=8):
    if rankless.rank() == 1:
        print(batch.sum())
    else:
        time.sleep(1.5)
"""


@pytest.mark.exhaustive
def test_a_gather_on_one_rank_only_ends_the_run_and_names_the_line(tmp_path: Path) -> None:
    job = run_script(ALONE, "-n", "2", folder=tmp_path)
    assert "rank 1 has waited 0 s at" in job.stderr
    assert "script.py:7 for the other ranks to run the same operation" in job.stderr
    assert "raised RanksDiverged" in job.stderr
    assert job.returncode == 1


IN_A_JOB = (
    TRAINING
    + """
@rankless.job(model=model)
def predict(rows):
    return model(rows["x"]) * rankless.once(time.time)

(batch,) = rankless.loader([{"x": torch.ones(3).double()}] * 4, batch_size=4)
predict(batch)
"""
)


@pytest.mark.exhaustive
def test_a_job_with_once_inside_is_no_program(tmp_path: Path) -> None:
    job = run_script(IN_A_JOB, "-n", "2", folder=tmp_path)
    assert job.returncode == 0, job.stderr
    assert "so its functions run one by one on divided batches" in job.stderr
    assert "rankless.once(time) inside it, which would run at capture and never again" in job.stderr


RESUMED = (
    TRAINING
    + """
torch.manual_seed(1)
samples = [{"x": torch.rand(3).double(), "y": torch.rand(1).double(), "name": f"s{number}"} for number in range(22)]
loader = rankless.loader(samples, batch_size=4, shuffle=True)
first = 0
if os.path.exists("state"):
    rankless.load("state", model=model, optimizer=optimizer, loader=loader)
    first = loader.epoch - 1
for epoch in range(first, 3):
    for batch in loader:
        print(epoch, loader.position, batch["name"], train(batch).item())
        if (epoch, loader.position) == (1, 2) and INTERRUPTED:
            rankless.save("state", model=model, optimizer=optimizer, loader=loader)
            raise SystemExit
"""
)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("size", "later_size"), [("2", "2"), pytest.param("3", "2", marks=pytest.mark.exhaustive)])
def test_an_interrupted_run_resumes_with_its_next_batch(size: str, later_size: str, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    uninterrupted = run_script(RESUMED.replace("INTERRUPTED", "False"), "-n", size, "--seed", "1", folder=whole)
    before = run_script(RESUMED.replace("INTERRUPTED", "True"), "-n", size, "--seed", "1", folder=parts)
    after = run_script(RESUMED.replace("INTERRUPTED", "False"), "-n", later_size, "--seed", "2", folder=parts)
    expected, found = uninterrupted.stdout.splitlines(), (before.stdout + after.stdout).splitlines()
    assert len(expected) == 18, uninterrupted.stderr
    assert len(found) == 18, before.stderr + after.stderr
    for one, other in zip(expected, found, strict=True):
        if size == later_size:
            assert other == one
        else:
            assert other.rpartition(" ")[0] == one.rpartition(" ")[0]
            assert float(other.rpartition(" ")[2]) == pytest.approx(float(one.rpartition(" ")[2]), rel=1e-9)


SHARES = """
import os, time, torch, rankless
from torch.utils.data import Subset, TensorDataset

rank = int(os.environ["RANK"])
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
x, y = torch.randn(16, 3), torch.randn(16, 1)

@rankless.job(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
def train(x, y):
    return (model(x) - y).square().mean()

def collate(samples):
    return torch.utils.data.default_collate(samples)

if os.environ["FORM"] == "loader":
    share = Subset(TensorDataset(x, y), range(rank, 16, 2))
    for options in ({"shuffle": True}, {"collate_fn": collate}, {"reading": "replicated"}, {"batch_size": None}):
        try:
            list(rankless.loader(share, **{"batch_size": 4, **options}))
        except rankless.RanklessError:
            print("refused", *options, flush=True)
    for batch in rankless.loader(share, batch_size=4):
        train(*batch)
elif os.environ["FORM"] == "files":
    files = [[number] for number in range(8)][:: 1 - 2 * rank]  # in another order, as of os.listdir
    for _ in rankless.loader(files, batch_size=4, num_workers=1):
        pass
elif os.environ["FORM"] == "job":
    train(x[rank::2], y[rank::2])
else:
    rankless.save(f"runs/{time.time_ns()}", model=model)
"""


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize(
    ("form", "fix"),
    [
        ("save", "make it once, as folder = rankless.once(time.strftime"),
        ("loader", "not a share by RANK"),
        ("files", "sorted(os.listdir(folder))"),
        ("job", "A script that takes a share of its data by RANK"),
    ],
)
def test_what_differs_by_rank_is_refused_with_its_name(tmp_path, form, fix):
    run = run_script(SHARES, "-n", "2", folder=tmp_path, FORM=form)
    assert run.returncode == 1
    assert fix in run.stderr
    assert run.stdout.count("refused") == (4 if form == "loader" else 0), run.stdout


def test_a_position_that_is_loaded_within_a_pass_counts_from_the_next_one_on(tmp_path):
    text = """
import torch, rankless
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

@rankless.job(model=model, optimizer=optimizer)
def train(rows):
    return model(rows).square().mean()

rows = torch.arange(120.0).reshape(40, 3) / 100
loader = rankless.loader(torch.utils.data.TensorDataset(rows), batch_size=4, shuffle=True, seed=1)
calls = 0
for epoch in range(2):
    for (batch,) in loader:
        loss = float(train(batch))
        calls += 1
        if calls == 3:
            rankless.save("kept", model=model, optimizer=optimizer, loader=loader)
        if calls == 6:
            rankless.load("kept", model=model, optimizer=optimizer, loader=loader)
        print(f"{calls}: {loss:.9f}")
"""
    outputs = []
    for workers in ("1", "3"):
        folder = tmp_path / workers
        folder.mkdir()
        done = run_script(text, "-n", workers, "--devices", "cpu", folder=folder)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    assert outputs[0].count("\n") == 10 + 7  # the next pass has what the loaded one had left
