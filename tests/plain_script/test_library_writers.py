"""Libraries that write by their own means, in a plain script in the logical view."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from library_cases import CASES, is_installed
from support.jobs import job_environment
from support.warm_runs import rankless, run_script

SCRIPT = Path(__file__).with_name("writer_cases.py")
WANDB = """
import os, time

class Run:
    def __init__(self, mode):
        self.mode = mode
        if mode != "disabled":
            os.makedirs("wandb_run", exist_ok=True)
            self.file = open(f"wandb_run/{time.time_ns()}", "w")  # another name on each rank

    def log(self, values, step=None):
        if self.mode != "disabled":
            print({name: round(float(value), 6) for name, value in values.items()}, step, file=self.file, flush=True)

    def finish(self):
        if self.mode != "disabled":
            self.file.close()

run = None

def init(project=None, mode="online"):
    global run, log, finish
    run = Run(mode)
    log, finish = run.log, run.finish
    return run

def log(values, step=None):
    raise RuntimeError("call init first")
"""
USES_WANDB = """
import torch, wandb
from torch.utils.data import DataLoader, TensorDataset
run = wandb.init(project="test")
for step, (batch,) in enumerate(DataLoader(TensorDataset(torch.arange(14.0).reshape(14, 1)), batch_size=7)):
    wandb.log({"mean": batch.mean()}, step=step)
    run.log({"sum": batch.sum()})
wandb.finish()
print(open("after.txt", "w").write("done"))
"""


def list_files(folder: Path) -> list[str]:
    """Return the files of a folder, without times in their names."""
    names = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return sorted(name.partition(".out.")[0].partition("runs/No")[0] for name in names if not name.startswith("log/"))


@pytest.mark.slow
def test_values_of_divided_batches_are_written_once(tmp_path):
    pytest.importorskip("tensorboard", reason="torch.utils.tensorboard needs it, and Rankless does not")
    plain, logical = tmp_path / "plain", tmp_path / "logical"
    plain.mkdir()
    logical.mkdir()
    done = rankless("run", "--logical", "-n", "2", "--quiet", str(SCRIPT), folder=logical)
    assert done.returncode == 0, done.stderr
    environment = job_environment({"OMP_NUM_THREADS": "1"})
    command = [sys.executable, str(SCRIPT)]
    wanted = subprocess.run(command, cwd=plain, env=environment, capture_output=True, text=True, check=True)
    printed = [[line for line in each.stdout.splitlines() if "events" not in line] for each in (done, wanted)]
    assert printed[0] == printed[1]
    assert list_files(logical) == list_files(plain)
    for name in ("batch.safetensors", "batch.npy", "batch.pt"):
        assert (logical / name).read_bytes() == (plain / name).read_bytes()


SAVES = """
import torch
from safetensors.torch import load_file, save_file
save_file({"a": torch.ones(2)}, "a.safetensors")
print(load_file("a.safetensors")["a"].sum().item())
"""


@pytest.mark.slow
def test_safetensors_writes_one_file_and_replaces_no_other(tmp_path):
    done = run_script(SAVES, "--logical", "-n", "2", "--quiet", folder=tmp_path)
    assert done.stdout == "2.0\n", done.stderr
    assert not os.path.isfile(os.devnull), "rank 1 has replaced the null device by its file"


@pytest.mark.slow
def test_rank_0_alone_has_a_run_of_wandb(tmp_path):
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "__init__.py").write_text(WANDB)
    done = run_script(USES_WANDB, "--logical", "-n", "2", "--quiet", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (written,) = (tmp_path / "wandb_run").iterdir()
    assert written.read_text() == "{'mean': 3.0} 0\n{'sum': 21.0} None\n{'mean': 10.0} 1\n{'sum': 70.0} None\n"
    assert (tmp_path / "after.txt").read_text() == "done"


LIBRARIES = Path(__file__).with_name("library_cases.py")
Written = tuple[dict[str, bytes], list[str]]


def read_case(written: Written, case: str) -> tuple[dict[str, bytes], list[str]]:
    files, lines = written
    names = {name: data for name, data in files.items() if name.partition("/")[0] == case}
    return names, [line for line in lines if line.startswith(f"{case} ")]


def read_written(folder: Path, output: str) -> Written:
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return files, output.splitlines()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("plain")
    command, environment = [sys.executable, str(LIBRARIES)], job_environment({"OMP_NUM_THREADS": "1"})
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return read_written(folder, done.stdout)


EQUAL = pytest.param(("2", "none"), id="equal", marks=pytest.mark.exhaustive)
SLOW = pytest.param(("2", "0"), id="slow 0", marks=pytest.mark.exhaustive)
SLOW_OF_3 = pytest.param(("3", "1"), id="slow 1 of 3")


@pytest.fixture(scope="module", params=[EQUAL, SLOW, SLOW_OF_3])
def logical(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    workers, slow = request.param
    folder, logs = tmp_path_factory.mktemp("logical"), tmp_path_factory.mktemp("log")
    options = ("--logical", "-n", workers, "--log-dir", str(logs), "--preload", "slow_rank")
    path = os.pathsep.join(filter(None, [str(LIBRARIES.parent), os.environ.get("PYTHONPATH", "")]))
    done = rankless("run", *options, str(LIBRARIES), folder=folder, PYTHONPATH=path, SLOW_RANK=slow)
    assert done.returncode == 0, done.stderr
    assert "every rank writes" not in done.stderr
    return read_written(folder, done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_library_leaves_and_returns_what_it_does_in_plain_python(case, plain, logical):
    if not is_installed(case):
        pytest.skip("the library is not installed")
    found = read_case(logical, case.__name__)
    assert found[1], "the case prints what it returns"
    assert found == read_case(plain, case.__name__)


UNKNOWN = """
import ctypes
open("first.txt", "w").close()
import io
library = ctypes.CDLL(None)
library.fopen.restype, library.fclose.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
library.fopen(b"unknown.bin", b"w")
library.fclose(library.fopen(b"closed.bin", b"w"))
io.FileIO("both.txt", "a").write(b"1")
import time
time.sleep(1.1)
open("a.txt", "w").close()
"""


@pytest.mark.slow
def test_a_notice_names_a_file_that_an_unknown_library_has_open_on_every_rank(tmp_path):
    done = run_script(UNKNOWN, "--logical", "-n", "2", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"every rank writes {tmp_path / 'unknown.bin'}, by a library that Rankless does not know" in done.stderr
    assert "a.txt" not in done.stderr
    assert "closed.bin" not in done.stderr
    assert (tmp_path / "closed.bin").exists()
    assert (tmp_path / "both.txt").read_text() == "11"
