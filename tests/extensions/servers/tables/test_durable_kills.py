"""Processes that change tables are killed at any moment: the tables are those of the last commit, in every bit."""

import os
import signal
from collections import Counter

import numpy as np
import pytest
from durable_changes import UndisturbedTables, difference
from durable_process import CERTAIN_FAULTS, FAULTS, ProcessForker

from rankless.extensions.servers.service.wire.setting_formats import decode_table_settings
from rankless.extensions.servers.tables.durable_tables import DurableTables


@pytest.fixture
def descriptor():
    descriptor = os.memfd_create("tables")
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def forker(descriptor):
    forker = ProcessForker(descriptor)
    yield forker
    forker.close()


def compare(descriptor: int, expected: UndisturbedTables, last: int) -> int:
    """Compare the tables that a process has left with undisturbed ones. Return the last committed transaction."""
    tables = DurableTables(descriptor, decode_table_settings)
    assert expected.transaction <= tables.committed <= last
    assert difference(tables.tables, expected.after(tables.committed, len(tables.tables))) == ""
    committed = tables.committed
    tables.close()
    return committed


def kill_often(descriptor: int, forker: ProcessForker, kills: int, seed: int) -> Counter:
    """Kill processes at random moments, each of which goes on where the one before was killed. Count the moments."""
    generator = np.random.default_rng(seed)
    expected, moments, done = UndisturbedTables(seed), Counter(), 0
    while moments["killed"] < kills:
        ended = forker.run(seed, done + 1000, seconds=float(generator.uniform(0.005, 0.12)))
        assert ended.signal == signal.SIGKILL
        done = compare(descriptor, expected, done + 1000)
        moments["killed"] += 1
        moments["within a transaction"] += ended.logged > 0
        moments["after changes"] += ended.changed > 0
    moments["transactions"] = done
    return moments


@pytest.mark.exhaustive
@pytest.mark.slow
def test_tables_survive_kills_at_random_moments(descriptor, forker):
    moments = kill_often(descriptor, forker, 8, seed=1)
    assert moments["transactions"] > 0


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(2, 6))
def test_tables_survive_many_kills_at_random_moments(descriptor, forker, seed):
    moments = kill_often(descriptor, forker, 50, seed)
    assert moments["after changes"] > 10


@pytest.mark.slow
@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("seed", range(24))
def test_tables_survive_a_kill_at_every_kind_of_moment(descriptor, forker, seed):
    """Each process goes on with the tables of the last one. Not every table comes to every moment in its transactions.

    Tables are opened by the first process of all, so it is the one that is killed while it opens one.
    """
    expected, hits, done = UndisturbedTables(seed), Counter(), 0
    for number, fault in enumerate(("when a table is opened", *FAULTS)):
        if "recovery" in fault:  # of a transaction that is not finished
            forker.run(seed, done + 4, fault=("before the commit", 3))
        last = done + 12
        ended = forker.run(seed, last, fault=(fault, seed + number if "recovery" not in fault else seed))
        hits[fault] += ended.signal in (signal.SIGKILL, signal.SIGSEGV)
        hits["after changes"] += ended.changed > 0
        done = compare(descriptor, expected, last)
    assert hits["after changes"] >= 4
    assert all(hits[fault] for fault in CERTAIN_FAULTS)


def test_without_undoing_tables_would_be_wrong(descriptor, forker):
    forker.run(3, 9)
    assert forker.run(3, 20, fault=("when used steps are written", 1)).changed > 0
    os.pwrite(descriptor, bytes(8), 64 << 20)
    tables = DurableTables(descriptor, decode_table_settings)
    assert difference(tables.tables, UndisturbedTables(3).after(tables.committed, len(tables.tables))) != ""
    tables.close()
