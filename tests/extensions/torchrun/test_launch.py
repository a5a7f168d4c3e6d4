"""Scripts written for `python -m torch.distributed.launch`, run by `rankless launch`."""

import subprocess
from pathlib import Path

import pytest
from support.warm_runs import rankless

from rankless.config.run_config import Program
from rankless.extensions.torchrun.launch_command import find_rank_option

DASHED, UNDERSCORED = "--local-rank", "--local_rank"

DECLARATIONS = {
    "argparse, underscored": ('import argparse\np.add_argument("--local_rank", type=int)', UNDERSCORED),
    "argparse, dashed": ('import argparse\np.add_argument("--local-rank", type=int)', DASHED),
    "argparse, both": ('import argparse\np.add_argument("--local-rank", "--local_rank", type=int)', DASHED),
    "single quotes, in a call over lines": (
        "import argparse\np.add_argument(\n    '--local_rank',\n    )",
        UNDERSCORED,
    ),
    "optparse": ("import optparse\np.add_option('-r', '--local_rank', type='int')", UNDERSCORED),
    "click": ("import click\n@click.option('--local_rank')\ndef main(local_rank): ...", UNDERSCORED),
    "typer by name": ("import typer\ndef main(local_rank: int = 0): ...\ntyper.run(main)", DASHED),
    "typer by option": ("import typer\ndef main(local_rank=typer.Option(0, '--local_rank')): ...", UNDERSCORED),
    "fire": ("import fire\ndef main(local_rank=0): ...\nfire.Fire(main)", DASHED),
    "absl": ("from absl import flags\nflags.DEFINE_integer('local_rank', 0, 'the rank')", UNDERSCORED),
    "getopt": ("import getopt, sys\ngetopt.getopt(sys.argv[1:], '', ['local_rank='])", UNDERSCORED),
    "docopt": ('"""Usage: x [--local_rank=<n>]"""\nimport docopt\ndocopt.docopt(__doc__)', UNDERSCORED),
    "fields": ("import tyro\nclass Options:\n    local_rank: int = 0\ntyro.cli(Options)", UNDERSCORED),
    "arguments taken apart by hand": ("import sys\nif sys.argv[1].startswith('--local_rank='): ...", UNDERSCORED),
    "only in a docstring": ('"""run with --local_rank"""\nimport argparse\np.add_argument("--local-rank")', DASHED),
    "only in a help text": ('import argparse\np.add_argument("--local-rank", help="--local_rank of old")', DASHED),
    "in a command for others": ("import subprocess\nsubprocess.run(f'--local_rank={1}')\nimport argparse", None),
    "in a comment": ("import argparse  # --local_rank", None),
    "another option": ("import argparse\np.add_argument('--local_rank_size')", None),
    "a parser without it": ("import argparse\np.parse_args()", None),
    "no arguments at all": ("print('hello')", None),
    "out of sight": ("import argparse\nargs = theirs()\nprint(args.local_rank)", DASHED),
    "set from the environment": ("import argparse\nargs.local_rank = 3\nprint(args.local_rank)", None),
    "no Python": ("this is no Python", DASHED),
}


@pytest.mark.parametrize("kind", DECLARATIONS)
def test_the_option_is_the_one_that_the_script_declares(kind: str, tmp_path: Path):
    text, option = DECLARATIONS[kind]
    (tmp_path / "main.py").write_text(text)
    assert find_rank_option(Program(kind="script", target=str(tmp_path / "main.py"))).option == option


def test_an_option_declared_in_a_module_beside_the_script_counts(tmp_path: Path):
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "__init__.py").write_text("from .options import parse\n")
    (tmp_path / "tools" / "options.py").write_text(DECLARATIONS["argparse, underscored"][0])
    (tmp_path / "main.py").write_text("import torch\nfrom tools import parse\nprint(parse())\n")
    (tmp_path / "loop.py").write_text("import loop, main")
    for name in ("main.py", "loop.py"):
        assert find_rank_option(Program(kind="script", target=str(tmp_path / name))).option == UNDERSCORED


def test_the_source_of_a_module_is_found_without_running_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('it ran')")
    (package / "part.py").write_text(DECLARATIONS["argparse, underscored"][0])
    (package / "__main__.py").write_text(DECLARATIONS["argparse, dashed"][0])
    monkeypatch.chdir(tmp_path)
    assert find_rank_option(Program(kind="module", target="pack.part")).option == UNDERSCORED
    assert find_rank_option(Program(kind="module", target="pack")).option == DASHED
    unseen = find_rank_option(Program(kind="module", target="pack.absent"))
    assert (unseen.option, bool(unseen.note)) == (DASHED, True)


TUTORIAL = """
import argparse
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1, help="set by launch as --local-rank=N")
parser.add_argument("--epochs", type=int, default=1)
args = parser.parse_args()
dist.init_process_group("gloo", init_method="env://")
torch.manual_seed(0)
data = TensorDataset(torch.arange(16.0).reshape(8, 2), torch.ones(8, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=2, sampler=sampler)
model = torch.nn.Linear(2, 1)
if dist.get_rank() == 0:
    model.load_state_dict(torch.nn.Linear(2, 1).state_dict())
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
for epoch in range(args.epochs):
    loader.sampler.set_epoch(epoch)
    for rows, wanted in loader:
        optimizer.zero_grad()
        (model(rows) - wanted).square().mean().backward()
        optimizer.step()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "%d.ckpt" % epoch)
total = sum(parameter.sum().item() for parameter in model.parameters())
print(args.local_rank, dist.get_rank(), dist.get_world_size(), total, flush=True)
dist.destroy_process_group()
"""

LINE = ["--nnodes=1", "--node_rank=0", "--nproc_per_node", "2", "--master_addr", "127.0.0.1", "--master_port", "0"]


def launch(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return rankless("launch", *words, folder=folder)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_tutorial_script_trains_with_the_tutorials_command(tmp_path: Path):
    (tmp_path / "main.py").write_text(TUTORIAL)
    job = launch(*LINE, "main.py", "--epochs", "2", folder=tmp_path)
    assert job.returncode == 0, job.stderr
    lines = sorted(line.split() for line in job.stdout.splitlines())
    assert [each[:3] for each in lines] == [["0", "0", "2"], ["1", "1", "2"]]
    assert lines[0][3] == lines[1][3]
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["0.ckpt", "1.ckpt"]
    assert "rankless launch:" not in job.stderr
    own = launch(*LINE, "--use-env", "main.py", folder=tmp_path)
    assert {line.split()[0] for line in own.stdout.splitlines()} == {"-1"}


@pytest.mark.slow
def test_a_script_that_declares_no_option_gets_none_and_a_notice_appears(tmp_path: Path):
    script = "import argparse, os\nprint(argparse.ArgumentParser().parse_args(), os.environ['LOCAL_RANK'])\n"
    (tmp_path / "main.py").write_text(script)
    job = launch(*LINE, "main.py", folder=tmp_path)
    assert sorted(job.stdout.splitlines()) == ["Namespace() 0", "Namespace() 1"]
    assert "rankless launch: main.py declares no --local-rank, so none is passed; LOCAL_RANK is set" in job.stderr


def test_a_command_requires_use_env(tmp_path: Path):
    job = launch("--no-python", "echo", folder=tmp_path)
    assert job.returncode == 2
    assert "add --use-env" in job.stderr


def test_host_0_of_several_is_the_master(tmp_path: Path):
    (tmp_path / "main.py").write_text("print('ran')")
    words = ["--nnodes=2", "--node_rank=0", "--nproc_per_node", "8", "--master_addr", "10.0.0.1"]
    job = launch(*words, "--master_port", "2950", "main.py", folder=tmp_path)
    assert (job.returncode, job.stdout) == (2, "")
    assert "host 0, the master, on the host that is called 10.0.0.1" in job.stderr
