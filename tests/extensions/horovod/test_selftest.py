"""The self-test passes on a sound installation, and finds faults."""

import re
import sys
from pathlib import Path

import pytest
from support.jobs import rankless

pytestmark = pytest.mark.slow

NAME = "rankless.extensions.horovod.selftest"
LAUNCHERS = {"horovodrun": ("horovodrun", "-np", sys.executable), "run": ("run", "-n")}
BREAKING = """
import sys
import horovod.torch as hvd
from torch.utils.data.distributed import DistributedSampler
from rankless.extensions.horovod import selftest
{}
sys.exit(selftest.main([]))
"""
# Each breaks one thing; with the check that must see it, and what it must say.
BROKEN = {
    "sums of every dtype": (
        "real = hvd.allreduce\nhvd.allreduce = lambda *a, **k: real(*a, **k) + (hvd.rank() == 1)",
        "rank 1: the sum of 3 torch.uint8 is [4, 4, 4], expected 3",
    ),
    "broadcast makes all equal": (
        "hvd.broadcast_optimizer_state = lambda *a, **k: None",
        "optimizer states differ after broadcast_optimizer_state",
    ),
    "every rank sees other data": (
        "DistributedSampler.set_epoch = lambda self, epoch: None",
        "both epochs have one order",
    ),
    "training stays together": (
        "hvd.DistributedOptimizer = lambda optimizer, **k: optimizer",
        "parameters differ between ranks after a step of epoch 0",
    ),
}


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("count", [2, *(pytest.param(count, marks=pytest.mark.exhaustive) for count in (1, 3))])
@pytest.mark.parametrize("launcher", ["horovodrun", pytest.param("run", marks=pytest.mark.exhaustive)])
def test_it_passes_on_any_number_of_processes_under_both_launchers(launcher: str, count: int, tmp_path: Path):
    command, option, *python = LAUNCHERS[launcher]
    done = rankless(command, option, str(count), *python, "-m", NAME, "-v", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"PASS  \w", done.stdout)) == 7
    assert f"7 of 7 checks passed on {count} process" in done.stdout


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "check",
    [pytest.param(each, marks=[pytest.mark.exhaustive] if index > 1 else []) for index, each in enumerate(BROKEN)],
)
def test_it_finds_a_fault_names_the_rank_and_fails(check: str, tmp_path: Path):
    line, expected = BROKEN[check]
    (tmp_path / "broken.py").write_text(BREAKING.format(line))
    done = rankless("run", "-n", "2", "broken.py", folder=tmp_path)
    assert done.returncode == 1
    assert f"FAIL  {check}\n" in done.stdout, done.stdout + done.stderr
    assert expected in done.stdout
    assert "PASS" not in done.stdout
