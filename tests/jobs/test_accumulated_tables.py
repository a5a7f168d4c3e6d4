"""Steps of several calls (`accumulate=`) of jobs with tables: those of one plain step on the rows of all calls."""

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from support.warm_runs import rankless, run_script

SCRIPT = Path(__file__).parent / "scripts/accumulate_tables.py"
USES = Path(__file__).parent / "scripts/use_accumulated_tables.py"
HETEROGENEOUS = ("--servers", "1", "--workers", "2", "--heter-workers", "1")
RUNS = [
    ("-n", "1"),
    ("-n", "3"),
    ("--servers", "1", "--workers", "1"),
    ("--servers", "2", "--workers", "3"),
    ("--servers", "2", "--workers", "2", "--copies", "1"),
    HETEROGENEOUS,
]
CASES = list(itertools.product(("sgd", "momentum", "adagrad", "sparse_adam"), RUNS))
random.Random(1).shuffle(CASES)  # the sample that always runs has some of each


def read_forms(output: str) -> dict[str, list[float]]:
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {line["form"]: line["rows"] for line in lines}


def run(folder, options, *command) -> dict[str, list[float]]:
    done = rankless("run", *options, "--seed", "3", "--no-progress", *command, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return read_forms(done.stdout)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("optimizer", "options"), CASES)
def test_a_step_of_several_calls_is_one_plain_step_on_their_rows(tmp_path, optimizer, options):
    command = [str(SCRIPT), "--optimizer", optimizer]
    if options == HETEROGENEOUS:  # which refuse weights of sparse embeddings
        command.append("--tables-alone")
    plain = subprocess.run((sys.executable, *command, "--plain"), capture_output=True, text=True, check=True)
    wanted, found = read_forms(plain.stdout), run(tmp_path, options, *command)
    assert len(wanted) >= 8
    assert list(found) == list(wanted)
    for form, numbers in wanted.items():
        assert found[form] == pytest.approx(numbers, rel=0, abs=1e-12), form


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [("--servers", "2", "--workers", "2"), ("-n", "3"), RUNS[2]])
def test_what_scripts_do_between_calls_gives_the_same_rows_everywhere(tmp_path, options):
    wanted, found = run(tmp_path, ("-n", "1"), str(USES)), run(tmp_path, options, str(USES))
    assert len(wanted) == 7
    assert list(found) == list(wanted)
    for case, numbers in wanted.items():
        assert found[case] == pytest.approx(numbers, rel=0, abs=1e-12), case
    assert wanted["admission, accumulate=3"] == pytest.approx(wanted["admission, accumulate=1"], rel=0, abs=1e-12)


KILLED = """
import os, signal
import torch
import rankless

table = rankless.parameter_server.Embedding(3)
optimizer = torch.optim.SGD(table.parameters(), 0.1)

@rankless.job(model=table, optimizer=optimizer, accumulate=3)
def train(ids):
    return table(ids).square().mean()

for number in range(7):
    if number == 4 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    train(torch.arange(6))
"""


@pytest.mark.exhaustive
def test_a_killed_worker_ends_the_run_because_it_had_gradients_of_earlier_calls(tmp_path):
    done = run_script(KILLED, "--servers", "1", "--workers", "3", "--no-progress", folder=tmp_path)
    output = done.stdout + done.stderr
    assert done.returncode == 128 + 9, output
    assert "rank 1 was killed by signal 9 (SIGKILL)" in output
    assert "could not continue without it (LostWorkerError" in output
    logs = "".join(each.read_text() for each in tmp_path.glob("log/*/rank*.log"))
    assert "accumulate=3 and tables: it had gradients of rows of earlier calls" in logs, logs
