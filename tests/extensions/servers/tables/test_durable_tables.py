"""Tables in memory that outlives the process: transactions, damage, and memory that is given back."""

import contextlib
import gc
import mmap
import os
import subprocess
import sys

import numpy as np
import pytest
from durable_changes import SETTINGS, Opener, UndisturbedTables, change_tables, difference, open_tables

from rankless.errors import TableError
from rankless.extensions.servers.service.wire.setting_formats import decode_table_settings, encode_table_settings
from rankless.extensions.servers.tables.durable_memory import KEPT_LOG_BYTES
from rankless.extensions.servers.tables.durable_tables import DurableTables
from rankless.extensions.servers.tables.optimizers import AdagradSettings, SgdSettings
from rankless.extensions.servers.tables.settings import TableSettings
from rankless.extensions.servers.tables.table import Table

HEADER, STATES, TEXTS, LOG = 0, 4096, 8 << 20, 64 << 20
"""Where the parts of the memory begin."""
ADAGRAD = AdagradSettings(lr=0.1)


@pytest.fixture
def descriptor():
    """A file of which a process can map several at once."""
    descriptor = os.memfd_create("tables")
    os.ftruncate(descriptor, 1 << 43)
    yield descriptor
    os.close(descriptor)
    gc.collect()  # errors hold mappings


@pytest.fixture
def small_descriptor():
    """A file whose last addresses are near."""
    descriptor = os.memfd_create("tables")
    os.ftruncate(descriptor, 1 << 40)
    yield descriptor
    os.close(descriptor)


def make(descriptor: int) -> DurableTables:
    return DurableTables(descriptor, decode_table_settings)


def fill(descriptor: int, last: int = 6) -> None:
    tables = make(descriptor)
    for transaction in range(1, last + 1):
        open_tables(tables, transaction)
        tables.begin()
        change_tables(tables.tables, 0, transaction)
        tables.commit(transaction)
    tables.close()


def used_bytes(descriptor: int) -> int:
    return os.fstat(descriptor).st_blocks * 512


def push_rows(table, count: int, start: int = 0) -> None:
    ids = np.arange(start, start + count)
    gradients = np.ones((count, table.settings.dim), table.settings.dtype)
    table.push(ids, np.ones(count, np.int64), gradients, ADAGRAD)


def test_tables_without_kills_are_those_of_plain_memory(descriptor):
    fill(descriptor, 25)
    tables = make(descriptor)
    assert tables.committed == 25
    assert difference(tables.tables, UndisturbedTables(0).after(25, len(SETTINGS))) == ""
    assert tables.settings == {name: encode_table_settings(settings) for name, settings in SETTINGS.items()}


def test_new_memory_has_no_tables(descriptor):
    tables = make(descriptor)
    assert (tables.committed, tables.tables) == (0, {})


def test_an_undone_transaction_leaves_nothing(descriptor):
    tables, expected = make(descriptor), Opener()
    for transaction in range(1, 20):
        open_tables(tables, transaction)
        tables.begin()
        change_tables(tables.tables, 5, 1000 + transaction)
        tables.undo()
        assert tables.committed == transaction - 1
        tables.begin()
        change_tables(tables.tables, 5, transaction)
        tables.commit(transaction)
        open_tables(expected, transaction)
        change_tables(expected.tables, 5, transaction)
    assert difference(tables.tables, expected.tables) == ""


def test_an_error_undoes_a_transaction(descriptor):
    tables = make(descriptor)
    table = tables.open("a", encode_table_settings(TableSettings(dim=2)))
    before = table.contents()
    with contextlib.suppress(KeyError), tables.transaction(1):
        push_rows(table, 5)
        raise KeyError
    assert (len(table.contents().ids), table.step, tables.committed) == (len(before.ids), 0, 0)


def test_many_steps_with_momentum_go_on_after_a_restart(descriptor):
    """The arrays of past steps grow while there are transactions."""
    settings, momentum = TableSettings(dim=1, max_rows=16), SgdSettings(lr=1e-3, momentum=0.999)
    tables, expected = make(descriptor), Table(settings)
    tables.open("a", encode_table_settings(settings))
    generator = np.random.default_rng(0)
    for step in range(1, 2200):
        ids = generator.choice(30, 3, replace=False)
        gradients = generator.standard_normal((3, 1)).astype(np.float32)
        with tables.transaction(step):
            tables.tables["a"].push(ids, np.ones(3, np.int64), gradients, momentum)
        expected.push(ids, np.ones(3, np.int64), gradients, momentum)
        if step % 500 == 24:
            tables.begin()
            tables.tables["a"].push(ids, np.ones(3, np.int64), gradients, momentum)  # which is never committed
            tables.close()
            tables = make(descriptor)
    assert difference(tables.tables, {"a": expected}) == ""


@pytest.mark.ci_sample(5)
@pytest.mark.parametrize(
    ("position", "what"),
    [
        (HEADER, "memory of tables"),
        (HEADER + 8, "memory of tables"),
        (HEADER + 16, "checksum"),
        (HEADER + 24, "header"),
        (HEADER + 32, "header"),
        (HEADER + 40, "header"),
        (HEADER + 48, "header"),
        (STATES, "state of table 0"),
        (STATES + 8, "state of table 0"),
        (STATES + 256 + 100, "state of table 1"),
        (TEXTS + 5, "tables with the checksum"),
        (LOG, "undo log"),
        (LOG + 7, "undo log"),
    ],
)
def test_damaged_memory_is_refused(descriptor, position, what):
    fill(descriptor)
    byte = os.pread(descriptor, 1, position)
    os.pwrite(descriptor, bytes([byte[0] ^ 0x85]), position)
    with pytest.raises(TableError, match=what) as error:
        make(descriptor)
    assert error.value.fix


def test_random_damage_of_what_describes_tables_never_passes(descriptor):
    fill(descriptor)
    generator = np.random.default_rng(0)
    for position in (*range(56), *generator.integers(STATES, STATES + 4 * 256, 60)):
        byte = os.pread(descriptor, 1, position)
        os.pwrite(descriptor, bytes([byte[0] ^ int(generator.integers(1, 256))]), position)
        is_unused = position >= STATES and 18 * 8 <= (position - STATES) % 256 < 31 * 8
        if is_unused:
            make(descriptor).close()
        else:
            with pytest.raises(TableError):
                make(descriptor)
        os.pwrite(descriptor, byte, position)
    make(descriptor).close()


def test_a_file_of_something_else_is_refused(descriptor):
    os.ftruncate(descriptor, 0)
    os.write(descriptor, b"something else" * 1000)
    with pytest.raises(TableError, match="at least"):
        make(descriptor)
    os.ftruncate(descriptor, 1 << 34)
    with pytest.raises(TableError, match="memory of tables"):
        make(descriptor)


def test_memory_of_another_process_is_refused(descriptor):
    """Its lock is that process's."""
    code = "import fcntl, sys; fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(descriptor)],
        pass_fds=[descriptor],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    other.stdout.readline()
    with pytest.raises(TableError, match="no other process"):
        make(descriptor)
    other.communicate()
    assert make(descriptor).committed == 0


def test_a_table_without_addresses_leaves_no_trace(small_descriptor):
    tables = make(small_descriptor)
    settings, count = encode_table_settings(TableSettings(dim=8)), 0
    with contextlib.suppress(TableError):
        for count in range(200):  # the number of the first that fails
            tables.open(f"table {count}", settings)
    assert 1 <= count == len(tables.tables)
    with pytest.raises(TableError, match="addresses"):
        tables.open("one more", settings)
    tables.close()
    assert len(make(small_descriptor).tables) == count


def test_memory_of_a_large_transaction_is_given_back(descriptor):
    tables = make(descriptor)
    table = tables.open("a", encode_table_settings(TableSettings(dim=1024)))
    for transaction in range(2):  # the second one's log has all rows
        with tables.transaction():
            push_rows(table, 20_000)
        if transaction == 0:
            before = used_bytes(descriptor)
    rows_bytes = 20_000 * 2 * 1024 * 4
    assert before > rows_bytes
    assert used_bytes(descriptor) < before + KEPT_LOG_BYTES + rows_bytes // 2


def test_replaced_arrays_are_given_back(descriptor):
    tables = make(descriptor)
    table = tables.open("a", encode_table_settings(TableSettings(dim=64)))
    with tables.transaction():
        push_rows(table, 50_000)
    least = used_bytes(descriptor)
    for _ in range(4):
        with tables.transaction():
            table.restore(table.contents())
        with tables.transaction():
            table.reset_states()
            push_rows(table, 10)
    assert used_bytes(descriptor) < least + (16 << 20)


def test_memory_that_an_unfinished_transaction_made_is_given_back(descriptor):
    tables = make(descriptor)
    table = tables.open("a", encode_table_settings(TableSettings(dim=64)))
    with tables.transaction():
        push_rows(table, 50_000)
    least = used_bytes(descriptor)
    tables.begin()
    table.restore(table.contents())
    assert used_bytes(descriptor) > least + (20 << 20)
    del table
    tables.close()
    make(descriptor).close()
    assert used_bytes(descriptor) < least + (16 << 20)


def test_outgrown_slots_are_given_back(descriptor):
    tables = make(descriptor)
    table = tables.open("a", encode_table_settings(TableSettings(dim=1, max_rows=16 * 1024 * 32)))
    for start in range(0, 400_000, 20_000):
        with tables.transaction():
            push_rows(table, 20_000, start)
    slots_bytes = 1024 * 1024 * 16
    others = 400_000 * 24 + KEPT_LOG_BYTES + 1024 * 2 * mmap.PAGESIZE
    assert used_bytes(descriptor) < slots_bytes + others
