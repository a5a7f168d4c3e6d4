"""Jobs with `nn.Embedding(sparse=True)` and `nn.EmbeddingBag(sparse=True)`: the same training as plain PyTorch."""

import itertools
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.warm_runs import rankless, run_script

SCRIPT = Path(__file__).parent / "scripts/train_sparse.py"
USES = Path(__file__).parent / "scripts/use_sparse_weights.py"
OPTIMIZERS = ("sgd", "momentum", "nesterov", "adagrad", "sparse_adam", "ftrl")
RUNS = [("-n", "1"), ("-n", "2"), ("-n", "3"), *(("--servers", "2", "-n", str(count)) for count in (1, 2, 3))]
PARTS = 4
CASES = list(itertools.product(RUNS, OPTIMIZERS, range(PARTS)))
random.Random(5).shuffle(CASES)  # the sample that always runs has some of each


def read_forms(output: str) -> dict[str, dict[str, list[float]]]:
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {line.pop("form"): line for line in lines}


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("options", "optimizer", "part"), CASES)
def test_every_form_of_a_sparse_embedding_trains_as_in_plain_pytorch(tmp_path, options, optimizer, part):
    command = (str(SCRIPT), "--optimizer", optimizer, "--part", str(part), "--parts", str(PARTS))
    plain = subprocess.run((sys.executable, *command, "--plain"), capture_output=True, text=True, check=True)
    done = rankless("run", *options, "--no-progress", *command, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    wanted, found = read_forms(plain.stdout), read_forms(done.stdout)
    assert len(wanted) > 4
    assert list(found) == list(wanted)
    for form, parts in wanted.items():
        for part, numbers in parts.items():
            assert found[form][part] == pytest.approx(numbers, rel=0, abs=1e-10), f"{form}: {part}"


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--servers", "2", "-n", "2"),
        *(pytest.param(each, marks=pytest.mark.exhaustive) for each in RUNS if each[-1] != "2"),
    ],
    ids=" ".join,
)
def test_what_scripts_do_with_sparse_weights_gives_what_plain_pytorch_gives(tmp_path, options):
    plain = subprocess.run((sys.executable, str(USES), "--plain"), capture_output=True, text=True, check=True)
    # PyTorch's own momentum buffers are sparse, and checkpoints refuse these.
    left_out = () if options[0] == "--servers" else ("--skip-momentum",)
    done = rankless("run", *options, "--no-progress", str(USES), *left_out, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    wanted, found = read_forms(plain.stdout), read_forms(done.stdout)
    assert len(found) > 60
    assert len(found) == len(wanted) or left_out
    for case, parts in found.items():
        for part, numbers in parts.items():
            assert numbers == pytest.approx(wanted[case][part], rel=0, abs=1e-10), f"{case}: {part}"


TRAINING = """
import torch, torch.nn.functional as F
from torch import nn
import rankless

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
embedding = nn.{embedding}
layer = nn.Linear(3, 1)
optimizers = [torch.optim.{optimizer}, torch.optim.SGD(layer.parameters(), 0.1)]

@rankless.job(model=nn.ModuleList([embedding, layer]), optimizer=optimizers{job})
def train(ids):
    {within}
    return layer(embedding(ids)).square().mean()

def epoch(ids=torch.arange(6)[:, None]):
    for step in range(4):
        loss = train((ids + step) % 11)
    return loss

{body}
print("RESULT", *embedding.weight.flatten().tolist(), *layer.weight.flatten().tolist())
"""
BAG = "EmbeddingBag(11, 3, sparse=True)"
ADAGRAD = "Adagrad(embedding.parameters(), 0.1)"


def train(folder, *options, embedding=BAG, optimizer=ADAGRAD, job="", within="pass", body="epoch()"):
    text = TRAINING.format(embedding=embedding, optimizer=optimizer, job=job, within=within, body=body)
    return run_script(text, *options, "--seed", "3", "--no-progress", folder=folder)


WITHIN = "with torch.no_grad(): embedding.weight.mul_(0.9)"
ONE_CHANGES = "epoch()\nif rankless.rank() == 1: embedding.weight.data[3] = 0\nepoch()"
FREED = "epoch(); embedding.float()"


@pytest.mark.ci_sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("servers", "case", "texts"),
    [
        ("0", {"body": "train(torch.tensor([[1], [2], [11]]))"}, ("ids from 0 to 10", "found:    11")),
        ("2", {"body": "train(torch.tensor([[1], [-4], [1]]))"}, ("ids from 0 to 10", "found:    -4")),
        ("2", {"within": WITHIN}, ("does not change", "weight")),
        ("2", {"body": ONE_CHANGES}, ("all workers change alike", "worker 1")),
        ("2", {"body": FREED}, ("same shape, dtype and device",)),
        ("2", {"job": ', zero="optimizer"'}, ("zero=",)),
        ("2", {"optimizer": "Adam(embedding.parameters())"}, ("SparseAdam", "Adam")),
        ("2", {"embedding": "EmbeddingBag(11, 3, sparse=True).to(torch.bfloat16)"}, ("float32 or float64",)),
    ],
)
def test_what_cannot_be_one_training_is_refused_with_a_fix_and_the_line(tmp_path, servers, case, texts):
    done = train(tmp_path, "-n", "2", "--servers", servers, **case)
    assert done.returncode != 0
    output = done.stdout + done.stderr
    assert all(text in output for text in (*texts, "fix", "script.py")), output


def read_result(done) -> list[float]:
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(word) for word in re.search("RESULT (.*)", done.stdout).group(1).split()]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        {"job": ", capture=False"},
        {"job": ", accumulate=2", "optimizer": "SGD(embedding.parameters(), 0.1)"},
        {"embedding": "EmbeddingBag(11, 3, sparse=True, max_norm=0.5)"},
        {"body": "epoch()\nif rankless.rank() == 0: print(embedding.weight.norm())\nepoch()"},
        {"job": ", check_synchronized_every=2"},
    ],
)
def test_options_of_jobs_give_the_same_rows_on_servers_as_on_one_worker(tmp_path, case):
    wanted = read_result(train(tmp_path, "-n", "1", **case))
    assert read_result(train(tmp_path, "-n", "2", "--servers", "2", **case)) == pytest.approx(wanted, rel=0, abs=1e-12)


@pytest.mark.exhaustive
def test_a_mesh_of_several_axes_is_refused_for_weights_on_servers(tmp_path):
    done = train(tmp_path, "--mesh", "data=1,tensor=2", "--servers", "1")
    assert done.returncode != 0
    assert "axis data alone" in done.stdout + done.stderr, done.stdout + done.stderr


FAULT = """
import torch
from torch import nn
import rankless

torch.manual_seed(0)
bags, layer = nn.EmbeddingBag(40, 4, sparse=True, mode="sum"), nn.Linear(4, 1)
optimizers = [torch.optim.Adagrad(bags.parameters(), 0.1), torch.optim.SGD(layer.parameters(), 0.1)]

@rankless.job(model=nn.ModuleList([bags, layer]), optimizer=optimizers)
def train(ids):
    return layer(bags(ids)).square().mean()

for step in range(4):
    {fault}
    train((torch.arange(24).reshape(8, 3) * 5 + step) % 40)
"""
WORKERS_RATE = "optimizers[0].param_groups[0]['lr'] = 0.1 * rankless.world_size()"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_verify_compares_weights_on_servers_with_those_of_one_worker(tmp_path):
    options = ("verify", "--servers", "2", "--workers", "3", "script.py")
    (tmp_path / "script.py").write_text(FAULT.format(fault="pass"))
    done = rankless(*options, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same training" in done.stdout
    (tmp_path / "script.py").write_text(FAULT.format(fault=WORKERS_RATE))
    done = rankless(*options, folder=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "weight" in done.stdout + done.stderr
