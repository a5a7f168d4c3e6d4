"""A model in DistributedDataParallel that outlives its process group ends without a hang."""

from pathlib import Path

import pytest
from support.warm_runs import run_script

pytestmark = pytest.mark.slow

SHORT_LIVED = """
import faulthandler
import os
import sys
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

def train_once():
    group = dist.new_group(backend="gloo")
    model = DistributedDataParallel(nn.Linear(100, 100), process_group=group)
    for _ in range(3):
        model(torch.randn(8, 100)).sum().backward()
    dist.destroy_process_group(group)
    return model

def compute():  # another thread with work in Python: Gloo's threads wait for Python's global lock longer
    while not ended:
        sum(range(1000))

dist.init_process_group("gloo")
faulthandler.dump_traceback_later(60, exit=True)
sys.setswitchinterval(1e-6)
ended = False
thread = threading.Thread(target=compute)
thread.start()
for _ in range(40):
    train_once()
last = train_once()
ended = True
thread.join()
print(len(os.listdir("/proc/self/task")), "threads")
dist.destroy_process_group()
"""


@pytest.mark.exhaustive
def test_a_model_that_outlives_its_destroyed_group_ends(tmp_path: Path) -> None:
    done = run_script(SHORT_LIVED, "-n", "2", "--show", "all", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    threads = [int(line.split()[-2]) for line in done.stdout.splitlines() if line.endswith("threads")]
    assert len(threads) == 2
    assert max(threads) < 30, "each destroyed group keeps three threads until it is released"


LEAVES_EARLY = """
import time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
if dist.get_rank() == 1:
    dist.destroy_process_group({group})
    time.sleep(600)
while True:
    dist.all_reduce(torch.ones(4))
"""


@pytest.mark.parametrize("group", ["", "dist.group.WORLD"])
def test_the_connections_of_a_destroyed_group_close_at_once(group: str, tmp_path: Path) -> None:
    done = run_script(LEAVES_EARLY.format(group=group), "-n", "2", folder=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "rank 1 destroyed its process group while other ranks still needed it" in done.stderr


UNEVEN_BACKWARD = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(6, 3))
for _ in range(3 + 3 * dist.get_rank()):
    model(torch.randn(4, 6)).square().mean().backward()
dist.destroy_process_group()
"""


def test_a_rank_that_makes_fewer_backward_passes_is_blamed(tmp_path: Path) -> None:
    done = run_script(UNEVEN_BACKWARD, "-n", "2", folder=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "rank 0 destroyed its process group while other ranks still needed it" in done.stderr
