"""Ranks that part, as real jobs do it: all stop, and the difference is named."""

import subprocess
import sys
import time

import pytest
from support.warm_runs import run_script

pytestmark = pytest.mark.slow

SCRIPT = """
import sys, time, torch, rankless
from torch import nn

model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scale = 1.0

@rankless.job(model=model, optimizer=optimizer{options})
def train(x, y):
    return scale * (model(x) - y).square().mean()

@rankless.job(model=model)
def evaluate(x):
    return model(x)

data = torch.utils.data.TensorDataset(torch.randn(12, 3))
generator = torch.Generator().manual_seed(1)
odd = rankless.rank() == rankless.world_size() - 1
for step in range(6):
    x, y = torch.randn(8, 3, generator=generator), torch.randn(8, 1, generator=generator)
    if step == 3:
        print("AT", time.time(), flush=True)
        {fault}
    train(x, y)
print("done")
"""

FAULTS = {
    "a skipped call": ("if odd: continue", "x and y on rank"),
    "a loop left early": ("if odd: break", "the end of the script"),
    "other values": ("y = y + 1 if odd else y", "y on rank"),
    "other shapes": ("x, y = (x[:7], y[:7]) if odd else (x, y)", "float32[7, 3], float32[7, 1]"),
    "another job": ("evaluate(x) if odd else None", "call 1 of job 'evaluate'"),
    "a value that the job reads": ("scale = 2.0 if odd else 1.0", "Python values that the job reads on rank"),
    "more random numbers": ("torch.rand(1) if odd else None", "random generator on rank"),
    "save on one rank": ("rankless.save('m', model=model) if odd else None", "rankless.save"),
    "once on one rank": ("rankless.once(len, 'abc') if odd else None", "rankless.once(len)"),
    "a model loaded on one rank": (
        "model.load_state_dict(model.state_dict()) if odd else None",
        "its models changed outside jobs",
    ),
    "a loader on one rank": (
        "[None for _ in rankless.loader(data, batch_size=4)] if odd else None",
        "pass 1 of a loader of TensorDataset",
    ),
    "a print of a batch on one rank": (
        "batch = next(iter(rankless.loader(data, batch_size=4)))[0]; print(batch.sum()) if odd else None",
        "an operation on a whole batch of torch.float32 [4, 3] outside jobs",
    ),
}


def script(fault, options=""):
    return SCRIPT.replace("{fault}", fault).replace("{options}", options)


def cases():
    for place, name in enumerate(FAULTS):
        for workers in (2, 3):
            marks = [] if workers == 2 + place % 2 else [pytest.mark.exhaustive]
            yield pytest.param(name, workers, marks=marks, id=f"{name}, {workers} workers")


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize(("name", "workers"), list(cases()))
def test_all_ranks_stop_and_the_difference_is_named(name, workers, tmp_path):
    fault, sign = FAULTS[name]
    done = run_script(script(fault), "-n", str(workers), folder=tmp_path)
    ended = time.time()
    assert done.returncode == 1
    assert "done" not in done.stdout
    assert "RanksDiverged" in done.stderr
    assert sign in done.stderr
    assert "script.py:" in done.stderr
    reached = float(done.stdout.split("AT ")[1].split()[0])
    assert ended - reached < 10  # 2 s on a machine that does nothing else; none of PyTorch's timeouts of minutes


def test_models_are_compared_on_request(tmp_path):
    fault = "model[2].weight.data.add_(1) if odd else None"
    done = run_script(script(fault, ", check_synchronized_every=5"), "-n", "3", folder=tmp_path)
    assert done.returncode == 1
    assert "the same parameters and buffers on every rank before call 5 of job 'train'" in done.stderr
    assert "model.2.weight on rank 2 not rank 0's" in done.stderr


def test_models_that_differ_after_a_load_get_rank_0s_with_a_warning(tmp_path):
    fault = "model.load_state_dict({k: v + odd for k, v in model.state_dict().items()})"
    done = run_script(script(fault), "-n", "2", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "differed between ranks at call 4, changed outside jobs" in done.stderr
    assert "model.0.bias on rank 1" in done.stderr


@pytest.mark.exhaustive
def test_ranks_of_torchrun_are_compared_too(tmp_path):
    (tmp_path / "script.py").write_text(script("if odd: break"))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "RanksDiverged" in done.stderr
    assert "the end of the script" in done.stderr
