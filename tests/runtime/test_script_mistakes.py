"""Rankless warns once about common mistakes in scripts of torch.distributed, and never about correct scripts."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.warm_runs import run_script
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from rankless.runtime.hooks.script_mistakes import SamplerEpochMonitor, warn_on_missing_set_epoch

FORGOTTEN = """
import torch.distributed as dist, torch
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm
dist.init_process_group("gloo")
loader = DataLoader(range(10), sampler=DistributedSampler(range(10)), batch_size=2)
for epoch in range(4):
    for rows in tqdm(loader):
        pass
dist.barrier()
dist.destroy_process_group()
"""


SPAWNING = """
import torch.multiprocessing as mp

def work(rank):
    print("work", flush=True)

if __name__ == "__main__":
    mp.spawn(work, nprocs=1)
"""


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The warnings about this process's samplers."""
    monkeypatch.setattr(DistributedSampler, "__iter__", DistributedSampler.__iter__)
    monkeypatch.setattr(DistributedSampler, "set_epoch", DistributedSampler.set_epoch)
    texts: list[str] = []
    warn_on_missing_set_epoch(texts.append)
    return texts


def sampler(**options: bool) -> DistributedSampler[int]:
    return DistributedSampler(range(10), num_replicas=2, rank=0, **options)


@pytest.mark.ci_sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--no-warm",)], ids=["warm", "plain"])
def test_a_missing_set_epoch_is_warned_about_once_with_its_line(options: tuple[str, ...], tmp_path: Path):
    job = run_script(FORGOTTEN, "-n", "2", *options, folder=tmp_path)
    assert job.returncode == 0, job.stderr
    warned = [line for line in job.stderr.splitlines() if "set_epoch" in line]
    assert len(warned) == 1, job.stderr
    assert "script.py:8: every epoch has the same order, because sampler.set_epoch(epoch) is missing" in warned[0]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_script_that_spawns_under_several_workers_is_warned_about_with_its_line(tmp_path: Path):
    job = run_script(SPAWNING, "-n", "2", folder=tmp_path)
    assert (job.returncode, job.stdout.count("work")) == (0, 1), job.stderr  # rank 0's is shown
    warning = "the script starts processes itself, and each of the 2 workers does so; start such a script with `python`"
    assert job.stderr.count(f"script.py:8: {warning}") == 1


def test_the_second_pass_warns_and_no_later_one_does(warnings: list[str]):
    for loader in (DataLoader(range(10), sampler=sampler(), batch_size=2, drop_last=True), sampler()):
        assert len(list(loader)) > 0
    assert warnings == []
    again = sampler()
    for number in range(3):
        assert len(list(again)) == 5
        assert len(warnings) == min(number, 1)


def test_nothing_warns_if_set_epoch_is_called_or_order_does_not_matter(warnings: list[str]):
    with_epoch, fixed, evaluated, first_rows, assigned = (
        sampler(),
        sampler(shuffle=False),
        sampler(),
        sampler(),
        sampler(),
    )
    for epoch in range(3):
        with_epoch.set_epoch(epoch)
        assigned.epoch = epoch
        for samples in (with_epoch, with_epoch, fixed, assigned):  # training on them, then measuring on the same
            list(samples)
        next(iter(first_rows))
        with torch.no_grad():
            list(evaluated)
    assert warnings == []


def test_an_observed_sampler_returns_the_same_iterator_also_in_an_unhashable_subclass():
    @dataclass(init=False)
    class Unhashable(DistributedSampler[int]):
        pass

    texts: list[str] = []
    plain = list(sampler())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DistributedSampler, "__iter__", DistributedSampler.__iter__)
        patch.setattr(DistributedSampler, "set_epoch", DistributedSampler.set_epoch)
        warn_on_missing_set_epoch(texts.append)
        observed, odd = sampler(), Unhashable(range(10), num_replicas=2, rank=0)
        assert isinstance(iter(observed), type(iter([])))
        assert list(observed) == plain == list(odd) == list(odd)
        odd.set_epoch(4)
        assert (odd.epoch, texts) == (4, [])


def test_a_deleted_sampler_is_forgotten():
    monitor = SamplerEpochMonitor(lambda _text: None)
    monitor.on_pass_start(sampler(), iter([1]))
    assert len(monitor._last) == 0
