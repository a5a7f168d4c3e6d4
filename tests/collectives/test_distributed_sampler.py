"""The distributed sampler: each sample once over all ranks, torch's own indices on request, and its warnings."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes import on_mesh
from support.warm_runs import run_script
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data import DistributedSampler as TorchSampler

from rankless.collectives import DistributedSampler
from rankless.errors import ConfigError, RanklessError
from rankless.parallel.mesh import Mesh

counts = st.integers(0, 40)
sizes = st.integers(1, 7)


def samplers(count: int, size: int, **options: Any) -> list[DistributedSampler]:
    return [DistributedSampler(range(count), size, rank, **options) for rank in range(size)]


@settings(deadline=None)
@given(count=counts, size=sizes, shuffle=st.booleans(), seed=st.integers(0, 99), epoch=st.integers(0, 9))
def test_all_ranks_together_have_each_sample_once(count: int, size: int, shuffle: bool, seed: int, epoch: int):
    found = []
    for sampler in samplers(count, size, shuffle=shuffle, seed=seed):
        sampler.set_epoch(epoch)
        found.append(list(sampler))
        assert len(sampler) == len(found[-1])
    assert sorted(index for indices in found for index in indices) == list(range(count))
    lengths = [len(indices) for indices in found]
    assert max(lengths) - min(lengths) <= 1


@settings(deadline=None)
@given(
    count=counts,
    size=sizes,
    shuffle=st.booleans(),
    seed=st.integers(0, 99),
    epoch=st.integers(0, 9),
    drop_last=st.booleans(),
)
def test_with_padding_or_drop_last_the_indices_equal_torchs(
    count: int, size: int, shuffle: bool, seed: int, epoch: int, drop_last: bool
):
    for rank in range(size):
        theirs = TorchSampler(range(count), size, rank, shuffle, seed, drop_last)
        ways = [{"padding": True}, {"padding": False}] if drop_last else [{"padding": True}]
        for way in ways:
            ours = DistributedSampler(range(count), size, rank, shuffle, seed, drop_last, **way)
            ours.set_epoch(epoch)
            theirs.set_epoch(epoch)
            assert list(ours) == list(theirs)
            assert len(ours) == len(theirs)
            assert (ours.num_samples, ours.total_size) == (theirs.num_samples, theirs.total_size)


def test_without_padding_the_order_is_torchs_without_repeated_samples():
    ours, theirs = samplers(10, 4)[3], TorchSampler(range(10), 4, 3)
    ours.set_epoch(2)
    theirs.set_epoch(2)
    assert list(ours) == list(theirs)[:2]
    assert len(theirs) == 3


def rank_and_indices(_mesh: Mesh) -> tuple[int, int, list[int]]:
    sampler = DistributedSampler(range(7), shuffle=False)
    return sampler.rank, sampler.num_replicas, list(sampler)


def test_the_sampler_takes_rank_and_world_size_from_the_joined_job():
    assert on_mesh(3, rank_and_indices) == [(0, 3, [0, 3, 6]), (1, 3, [1, 4]), (2, 3, [2, 5])]
    alone = DistributedSampler(range(3), shuffle=False)
    assert (alone.rank, alone.num_replicas, list(alone)) == (0, 1, [0, 1, 2])


def test_a_launched_process_must_join_before_it_makes_a_sampler(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"rankless\.init\(\)"):
        DistributedSampler(range(3))
    assert list(DistributedSampler(range(3), 2, 1, shuffle=False)) == [1]


def one_pass(sampler: DistributedSampler) -> None:
    dataset = TensorDataset(torch.arange(len(sampler.dataset)))
    for _ in DataLoader(dataset, batch_size=2, sampler=sampler):
        pass


def test_a_second_pass_without_set_epoch_warns_once_with_its_line(capfd: pytest.CaptureFixture[str]):
    sampler = samplers(8, 2)[0]
    for _ in range(3):
        one_pass(sampler)
    error_output = capfd.readouterr().err
    assert error_output.count("sampler.set_epoch(epoch)") == 1
    assert "test_distributed_sampler.py:" in error_output


@pytest.mark.parametrize("case", ["set", "another rank", "in order", "left early", "wanted"])
def test_correct_uses_of_set_epoch_do_not_warn(case: str, capfd: pytest.CaptureFixture[str]):
    sampler = samplers(8, 2, shuffle=case != "in order")[int(case == "another rank")]
    sampler.warned_same_epoch = case == "wanted"
    for epoch in range(3):
        if case == "set":
            sampler.set_epoch(epoch)
        if case == "left early":
            next(iter(sampler))
        else:
            one_pass(sampler)
    assert capfd.readouterr().err == ""


class Stream:
    def __iter__(self):
        yield from range(3)


@pytest.mark.parametrize(
    ("arguments", "expected_text"),
    [
        ({"dataset": Stream()}, "Stream without __len__"),
        ({"rank": 2, "num_replicas": 2}, "from 0 to 1"),
        ({"rank": -1, "num_replicas": 2}, "rank=-1"),
        ({"num_replicas": 0}, "num_replicas=0"),
        ({"num_replicas": 1.5}, "num_replicas=1.5"),
        ({"rank": True, "num_replicas": 2}, "rank=True"),
        ({"seed": "0"}, "seed='0'"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: dict[str, Any], expected_text: str):
    with pytest.raises(ConfigError, match=expected_text):
        DistributedSampler(**{"dataset": range(5), **arguments})


@pytest.mark.parametrize("epoch", [-1, 0.5, None])
def test_an_epoch_that_is_not_a_number_from_0_raises(epoch: Any):
    with pytest.raises(RanklessError, match="count epochs from 0"):
        DistributedSampler(range(5)).set_epoch(epoch)


FORGETFUL = """
import torch, rankless
from rankless import collectives
from torch.utils.data import DataLoader, TensorDataset

rankless.init()
data = TensorDataset(torch.arange(10))
sampler = collectives.DistributedSampler(data)
for epoch in range(3):
    seen = [row for (batch,) in DataLoader(data, batch_size=2, sampler=sampler) for row in batch.tolist()]
print(sorted(seen))
"""


@pytest.mark.slow
def test_in_a_job_rank_0_warns_of_a_missing_set_epoch(tmp_path: Path):
    done = run_script(FORGETFUL, "-n2", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("script.py:10: this pass has the order of the pass before it") == 1
