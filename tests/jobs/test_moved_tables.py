"""Tables move through checkpoints of what has changed: from servers to more, to fewer, and to one device."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.jobs import job_environment
from support.warm_runs import rankless

SCRIPT = Path(__file__).parent / "scripts/move_tables.py"


def move(folder, options, *steps):
    """Run the script, and return what it prints."""
    script = (str(SCRIPT), "--steps", *map(str, steps))
    if options:
        done = rankless("run", *options, "--no-progress", *script, folder=folder)
    else:
        command = [sys.executable, *script]
        done = subprocess.run(command, cwd=folder, env=job_environment({}), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(re.search("RESULT (.*)", done.stdout)[1])


def written(folder, step):
    """Return the bytes of rows that a checkpoint has in files of its own, and of those that it shares."""
    files = [file.stat() for file in (folder / f"series/step-{step}").glob("rows-*")]
    return [sum(file.st_size for file in files if (file.st_nlink > 1) == shared) for shared in (False, True)]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_tables_move_from_2_servers_to_3_to_1_and_to_one_device(tmp_path):
    first = move(tmp_path, ("--servers", "2", "--workers", "3"), 4, 6)
    own, shared = written(tmp_path, 6)
    assert 0 < own < 0.6 * shared  # all rows of the table with momentum, and few of the others
    second = move(tmp_path, ("--servers", "3", "--workers", "2"), 8)
    assert second["loaded"] == first["saved"]
    third = move(tmp_path, ("--servers", "1", "--workers", "1"), 10)
    assert third["loaded"] == second["saved"]
    alone = move(tmp_path, ())
    assert alone["loaded"] == alone["saved"] == third["saved"]
    assert len({each["saved"] for each in (first, second, third)}) == 3
    (tmp_path / "plain").mkdir()
    undisturbed = move(tmp_path / "plain", (), 10)
    assert third["values"] == pytest.approx(undisturbed["values"], rel=0, abs=1e-10)
    assert sorted(os.listdir(tmp_path / "series")) == ["step-10", "step-4", "step-6", "step-8"]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [("-n", "3"), ("--servers", "3", "--workers", "1")])
def test_tables_move_from_one_device_to_workers_and_back(tmp_path, options):
    first = move(tmp_path, (), 4, 6)
    second = move(tmp_path, options, 8)
    assert second["loaded"] == first["saved"]
    assert move(tmp_path, ())["loaded"] == second["saved"]


READERS = """
import os
import torch, torch.nn.functional as F
import rankless
from rankless.extensions.servers.service.served_table import ServedTable

reads = 0
honest = ServedTable.contents

def contents(self):
    global reads
    reads += 1
    return honest(self)

ServedTable.contents = contents
torch.set_default_dtype(torch.float64)
table = rankless.parameter_server.Embedding(4, seed=1)
optimizer = torch.optim.Adagrad(table.parameters(), 0.1)

@rankless.job(model=table, optimizer=optimizer)
def train(ids):
    return table(ids).square().mean()

for step in range(3):
    train(torch.arange(40) * (step + 1))
{before}
rankless.save("saved", model=table, optimizer=optimizer{options})
print("READS", os.environ["RANK"], reads, flush=True)
rows = table.list_rows()["rows"].clone()
train(torch.arange(40))
rankless.load("saved", model=table, optimizer=optimizer)
assert torch.equal(table.list_rows()["rows"], rows)
"""


@pytest.mark.ci_sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "before", "readers"),
    [
        ("", "", {"0"}),
        ("", "if os.environ['RANK'] == '0': os.kill(os.getpid(), 9)", {"1"}),
        pytest.param(", layout='sharded'", "", {"0", "1", "2"}, marks=pytest.mark.exhaustive),
        pytest.param(", background=True", "", {"0"}, marks=pytest.mark.exhaustive),
    ],
)
def test_the_worker_that_saves_rows_alone_reads_them(tmp_path, options, before, readers):
    (tmp_path / "script.py").write_text(READERS.format(before=before, options=options))
    line = ("--servers", "2", "--workers", "3", "--no-progress")
    done = rankless("run", *line, "script.py", folder=tmp_path)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    logs = "".join(each.read_text() for each in tmp_path.glob("log/*/rank*.log"))
    found = dict(re.findall(r"READS (\d) (\d+)", logs))
    assert {rank for rank, reads in found.items() if int(reads)} == readers, output
    assert len(found) == (2 if before else 3)


SAVES = Path(__file__).parent / "scripts/save_while_servers_die.py"


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kills", "seed"), [(6, 1), *(pytest.param(12, seed, marks=pytest.mark.exhaustive) for seed in range(2, 6))]
)
def test_checkpoints_while_servers_are_killed_have_the_rows_of_their_steps(tmp_path, kills, seed):
    saves = 12
    results = []
    for count in (0, kills):
        (folder := tmp_path / str(count)).mkdir()
        options = ("--servers", "2", "--workers", "2", "--seed", "1", "--no-progress", "--server-restarts", "200")
        done = rankless("run", *options, str(SAVES), *map(str, (count, seed, saves)), folder=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        results.append(json.loads(re.search("RESULT (.*)", done.stdout)[1]))
    undisturbed, disturbed = results
    assert disturbed["killed"] == kills
    assert len(set(undisturbed["wanted"])) == saves
    assert undisturbed["wanted"] == undisturbed["found"] == disturbed["wanted"] == disturbed["found"]
    layers = [len(list((tmp_path / str(kills) / f"series/step-{save}").glob("rows-*"))) for save in range(saves)]
    assert max(layers) > 3
