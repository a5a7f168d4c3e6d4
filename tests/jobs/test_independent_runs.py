"""Runs in which workers train on batches of their own, with servers that hold all parameters."""

import functools
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.warm_runs import rankless

SCRIPT = Path(__file__).parent / "scripts/train_independently.py"


def read_result(output: str):
    return json.loads(next(line for line in output.splitlines() if line.startswith("RESULT")).removeprefix("RESULT"))


def run(folder, script, *arguments, servers=2, workers=3, mode="async", options=()):
    given = ("--servers", servers, "--workers", workers, "--server-mode", mode, "--server-restarts", 200)
    given += ("--seed", "1", "--no-progress", *(("--geo-steps", 50) if mode == "geo" else ()))
    return rankless("run", *map(str, given), *options, str(script), *map(str, arguments), folder=folder)


def train(folder, script, *arguments, **options):
    done = run(folder, script, *arguments, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return read_result(done.stdout)


@functools.cache
def plain_trainings():
    done = subprocess.run([sys.executable, str(SCRIPT), "plain"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return read_result(done.stdout)


def difference(found, wanted) -> float:
    """The largest difference of numbers in two nested results of the same form."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        return max((difference(found[key], wanted[key]) for key in wanted), default=0.0)
    if isinstance(wanted, list):
        assert len(found) == len(wanted)
        return max((difference(*pair) for pair in zip(found, wanted, strict=True)), default=0.0)
    return 0.0 if found == wanted else abs(found - wanted)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "servers", "mode"),
    [
        (3, 2, "async"),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in [(1, 2, "geo"), (1, 1, "async"), (2, 3, "bounded")]
        ),
    ],
)
def test_workers_that_take_turns_train_as_one_device(tmp_path, workers, servers, mode):
    found = train(tmp_path, SCRIPT, "rankless", workers=workers, servers=servers, mode=mode)
    wanted = plain_trainings()
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert all(map(math.isfinite, wanted[name]["losses"]))
        assert difference(found[name], wanted[name]) < 1e-12, name


SHARED = Path(__file__).parent / "scripts/share_batches.py"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("workers", "mode"),
    [(3, "async"), (2, "bounded"), *(pytest.param(n, "async", marks=pytest.mark.exhaustive) for n in (1, 2, 4))],
)
def test_every_batch_is_trained_once_by_one_worker(tmp_path, workers, mode):
    found = train(tmp_path, SHARED, 0, "saved", workers=workers, mode=mode)
    wanted = [found["epochs"] + (sample < 3) for sample in range(37)]
    assert found["epochs"] == 3
    assert found["counts"] == wanted
    assert found["rows"] == wanted
    assert found["seen"] == [37, 2 * 37, 3 * 37]
    assert sorted(found["order"]) == list(range(37))


@pytest.mark.parametrize("workers", [3, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_geo_has_the_mean_of_what_workers_train_between_meetings(tmp_path, workers):
    found = train(tmp_path, SHARED, 0, "saved", workers=workers, mode="geo")
    wanted = [(3 + (sample < 3)) / workers for sample in range(37)]
    assert found["epochs"] == 3
    assert found["counts"] == pytest.approx(wanted, rel=0, abs=1e-12)
    assert found["rows"] == pytest.approx(wanted, rel=0, abs=1e-12)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kills", [4, pytest.param(50, marks=pytest.mark.exhaustive)])
def test_every_batch_counts_once_though_servers_are_killed(tmp_path, kills):
    found = train(tmp_path, SHARED, kills, "saved", workers=3)
    assert found["killed"] == kills
    assert found["counts"] == found["rows"]
    assert set(found["counts"]) <= {found["epochs"], found["epochs"] + 1}
    assert sum(found["counts"]) == found["epochs"] * 37 + (3 if found["epochs"] == 3 else 0)


START = """
import random
import torch
import rankless
from torch import nn

torch.manual_seed(0)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.ones(4, 3)
"""
JOB = """
@rankless.job(model=model, optimizer=optimizer)
def train(inputs):
    outputs = model(inputs)
    return outputs.square().mean(), outputs
"""
REFUSED = {
    "mirrored": (
        'rankless.job(model=model, optimizer=optimizer, view="mirrored")(lambda x: model(x).mean())(inputs)',
        r'view="mirrored", whose workers have slices of their own',
    ),
    "accumulate": (
        "rankless.job(model=model, optimizer=optimizer, accumulate=2)(lambda x: model(x).mean())(inputs)",
        "accumulate=2",
    ),
    "zero": (
        'rankless.job(model=model, optimizer=optimizer, zero="gradients")(lambda x: model(x).mean())(inputs)',
        "zero='gradients'",
    ),
    "optimizer": (
        "optimizer = torch.optim.RMSprop(model.parameters())" + JOB + "train(inputs)",
        r"(?s)AdamW or rankless.parameter_server.FTRL on servers.*RMSprop",
    ),
    "half precision": (
        "model.bfloat16()" + JOB + "train(inputs.bfloat16())",
        "parameters of float32 or float64, which servers can hold",
    ),
    "sparse gradients": (
        "table = nn.Parameter(torch.ones(5, 2)); model.table = table\n"
        "model.forward = lambda ids: nn.functional.embedding(ids, table, sparse=True)\n"
        "optimizer = torch.optim.SGD([table], lr=0.1)" + JOB + "train(torch.arange(4))",
        r"(?s)besides weights of embeddings in models.*a sparse gradient of shape \[5, 2\]",
    ),
    "sparse gradients with weight decay": (
        "model = nn.Embedding(5, 2, sparse=True)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.1)" + JOB + "train(torch.arange(4))",
        r"add\(sparse, dense\) is not supported",
    ),
    "an optimizer without sparse gradients": (
        "model = nn.Embedding(5, 2, sparse=True); optimizer = torch.optim.AdamW(model.parameters(), 0.1)"
        + JOB
        + "train(torch.arange(4))",
        r"(?s)SparseAdam or rankless.parameter_server.FTRL.*AdamW",
    ),
    "a dense gradient of a sparse embedding": (
        "model = nn.Embedding(5, 2, sparse=True); optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "@rankless.job(model=model, optimizer=optimizer)\n"
        "def train(ids): return model.weight.square().mean()\n"
        "train(torch.arange(4))",
        r"(?s)a dense gradient of shape \[5, 2\]",
    ),
    "a result with elements": (
        JOB + "for _ in range(2): print((train(inputs)[1] > 0).sum())\n" * 2,
        "of a batch that worker . has taken",
    ),
    "a result in torch": (
        JOB + "for _ in range(4): print(torch.argmax(train(inputs)[1]))\n",
        "of a batch that worker . has taken",
    ),
    "other batches": (
        JOB + "train(torch.randn(4, 3) + rankless.rank())\nrankless.save('saved', model=model)",
        r"(?s)the same training calls with the same batches.*other batches",
    ),
    "fewer calls": (
        JOB + "for _ in range(3 + rankless.rank()): train(inputs)\nrankless.save('saved', model=model)",
        "3 training calls",
    ),
    "parameters changed by the job": (
        "@rankless.job(model=model, optimizer=optimizer)\ndef train(inputs):\n"
        "    with torch.no_grad(): model.weight.clamp_(-0.1, 0.1)\n    return model(inputs).mean()\ntrain(inputs)",
        "it changes model.weight",
    ),
    "parameters changed between steps": (
        JOB + "for step in range(5):\n    train(inputs)\n    model.weight.data.clamp_(-0.01, 0.01)\n"
        "    model.bias.data += 1e-3",
        r"a change of a parameter of shape \[1, 3\] between steps",
    ),
    "parameters that differ": (
        "model.bias.data += rankless.rank()" + JOB + "train(inputs)",
        "other values on worker 1 than on worker 0",
    ),
    "an error of one worker": (
        JOB + "train(inputs)\nif rankless.rank() == 1: raise KeyError('mine')\nfor _ in range(10**6): train(inputs)",
        r"(?s)rank 1 raised KeyError: 'mine'.*the job was ended",
    ),
}


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("name", REFUSED)
def test_what_independent_workers_cannot_do_is_refused(tmp_path, name):
    body, message = REFUSED[name]
    script = tmp_path / "script.py"
    script.write_text(START + body)
    done = run(tmp_path, script, workers=2, servers=1)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(message, done.stderr), done.stderr


@pytest.mark.exhaustive
def test_more_jobs_than_the_staleness_allows_are_refused(tmp_path):
    """Worker 0 would wait at its last call for worker 1, which would wait for it at the end of the pass."""
    script = tmp_path / "script.py"
    body = (
        "for batch in rankless.loader([torch.ones(4, 3)] * 3, batch_size=None):\n    train(batch)\n    again(batch)\n"
    )
    again = "again = rankless.job(model=model, optimizer=optimizer)(lambda x: model(x).sum())\n"
    script.write_text(START + JOB + again + body)
    done = run(tmp_path, script, mode="bounded", options=("--staleness", "0"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "fix:      give --staleness 1 or more" in done.stderr
    done = run(tmp_path, script, mode="bounded", options=("--staleness", "1"), workers=2)
    assert done.returncode == 0, done.stdout + done.stderr
