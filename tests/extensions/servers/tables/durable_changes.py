"""Transactions on several tables, drawn from a seed, and comparison of tables bit by bit."""

import dataclasses

import numpy as np

from rankless.extensions.servers.service.wire.setting_formats import encode_table_settings
from rankless.extensions.servers.tables.optimizers import AdagradSettings, FtrlSettings, SgdSettings, SparseAdamSettings
from rankless.extensions.servers.tables.settings import ByCount, ByHash, Constant, TableSettings, Uniform
from rankless.extensions.servers.tables.table import Table

SETTINGS = {
    # Rows are evicted and expire; a row's size is no multiple of 8 bytes.
    "evicting": TableSettings(dim=3, max_rows=600, expire_after_steps=9),
    # Few shards hold many ids without rows, and grow.
    "counting": TableSettings(
        dim=2, dtype="float64", admission=ByCount(occurrences=2), max_rows=64, initial=Uniform(low=-1, high=1)
    ),
    "growing": TableSettings(dim=4, seed=7, initial=Constant(value=0.5)),
    "expiring": TableSettings(dim=5, admission=ByHash(fraction=0.7), expire_after_steps=4),
}
OPENED_AT = {"evicting": 1, "counting": 1, "growing": 3, "expiring": 4}
"""Before which transaction a table is opened."""
ID_RANGES = {"evicting": 3000, "counting": 20_000, "growing": 2**62, "expiring": 2000}
MOST_PUSHED = {"evicting": 300, "counting": 1500, "growing": 6000, "expiring": 500}
OPTIMIZERS = (
    SgdSettings(lr=0.1, momentum=0.9, nesterov=True),
    SparseAdamSettings(lr=0.05),
    SgdSettings(lr=0.1),
    SgdSettings(lr=0.02, momentum=0.5, dampening=0.1),
    AdagradSettings(lr=0.1, initial_accumulator_value=0.2),
    FtrlSettings(lr=0.1, l1=0.01),
)
STEPS_OF_ONE_OPTIMIZER = 5


class Opener:
    """Opens tables in memory of this process, as `DurableTables` does in other memory."""

    def __init__(self) -> None:
        self.tables: dict[str, Table] = {}

    def open(self, name: str, settings: bytes) -> Table:
        assert settings == encode_table_settings(SETTINGS[name])
        return self.tables.setdefault(name, Table(SETTINGS[name]))


def open_tables(opener, transaction: int) -> None:
    """Open the tables that a transaction needs."""
    for name, settings in SETTINGS.items():
        if OPENED_AT[name] <= transaction:
            opener.open(name, encode_table_settings(settings))


def change_tables(tables: dict[str, Table], seed: int, transaction: int) -> None:
    """Make the changes of one transaction."""
    generator = np.random.default_rng((seed, transaction))
    for number, (name, table) in enumerate(tables.items()):
        optimizer = OPTIMIZERS[(seed + number + transaction // STEPS_OF_ONE_OPTIMIZER) % len(OPTIMIZERS)]
        for _ in range(generator.integers(1, 4)):
            kind = generator.random()
            if kind < 0.05:
                table.reset_states()
            elif kind < 0.09:
                table.restore(table.contents())
            elif kind < 0.11:
                table.restore(Table(table.settings).contents())
            else:
                push(table, name, optimizer, generator)


def push(table: Table, name: str, optimizer, generator: np.random.Generator) -> None:
    count = int(generator.integers(0, MOST_PUSHED[name]))
    ids = np.unique(generator.integers(0, ID_RANGES[name], count))
    gradients = generator.standard_normal((len(ids), table.settings.dim)).astype(table.settings.dtype)
    table.push(ids, generator.integers(1, 3, len(ids)), gradients, optimizer)


def difference(tables: dict[str, Table], expected: dict[str, Table]) -> str:
    """Return what differs, in any bit. Empty: nothing."""
    if list(tables) != list(expected):
        return f"tables {list(tables)} instead of {list(expected)}"
    for name, table in tables.items():
        ours, theirs = (dataclasses.asdict(each.contents()) for each in (table, expected[name]))
        for field, value in ours.items():
            if np.asarray(value).tobytes() != np.asarray(theirs[field]).tobytes():
                return f"{field} of {name}"
        ids = np.concatenate((np.arange(0, 4000, 3), ours["ids"][::5], -ours["ids"][::7]))
        if table.pull(ids).tobytes() != expected[name].pull(ids).tobytes():
            return f"pulled values of {name}"
        if table.statistics() != expected[name].statistics():
            return f"statistics of {name}: {table.statistics()} instead of {expected[name].statistics()}"
    return ""


class UndisturbedTables:
    """Tables that no kill disturbs, advanced to any later transaction."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._opener = Opener()
        self.transaction = 0

    def after(self, transaction: int, opened: int) -> dict[str, Table]:
        """Return the tables after a transaction, when the first `opened` tables have been opened."""
        assert transaction >= self.transaction
        while self.transaction < transaction:
            self.transaction += 1
            open_tables(self._opener, self.transaction)
            change_tables(self._opener.tables, self._seed, self.transaction)
        for name in list(SETTINGS)[:opened]:
            self._opener.open(name, encode_table_settings(SETTINGS[name]))
        return self._opener.tables
