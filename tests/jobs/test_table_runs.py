"""Jobs with tables of rows, on several workers: the same training as plain PyTorch with `nn.Embedding(sparse=True)`."""

import itertools
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.warm_runs import rankless, run_script

SCRIPT = Path(__file__).parent / "scripts/train_tables.py"
USES = Path(__file__).parent / "scripts/use_tables.py"


def read_forms(output: str) -> dict[str, list[float]]:
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {line["form"]: [*line["losses"], *line["rows"]] for line in lines}


PARTS = 4
RUNS = [("-n", str(workers)) for workers in (1, 2, 3, 4)] + [
    ("--servers", str(servers), "--workers", str(workers))
    for servers, workers in ((1, 1), (1, 2), (2, 2), (2, 3), (3, 4))
]
RUNS[-1] += ("--encrypt-servers",)
CASES = list(itertools.product(("sgd", "momentum", "adagrad", "sparse_adam"), RUNS, range(PARTS)))
random.Random(5).shuffle(CASES)  # the sample that always runs has some of each


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("optimizer", "options", "part"), CASES)
def test_every_form_of_a_lookup_trains_as_a_plain_embedding(tmp_path, optimizer, options, part):
    command = (str(SCRIPT), "--optimizer", optimizer, "--part", str(part), "--parts", str(PARTS))
    plain = subprocess.run((sys.executable, *command, "--plain"), capture_output=True, text=True, check=True)
    done = rankless("run", *options, "--no-progress", *command, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    wanted, found = read_forms(plain.stdout), read_forms(done.stdout)
    assert len(wanted) > 5
    assert list(found) == list(wanted)
    for form, numbers in wanted.items():
        assert found[form] == pytest.approx(numbers, rel=0, abs=1e-11), form


TRAINING = """
import copy, sys
import torch, torch.nn.functional as F
import rankless

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
table = rankless.parameter_server.Embedding(4{table})
layer = torch.nn.Linear(4, 1)
model = torch.nn.ModuleList([table, layer])
optimizers = [torch.optim.Adagrad(table.parameters(), 0.1), torch.optim.AdamW(layer.parameters(), 1e-2)]

{before}

@rankless.job(model={model}, optimizer=optimizers{job})
def train(ids, targets):
    return F.mse_loss(layer(table(ids)).flatten(), targets)

@rankless.job(model=model)
def predict(ids):
    return layer(table(ids))

def epoch(count=6):
    for step in range(count):
        ids = torch.arange(7) * (step + 3) % 11 * 10**15
        loss = train(ids, torch.arange(7.0))
    return loss

{body}
with torch.no_grad():
    rows = table(torch.arange(11) * 10**15)
print("RESULT", *rows.flatten().tolist())
"""


def train(folder, *options, table="", before="", model="model", job="", body="epoch()"):
    text = TRAINING.format(table=table, before=before, model=model, job=job, body=body)
    return run_script(text, *options, "--seed", "3", "--no-progress", folder=folder)


def read_rows(done) -> list[float]:
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(word) for word in re.search("RESULT (.*)", done.stdout).group(1).split()]


@pytest.fixture(scope="module")
def uses_on_one_worker(tmp_path_factory) -> dict[str, list[float]]:
    done = rankless("run", "--no-progress", str(USES), folder=tmp_path_factory.mktemp("uses"))
    assert done.returncode == 0, done.stdout + done.stderr
    return read_forms(done.stdout)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("options", [("-n", "3"), ("--servers", "2", "--workers", "2")])
def test_what_scripts_do_with_tables_gives_the_same_rows_everywhere(tmp_path, options, uses_on_one_worker):
    done = rankless("run", *options, "--no-progress", str(USES), folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = read_forms(done.stdout)
    assert list(found) == list(uses_on_one_worker)
    for case, numbers in uses_on_one_worker.items():
        assert found[case] == pytest.approx(numbers, rel=0, abs=1e-12), case


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize(
    ("case", "text"),
    [
        ({"job": ', zero="optimizer"'}, "zero="),
        ({"job": ", capture=False"}, "inside a captured job"),
        ({"job": ', view="mirrored"'}, "inside a captured job"),
        ({"model": "layer", "before": "del optimizers[0]"}, "among the models"),
        ({"body": "epoch(1); table(torch.arange(3)).sum().backward()"}, "inside a captured job"),
        ({"job": ", clip_norm=1.0"}, "dense gradients"),
        ({"job": ", clip_value=1.0"}, "dense gradients"),
        ({"job": ", gradient_norm=True"}, "dense gradients"),
        ({"table": ", seed=rankless.rank()"}, "same table on all workers"),
    ],
)
def test_what_several_workers_cannot_share_is_refused(tmp_path, case, text):
    done = train(tmp_path, "-n", "2", **case)
    assert done.returncode != 0
    assert text in done.stdout + done.stderr, done.stdout + done.stderr
    assert "fix" in done.stdout + done.stderr


def test_a_mesh_of_several_axes_is_refused_for_tables(tmp_path):
    done = train(tmp_path, "--mesh", "data=1,tensor=2")
    assert done.returncode != 0
    assert "axis data alone" in done.stdout + done.stderr, done.stdout + done.stderr


FAULT = """
import torch, torch.nn.functional as F
import rankless
from rankless.extensions.servers.table_training import TableTraining

table = rankless.parameter_server.Embedding(4)
optimizer = torch.optim.Adagrad(table.parameters(), 0.1)
honest = TableTraining.add_of_program

def forget(self, ids, gradients):
    return honest(self, ids, gradients * (rankless.rank() != 1))

TableTraining.add_of_program = forget

@rankless.job(model=table, optimizer=optimizer)
def train(ids):
    return table(ids).square().sum(1).mean()

for step in range(4):
    train(torch.arange(8) + step)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [("-n", "2"), ("--servers", "2", "--workers", "2")])
def test_verify_finds_gradients_of_rows_that_one_worker_loses(tmp_path, options):
    (tmp_path / "script.py").write_text(FAULT)
    done = rankless("verify", *options, "script.py", folder=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "rows" in done.stdout + done.stderr
    (tmp_path / "script.py").write_text(FAULT.replace("TableTraining.add_of_program = forget", ""))
    done = rankless("verify", *options, "script.py", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same training" in done.stdout


@pytest.mark.exhaustive
@pytest.mark.parametrize("ids", ["torch.arange(8) + step", "(torch.arange(8) + step) * 10**17"])
def test_verify_finds_a_learning_rate_that_depends_on_the_number_of_workers(tmp_path, ids):
    text = FAULT.replace("TableTraining.add_of_program = forget", "").replace("torch.arange(8) + step", ids)
    text = text.replace("Adagrad(table.parameters(), 0.1)", "SGD(table.parameters(), 1 + rankless.world_size() / 50)")
    (tmp_path / "script.py").write_text(text)
    done = rankless("verify", "-n", "2", "script.py", folder=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "rows" in done.stdout + done.stderr
    assert "which has tables" in done.stdout + done.stderr


@pytest.mark.exhaustive
def test_a_job_with_tables_is_captured_once(tmp_path):
    done = train(tmp_path, "-n", "2", body="epoch(20)")
    assert read_rows(done)
    assert "captured" not in done.stdout + done.stderr
