"""An exception of one rank in a call of all ranks: all raise it, states are as before the call; or the run ends."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from collectives.backends.shared_groups import NEEDS_SHARED_GROUPS
from support.jobs import job_environment
from support.warm_runs import run_script

pytestmark = pytest.mark.slow

RANDOM_PROGRAMS = Path(__file__).parents[1] / "scripts" / "failing_programs.py"

DATA = """
import json, sys, torch, rankless
import torch.nn.functional as F
from rankless.errors import RanksDiverged
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
rank = rankless.rank()
inputs, targets = torch.randn(40, 4), torch.randint(0, 3, (40,))
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
batches = list(zip(inputs.split(8), targets.split(8)))

class Data(torch.utils.data.Dataset):
    def __init__(self, bad):
        self.bad = bad
    def __len__(self):
        return len(inputs)
    def __getitem__(self, index):
        if index == self.bad:
            raise OSError(5, "unreadable", f"sample {index}")
        return inputs[index], targets[index]

class OddError(Exception):
    def __init__(self, *, code):
        self.code = code
    def __str__(self):
        return f"odd {self.code}"

@rankless.job(model=model, optimizer=optimizer)
def train(x, y):
    return F.cross_entropy(model(x), y)

@rankless.job(model=model)
def look_up(ids):
    return F.embedding(ids, inputs[:8])

def attempt(function, *arguments, **options):
    try:
        function(*arguments, **options)
        return "done"
    except Exception as error:
        code = getattr(error, "errno", getattr(error, "code", None))
        return [type(error).__name__, str(getattr(error, "found", error)).strip(), code]

def weigh():
    return sum(float(each.detach().abs().sum()) for each in model.parameters())

def end(results):
    open(f"results{rank}.json", "w").write(json.dumps([results, weigh(), torch.rand(1).item()]))
"""

CAUGHT = (
    DATA
    + """
def fail_to_download():
    raise OSError(28, "no space left", "data.bin")

def collate(samples):
    if rank == rankless.world_size() - 1:
        raise OddError(code=3)
    return torch.utils.data.default_collate(samples)

def read(bad, **options):
    for x, y in rankless.loader(Data(bad), batch_size=8, **options):
        train(x, y)

def bad_label(x, y):
    y = y.clone()
    y[6] = 55
    return train(x, y)

ids = torch.arange(8)
results = [
    attempt(train, *batches[0]),
    attempt(bad_label, *batches[1]),
    attempt(look_up, torch.where(ids == 6, 77, ids)),
    attempt(train, *batches[1]),
    attempt(rankless.once, fail_to_download),
    attempt(read, 13),
    attempt(read, 21, num_workers=1),
    attempt(read, None, collate_fn=collate),
    attempt(rankless.load, "nothing-here"),
    attempt(rankless.save, "/proc/nowhere/checkpoint"),
    attempt(bad_label, *batches[2]),
    attempt(train, *batches[2]),
    attempt(look_up, ids),
]
end(results)
"""
)


def read_results(folder: Path, count: int) -> list:
    return [json.loads((folder / f"results{rank}.json").read_text()) for rank in range(count)]


def list_names(results: list) -> list[str]:
    return [each if isinstance(each, str) else each[0] for each in results]


@NEEDS_SHARED_GROUPS  # with Gloo's groups the run ends
def test_a_script_that_catches_an_exception_of_one_rank_goes_on_as_on_one_device(tmp_path):
    folders = {count: tmp_path / str(count) for count in (1, 2)}
    for count, folder in folders.items():
        folder.mkdir()
        done = run_script(CAUGHT, "-n", str(count), folder=folder)
        assert done.returncode == 0, done.stderr
    (alone, *numbers), both = read_results(folders[1], 1)[0], read_results(folders[2], 2)
    assert both[0] == both[1]
    results = both[0][0]
    assert list_names(results) == list_names(alone)
    assert both[0][1:] == pytest.approx(numbers, rel=1e-10)
    assert results[1] == ["IndexError", "Target 55 is out of bounds.", None]
    assert results[4] == ["OSError", "[Errno 28] no space left: 'data.bin'", 28]
    assert results[7][0] == "OddError"


@pytest.mark.exhaustive
def test_with_gloo_whose_waits_cannot_be_ended_an_exception_of_one_rank_ends_the_run(tmp_path):
    text = DATA + "targets[22] = 55\nend([attempt(train, *batch) for batch in batches])\n"
    done = run_script(text, "-n", "2", "--backend", "gloo", folder=tmp_path)
    assert done.returncode == 1
    results = json.loads((tmp_path / "results1.json").read_text())[0]
    assert list_names(results) == ["done", "done", "IndexError", "RanksDiverged", "RanksDiverged"]


@NEEDS_SHARED_GROUPS
def test_an_exception_of_one_rank_in_a_step_ends_the_run_and_no_later_call_trains(tmp_path):
    text = (
        DATA
        + """
def fail_in_step(*_):
    global steps
    steps += 1
    if steps == 3 and rank == 1:
        raise KeyError("in the hook")
steps = 0
optimizer.register_step_post_hook(fail_in_step)
end([attempt(train, *batch) for batch in batches])
"""
    )
    done = run_script(text, "-n", "2", folder=tmp_path)
    assert done.returncode == 1
    for rank, (results, *_) in enumerate(read_results(tmp_path, 2)):
        assert results[:2] == ["done", "done"]
        last = results[2] if rank == 1 else results[3]  # rank 0 notices it in the next call, or still in this one
        assert last[0] in (("KeyError",) if rank == 1 else ("RanksDiverged",))
        assert all(each[0] == "RanksDiverged" and "KeyError: 'in the hook'" in each[1] for each in results[4:])


@pytest.mark.exhaustive
def test_an_exception_of_a_step_that_all_ranks_raise_is_raised_as_on_one_device(tmp_path):
    text = (
        DATA
        + """
def fail_in_step(*_):
    global steps
    steps += 1
    if steps == 3:
        raise KeyError("in the hook")
steps = 0
optimizer.register_step_pre_hook(fail_in_step)
end([attempt(train, *batch) for batch in batches])
"""
    )
    done = run_script(text, "-n", "2", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    both = read_results(tmp_path, 2)
    assert both[0] == both[1]
    assert list_names(both[0][0]) == ["done", "done", "KeyError", "done", "done"]


@pytest.mark.exhaustive
def test_a_rank_whose_script_ends_while_another_one_has_raised_ends_the_run(tmp_path):
    text = (
        DATA
        + """
for number, (x, y) in enumerate(batches):
    if rank == 1 and number == 3:
        break
    if number == 3:
        y[0] = 55
    attempt(train, x, y)
"""
    )
    done = run_script(text, "-n", "2", folder=tmp_path)
    assert done.returncode == 1
    assert re.search("rank 1 ended its script while|IndexError: Target 55|RanksDiverged", done.stderr)


def test_some_of_the_ranks_raise_while_one_waits_for_them(tmp_path):
    # Each rank that raised waited until the other one had begun the operation, which both never do.
    text = """
import torch, rankless
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 30
    def __getitem__(self, index):
        if index in (12, 15):
            raise OSError(f"sample {index} is damaged")
        return torch.ones(3) * index

@rankless.job(model=model, optimizer=optimizer)
def train(rows):
    return model(rows).square().mean()

steps = 0
for epoch in range(2):
    try:
        for rows in rankless.loader(Data(), batch_size=6):
            train(rows)
            steps += 1
    except rankless.errors.DataError as error:
        print(str(error.found).strip(), flush=True)
print(f"{steps} steps", flush=True)
"""
    done = run_script(text, "-n", "3", "--devices", "cpu", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "OSError: sample 12 is damaged (index 12)\n" * 2 + "4 steps\n"


@pytest.mark.exhaustive
def test_calls_that_one_rank_had_not_counted_are_counted_by_none(tmp_path):
    # Contents are compared before few of the calls, by the number of those before which states were changed.
    text = """
import torch, rankless
from rankless.jobs.views import captured
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.Adam(model.parameters())

@rankless.job(model=model, optimizer=optimizer)
def train(rows):
    return model(rows).square().mean()

find, failed = captured.find_refused_argument, 0
for step in range(14):
    with torch.no_grad():
        model.weight.mul_(1.01)
        for state in optimizer.state.values():
            state["exp_avg"].mul_(0.5)
    if rankless.rank() == 1 and step in (2, 3, 6):  # before this rank counts the call
        captured.find_refused_argument = lambda *_, **__: rankless.errors.DataError(expected="", found="", fix="")
    try:
        train(torch.ones(4, 3))
    except rankless.errors.DataError:
        failed += 1
    captured.find_refused_argument = find
print(failed, flush=True)
"""
    done = run_script(text, "-n", "2", "--devices", "cpu", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3\n"


def test_an_exception_that_nobody_catches_is_the_root_cause(tmp_path):
    text = DATA + "targets[22] = 55\nfor batch in batches:\n    train(*batch)\n"
    done = run_script(text, "-n", "2", folder=tmp_path)
    assert done.returncode == 1
    assert "rankless: rank 1 raised IndexError: Target 55 is out of bounds." in done.stderr


def run_random_programs(folder: Path, first: int, count: int, workers: int) -> None:
    command = [sys.executable, "-m", "rankless", "run", "-n", str(workers), str(RANDOM_PROGRAMS)]
    done = subprocess.run(
        [*command, str(first), str(count)], cwd=folder, env=job_environment({}), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{count} programs, 0 wrong" in done.stdout


@pytest.mark.exhaustive
def test_random_programs_whose_ranks_fail_at_random_points_train_as_on_one_device(tmp_path):
    run_random_programs(tmp_path, 0, 6, 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_a_thousand_random_programs_whose_ranks_fail_train_as_on_one_device(tmp_path, first, workers):
    run_random_programs(tmp_path, first + (1000 if workers == 3 else 0), 100, workers)
