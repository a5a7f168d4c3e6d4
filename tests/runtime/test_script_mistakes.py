"""What scripts of torch.distributed forget is noticed and said once; what is right is left alone."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.warm_runs import run_script
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from rankless.runtime.hooks.sampler_epochs import SamplerEpochMonitor, watch_samplers

FORGOTTEN = """
import torch.distributed as dist, torch
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm
dist.init_process_group("gloo")
loader = DataLoader(range(10), sampler=DistributedSampler(range(10)), batch_size=2)
for epoch in range(4):
    for rows in tqdm(loader):
        pass
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
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is said of this process's samplers."""
    monkeypatch.setattr(DistributedSampler, "__iter__", DistributedSampler.__iter__)
    monkeypatch.setattr(DistributedSampler, "set_epoch", DistributedSampler.set_epoch)
    texts: list[str] = []
    watch_samplers(texts.append)
    return texts


def sampler(**options: bool) -> DistributedSampler[int]:
    return DistributedSampler(range(10), num_replicas=2, rank=0, **options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--no-warm",)], ids=["warm", "plain"])
def test_a_forgotten_set_epoch_is_said_once_with_the_line(options: tuple[str, ...], tmp_path: Path):
    job = run_script(FORGOTTEN, "-n", "2", *options, folder=tmp_path)
    assert job.returncode == 0, job.stderr
    said = [line for line in job.stderr.splitlines() if "set_epoch" in line]
    assert len(said) == 1, job.stderr
    assert "script.py:8: every epoch has the same order, because sampler.set_epoch(epoch) is missing" in said[0]


@pytest.mark.slow
def test_a_script_that_spawns_under_several_workers_is_named_with_its_line(tmp_path: Path):
    job = run_script(SPAWNING, "-n", "2", folder=tmp_path)
    assert (job.returncode, job.stdout.count("work")) == (0, 1), job.stderr  # rank 0's is shown
    said = "the script starts processes itself, and each of the 2 workers does so; start such a script with `python`"
    assert job.stderr.count(f"script.py:8: {said}") == 1


def test_it_is_said_at_the_second_pass_and_never_again(said: list[str]):
    for loader in (DataLoader(range(10), sampler=sampler(), batch_size=2, drop_last=True), sampler()):
        assert len(list(loader)) > 0
    assert said == []
    again = sampler()
    for number in range(3):
        assert len(list(again)) == 5
        assert len(said) == min(number, 1)


def test_nothing_is_said_where_set_epoch_is_called_or_order_does_not_matter(said: list[str]):
    told, fixed, evaluated, first_rows, assigned = sampler(), sampler(shuffle=False), sampler(), sampler(), sampler()
    for epoch in range(3):
        told.set_epoch(epoch)
        assigned.epoch = epoch
        for samples in (told, told, fixed, assigned):  # training on them, then measuring on the same
            list(samples)
        next(iter(first_rows))
        with torch.no_grad():
            list(evaluated)
    assert said == []


def test_a_watched_sampler_gives_the_same_iterator_and_a_subclass_may_be_anything():
    @dataclass(init=False)
    class Unhashable(DistributedSampler[int]):
        pass

    texts: list[str] = []
    plain = list(sampler())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DistributedSampler, "__iter__", DistributedSampler.__iter__)
        patch.setattr(DistributedSampler, "set_epoch", DistributedSampler.set_epoch)
        watch_samplers(texts.append)
        watched, odd = sampler(), Unhashable(range(10), num_replicas=2, rank=0)
        assert isinstance(iter(watched), type(iter([])))
        assert list(watched) == plain == list(odd) == list(odd)
        odd.set_epoch(4)
        assert (odd.epoch, texts) == (4, [])


def test_a_sampler_that_is_gone_is_forgotten():
    watch = SamplerEpochMonitor(lambda _text: None)
    watch.begins(sampler(), iter([1]))
    assert len(watch._last) == 0
