"""The data-parallel script of docs/guides/collectives.md: alone, under `rankless run` and under torchrun."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.warm_runs import rankless

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "collectives.md"
LAUNCHERS = {
    "alone": [],
    "rankless run": ["run", "-n", "2", "--devices", "cpu"],
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"],
    "three": ["run", "-n", "3", "--devices", "cpu"],
}


def script() -> str:
    (found,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return found


def ran(text: str, launcher: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(text)
    if "run" in LAUNCHERS[launcher]:
        return rankless(*LAUNCHERS[launcher], "train.py", folder=folder, OMP_NUM_THREADS="1")
    command = [sys.executable, *LAUNCHERS[launcher], "train.py"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "launcher",
    [pytest.param(each, marks=[pytest.mark.exhaustive] if each == "torchrun" else []) for each in LAUNCHERS],
)
def test_the_pages_script_trains_and_counts_every_test_sample_once(tmp_path: Path, launcher: str):
    done = ran(script(), launcher, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [tuple(map(int, pair)) for pair in re.findall(r"epoch \d: (\d+) of (\d+) right", done.stdout)]
    assert [count for _, count in found] == [297] * 3
    assert found[-1][0] > 240
    assert "set_epoch" not in done.stderr
    assert torch.load(tmp_path / "digits.pt").keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}


UNEVEN = script().replace(", seed=1, drop_last=True)", ", seed=1)").replace("[1500, 297]", "[1501, 296]")
JOINED = (
    UNEVEN.replace(
        "    for rows, labels in train_loader:\n",
        "    with Join([parallel]):\n     for rows, labels in train_loader:\n",
    )
    .replace("check_shards(train_loader)", "check_shards(train_loader, even=False)")
    .replace("    rankless.check_synchronized", "    WHAT_JOIN_LEAVES\n    rankless.check_synchronized")
)


@pytest.mark.exhaustive
def test_uneven_batches_raise_before_they_hang_and_torchs_join_allows_them(tmp_path: Path):
    done = ran(UNEVEN, "rankless run", tmp_path)
    assert done.returncode == 1
    assert "rank 0: 31; rank 1: 30" in done.stderr
    with_join = "from torch.distributed.algorithms import Join\n" + JOINED
    assert with_join.count("Join(") == with_join.count("even=False)\n") - 1 == with_join.count("WHAT_JOIN_LEAVES") == 1
    done = ran(with_join.replace("WHAT_JOIN_LEAVES", "pass"), "rankless run", tmp_path)
    assert "optimizer['state'][0]['momentum_buffer'] (rank 1)" in done.stderr
    done = ran(
        with_join.replace("WHAT_JOIN_LEAVES", "collectives.broadcast_optimizer_state(optimizer)"),
        "rankless run",
        tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"of 296 right", done.stdout)) == 3
