"""Under `rankless run` a script that knows no ranks is one training, in one process, as under plain Python."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.jobs import DEADLINE_SECONDS
from support.warm_runs import rankless, run_script

pytestmark = pytest.mark.slow

TRAINING = """
import json, os, subprocess, sys, threading
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
torch.set_default_dtype(torch.float64)
rows = TensorDataset(torch.randn(22, 4), torch.randn(22, 2))
model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

def train(model):
    for x, y in DataLoader(rows, batch_size=5, shuffle=True):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.12f}")

train(model)
"""
SURROUNDINGS = """
NAMES = "[name for name in sorted(os.environ) if name.partition('_')[0] in "
NAMES += "('RANK', 'LOCAL', 'WORLD', 'MASTER', 'GROUP', 'ROLE', 'TORCHELASTIC')]"
print(eval(NAMES))
print(subprocess.run([sys.executable, "-c", f"import os; print({NAMES})"], capture_output=True, text=True).stdout)
dist = torch.distributed
print(dist.is_available(), dist.is_initialized(), dist.is_torchelastic_launched(), dist.group.WORLD)
for call in (dist.get_rank, dist.get_world_size, dist.barrier, lambda: dist.all_reduce(torch.ones(1))):
    try:
        print(call())
    except ValueError as error:
        print(error)
print(nn.SyncBatchNorm(3)(torch.ones(2, 3)).shape if torch.cuda.is_available() else "no GPU")
train(model)
"""
REFUSALS = """
import torch.distributed.fsdp, torch.multiprocessing as mp
import rankless
from rankless.errors import ConfigError

USES = {
    "torch.distributed.init_process_group": lambda: torch.distributed.init_process_group("gloo"),
    "torch.distributed.init_process_group by a mesh": lambda: torch.distributed.init_device_mesh("cpu", (2,)),
    "torch.distributed.init_process_group by FSDP": lambda: torch.distributed.fsdp.fully_shard(model),
    "torch.nn.parallel.DistributedDataParallel": lambda: nn.parallel.DistributedDataParallel(model),
    "torch.multiprocessing.spawn": lambda: mp.spawn(print, nprocs=2),
    "torch.multiprocessing.start_processes": lambda: mp.start_processes(print, nprocs=2),
    "a function of Rankless": rankless.rank,
    "a function of Rankless: world size": rankless.world_size,
    "a function of Rankless: init": rankless.init,
    "a function of Rankless: spawn": lambda: rankless.spawn(print, nprocs=2),
    "a function of Rankless: save": lambda: rankless.save("file", model=model),
    "a function of Rankless: job": lambda: rankless.job(model=model)(model)(torch.ones(2, 4)),
    "a call that joins other ranks": __import__("rankless.extensions.horovod.torch").extensions.horovod.torch.init,
}
for name, use in USES.items():
    try:
        use()
    except ConfigError as error:
        assert error.found.startswith(name.partition(" by ")[0].partition(":")[0]), (name, error.found)
        assert "rankless run --separate" in error.fix
        assert error.where.startswith("script.py:"), error.where
        print("refused", name)
print(rankless.once(sorted, [2, 1]))
train(model)
"""
ENDS = {
    "sys.exit(3)": "",
    "sys.exit('why')": "",
    "os._exit(5)": "",
    "raise ValueError('bad')": "ValueError: bad",
    "os.kill(os.getpid(), 9)": "",
    "os.environ['RANK']": "start it with `rankless run --separate`",
    "torch.distributed.barrier()": "start it with `rankless run --separate`",
    "nn.parallel.DistributedDataParallel(model)": "found:    torch.nn.parallel.DistributedDataParallel",
}
LATE_END = """
rank = json.loads(os.environ["RANKLESS_WORKER_PLAN"])["rank"]
try:
    raise KeyError("lost")
finally:
    if rank == 0:
        threading.Event().wait(1.5)
    print("cleaned up")
"""
DATA_PARALLEL = """
model = nn.DataParallel(model, device_ids=[0, 1])
print(list(model.state_dict()), model.module[0].weight.shape)
train(model)
"""


def run_plain(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the script of a folder by plain Python."""
    return subprocess.run(
        [sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, timeout=DEADLINE_SECONDS
    )


def run_logical(text: str, folder: Path, *options: str, workers: str = "2") -> subprocess.CompletedProcess[str]:
    """Run a script in the logical view."""
    return run_script(text, "-n", workers, "--devices", "cpu", "--logical", *options, folder=folder)


@pytest.mark.parametrize(
    ("options", "workers"),
    [((), "3"), pytest.param(("--no-warm",), "2", marks=pytest.mark.exhaustive)],
    ids=["warm", "plain"],
)
def test_a_plain_script_is_one_training_and_its_user_reads_so(options: tuple[str, ...], workers: str, tmp_path: Path):
    job = run_script(TRAINING, "-n", workers, "--devices", "cpu", *options, folder=tmp_path)
    assert job.returncode == 0, job.stderr
    assert job.stdout == run_plain(tmp_path).stdout
    assert job.stderr.splitlines()[1] == (
        f"rankless: script.py knows no ranks: one training, its batches divided between {workers} workers "
        f"(--separate runs {workers} copies)"
    )
    assert "trains a model of its own" not in job.stderr


def test_copies_of_a_plain_script_get_a_notice_that_names_the_logical_view(tmp_path: Path):
    job = run_script(TRAINING, "-n", "2", "--devices", "cpu", "--separate", folder=tmp_path)
    assert job.returncode == 0, job.stderr
    assert "knows no ranks" not in job.stderr
    assert "each of the 2 workers trains a model of its own" in job.stderr


def test_a_script_that_reads_its_rank_keeps_it_and_its_user_reads_so(tmp_path: Path):
    script = "import os, torch\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'])"
    job = run_script(script, "-n", "2", "--devices", "cpu", "--show", "all", folder=tmp_path)
    assert sorted(job.stdout.splitlines()) == ["[0] 0 2", "[1] 1 2"]
    assert job.stderr.splitlines()[1] == (
        "rankless: script.py reads RANK (script.py:2): it runs as 2 ranks "
        "(--logical divides the batches of one training)"
    )
    quiet = rankless("run", "-n", "2", "--devices", "cpu", "-q", "script.py", folder=tmp_path)
    assert quiet.stderr == ""


def test_the_script_and_its_subprocesses_find_no_launcher_and_no_process_group(tmp_path: Path):
    job = run_logical(TRAINING + SURROUNDINGS, tmp_path)
    assert job.returncode == 0, job.stderr
    assert job.stdout == run_plain(tmp_path).stdout
    assert "[]\n[]\n\nTrue False False None\nDefault process group has not been initialized" in job.stdout


def test_what_needs_ranks_ends_with_an_error_that_names_the_other_option(tmp_path: Path):
    job = run_logical(TRAINING + REFUSALS, tmp_path)
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("refused ") == REFUSALS.count("lambda:") + 4
    (tmp_path / "script.py").write_text(TRAINING + "print([1, 2])\ntrain(model)\n")
    plain = run_plain(tmp_path).stdout
    assert "".join(line for line in job.stdout.splitlines(True) if not line.startswith("refused")) == plain


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize(("end", "shown"), ENDS.items(), ids=ENDS)
def test_the_exit_code_is_that_of_plain_python(end: str, shown: str, tmp_path: Path):
    job = run_logical(TRAINING + end, tmp_path)
    plain = run_plain(tmp_path)
    assert job.returncode == plain.returncode % 256 or job.returncode == 128 - plain.returncode
    assert job.stdout.replace("why\n", "").startswith(plain.stdout)
    assert shown in job.stderr
    assert "[rank" not in job.stdout + job.stderr


@pytest.mark.exhaustive
def test_rank_0_comes_to_its_end_after_an_exception_that_all_raise(tmp_path: Path):
    job = run_logical(TRAINING + LATE_END, tmp_path)
    assert job.returncode == 1
    assert job.stdout.splitlines()[-1] == "cleaned up"


@pytest.mark.exhaustive
def test_data_parallel_runs_its_module_on_whole_batches(tmp_path: Path):
    job = run_logical(TRAINING + DATA_PARALLEL, tmp_path)
    assert job.returncode == 0, job.stderr
    (tmp_path / "script.py").write_text(TRAINING + DATA_PARALLEL.replace("device_ids=[0, 1]", ""))
    assert job.stdout == run_plain(tmp_path).stdout


GAN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(2)
maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
judge = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1), nn.Sigmoid())
of_maker, of_judge = (torch.optim.Adam(each.parameters(), 1e-3) for each in (maker, judge))
measure = nn.BCELoss()
for (real,) in DataLoader(TensorDataset(torch.randn(48, 2)), 12):
    rows = real.size(0)
    made = maker(torch.randn(rows, 4))
    of_judge.zero_grad()
    (measure(judge(real), torch.ones(rows, 1)) + measure(judge(made.detach()), torch.zeros(rows, 1))).backward()
    of_judge.step()
    of_maker.zero_grad()
    measure(judge(made), torch.ones(rows, 1)).backward()
    of_maker.step()
"""


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize(("script", "workers"), [(GAN, "2"), (TRAINING.replace("64", "32"), "3")], ids=["GAN", "norms"])
def test_verify_checks_a_plain_script_in_the_logical_view(script: str, workers: str, tmp_path: Path):
    (tmp_path / "train.py").write_text(script)
    options = ["-n", workers, "--devices", "cpu", "--seed", "1", "--json", "report.json"]
    job = rankless("verify", *options, "train.py", folder=tmp_path)
    assert job.returncode == 0, job.stdout + job.stderr
    assert f"train.py knows no ranks: one training, its batches divided between {workers} workers" in job.stderr
    assert f"on 1 and on {workers} workers in the logical view" in job.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["logical"]
    assert report["largest_loss_difference"] < 1e-6


@pytest.mark.exhaustive
def test_verify_still_finds_copies_of_one_training(tmp_path: Path):
    (tmp_path / "train.py").write_text(GAN)
    options = ["-n", "2", "--devices", "cpu", "--separate", "--seed", "1"]
    job = rankless("verify", *options, "train.py", folder=tmp_path)
    assert job.returncode == 3, job.stdout + job.stderr
    assert "every one of the 2 ranks reads the same samples" in job.stdout
