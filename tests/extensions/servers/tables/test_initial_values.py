"""Initial values depend on id and seed alone, and have the distribution that was asked for."""

import numpy as np
import pytest
import torch

from rankless.compiler.ir.philox import philox as philox_in_torch
from rankless.extensions.servers.tables.rows import philox
from rankless.extensions.servers.tables.settings import Constant, Normal, TableSettings, Uniform
from rankless.extensions.servers.tables.table import Table


def words(*values: int) -> list[np.uint64]:
    return [np.uint64(value) for value in values]


def test_the_generator_gives_the_published_words():
    # Known answers of Random123, for philox4x32 with 10 rounds.
    assert philox(*words(0, 0, 0, 0), np.uint64(0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    expected = (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    assert philox(*words(ones, ones, ones, ones), np.uint64(2**64 - 1)) == expected


def test_the_generator_is_that_of_the_compiler():
    generator = np.random.default_rng(0)
    for counter in generator.integers(0, 2**32, (20, 4)).tolist():
        key = generator.integers(0, 2**32, 2).tolist()
        expected = philox_in_torch([torch.tensor([word]) for word in counter], tuple(key))
        assert philox(*words(*counter), np.uint64(key[0] | key[1] << 32)) == tuple(int(word) for word in expected)


@pytest.mark.parametrize("initial", [Normal(), Uniform(low=-1, high=1)])
def test_values_do_not_depend_on_other_ids_or_on_the_order(initial):
    ids = np.array([5, -9, 2**62, 0, -(2**63)])
    together = Table(TableSettings(dim=7, seed=3, initial=initial)).pull(ids)
    table = Table(TableSettings(dim=7, seed=3, initial=initial))
    alone = np.concatenate([table.pull(ids[place : place + 1]) for place in (4, 2, 0, 1, 3)])
    np.testing.assert_array_equal(together[[4, 2, 0, 1, 3]], alone)
    assert len(np.unique(together)) == together.size
    other_seed = Table(TableSettings(dim=7, seed=4, initial=initial)).pull(ids)
    assert not np.isin(other_seed, together).any()


def test_a_longer_row_begins_like_a_shorter_one():
    ids = np.arange(10)
    for dim in range(1, 9):
        shorter = Table(TableSettings(dim=dim, seed=1)).pull(ids)
        np.testing.assert_array_equal(shorter, Table(TableSettings(dim=9, seed=1)).pull(ids)[:, :dim])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_values_are_distributed_as_asked(dtype):
    ids = np.arange(50_000)
    normal = Table(TableSettings(dim=4, dtype=dtype, initial=Normal(mean=2, std=0.5))).pull(ids)
    assert normal.dtype == dtype
    assert abs(normal.mean() - 2) < 0.01
    assert abs(normal.std() - 0.5) < 0.01
    assert abs((abs(normal - 2) < 0.5).mean() - 0.6827) < 0.005
    uniform = Table(TableSettings(dim=4, dtype=dtype, initial=Uniform(low=-3, high=1))).pull(ids)
    assert uniform.min() >= -3
    assert uniform.max() <= 1
    counts, _ = np.histogram(uniform, bins=8, range=(-3, 1))
    assert abs(counts / uniform.size - 1 / 8).max() < 0.005
    assert (Table(TableSettings(dim=4, dtype=dtype, initial=Constant(value=0.25))).pull(ids) == 0.25).all()
    correlation = np.corrcoef(normal, rowvar=False) - np.eye(4)
    assert abs(correlation).max() < 0.02


def test_float32_values_are_the_rounded_float64_ones():
    ids = np.arange(-500, 500)
    for initial in (Normal(), Uniform(low=0, high=5)):
        single = Table(TableSettings(dim=3, initial=initial)).pull(ids)
        double = Table(TableSettings(dim=3, dtype="float64", initial=initial)).pull(ids)
        np.testing.assert_array_equal(single, double.astype(np.float32))
