"""Which ids get rows and which lose them, compared with a plain model of the rules."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from rankless.errors import TableError
from rankless.extensions.servers.tables.id_map import mix
from rankless.extensions.servers.tables.optimizers import AdagradSettings, SgdSettings
from rankless.extensions.servers.tables.settings import ByCount, ByHash, TableSettings
from rankless.extensions.servers.tables.table import Table


@dataclass
class PlainTable:
    """The rules of rows, with dictionaries: which ids have a row, and when a step used it last."""

    settings: TableSettings
    step: int = 0
    rows: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, tuple[int, int]] = field(default_factory=dict)

    def shard(self, row_id: int) -> int:
        return int(mix(row_id)) >> 64 - self.settings.shard_bits if self.settings.shard_bits else 0

    def push(self, occurrences: dict[int, int]) -> None:
        self.step += 1
        for row_id in occurrences.keys() & self.rows.keys():
            self.rows[row_id] = self.step
        for row_id in sorted(occurrences.keys() - self.rows.keys()):
            count = self.waiting.pop(row_id, (0, 0))[0] + occurrences[row_id]
            admission = self.settings.admission
            if isinstance(admission, ByCount) and count < admission.occurrences:
                self.waiting[row_id] = (count, self.step)
            else:
                self.create(row_id)
        self.expire()

    def create(self, row_id: int) -> None:
        beside = [other for other in self.rows if self.shard(other) == self.shard(row_id)]
        if self.settings.shard_rows and len(beside) >= self.settings.shard_rows:
            oldest = min(beside, key=lambda other: (self.rows[other], other))
            if self.rows[oldest] == self.step:
                return
            del self.rows[oldest]
        self.rows[row_id] = self.step

    def expire(self) -> None:
        limit = self.settings.expire_after_steps
        if limit is None:
            return
        period = min(limit, 1 << self.settings.shard_bits)

        def stays(row_id: int, used: int) -> bool:
            return self.shard(row_id) % period != self.step % period or self.step - used <= limit

        self.rows = {row_id: used for row_id, used in self.rows.items() if stays(row_id, used)}
        self.waiting = {row_id: seen for row_id, seen in self.waiting.items() if stays(row_id, seen[1])}


RULES = {
    "none": TableSettings(dim=1, dtype="float64"),
    "count": TableSettings(dim=1, dtype="float64", admission=ByCount(occurrences=4)),
    "expiry": TableSettings(dim=1, dtype="float64", expire_after_steps=6),
    "fast_expiry": TableSettings(dim=1, dtype="float64", expire_after_steps=1),
    "count_and_expiry": TableSettings(dim=1, dtype="float64", admission=ByCount(occurrences=3), expire_after_steps=3),
    "cap": TableSettings(dim=1, dtype="float64", max_rows=40),
    "cap_in_one_shard": TableSettings(dim=1, dtype="float64", max_rows=15),
    "one_row": TableSettings(dim=1, dtype="float64", max_rows=1),
    "cap_and_expiry": TableSettings(dim=1, dtype="float64", max_rows=64, expire_after_steps=4),
}


def push(table: Table, occurrences: dict[int, int], value: float = 1.0) -> None:
    ids = np.array(sorted(occurrences), np.int64)
    counts = np.array([occurrences[row_id] for row_id in ids.tolist()], np.int64)
    gradients = np.full((len(ids), table.settings.dim), value, table.settings.dtype)
    table.push(ids, counts, gradients, SgdSettings(lr=1.0))


@pytest.mark.ci_sample(9)
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("seed", range(3))
def test_rows_and_counts_are_those_of_the_rules(rules, seed):
    generator = np.random.default_rng(seed)
    table, plain = Table(RULES[rules]), PlainTable(RULES[rules])
    for step in range(150):
        # Ids of which the most frequent ones change with time.
        ids = generator.zipf(1.3, generator.integers(0, 30)) % 200 - 100 + 50 * (step // 50)
        occurrences = {int(row_id): int(generator.integers(1, 4)) for row_id in ids}
        push(table, occurrences)
        plain.push(occurrences)
        if step % 40 == 20:
            stored = table.contents()
            table = Table(RULES[rules])
            table.restore(stored)
        contents = table.contents()
        assert dict(zip(contents.ids.tolist(), contents.used_steps.tolist(), strict=True)) == plain.rows
        waiting = zip(contents.waiting_occurrences.tolist(), contents.waiting_steps.tolist(), strict=True)
        assert dict(zip(contents.waiting_ids.tolist(), waiting, strict=True)) == plain.waiting
        assert table.statistics().rows == len(plain.rows)
    assert plain.rows


def test_an_id_below_its_count_reads_as_initial_and_is_trained_from_the_step_that_reaches_it():
    table = Table(TableSettings(dim=2, dtype="float64", admission=ByCount(occurrences=5)))
    initial = table.pull(np.array([9]))
    push(table, {9: 3})
    np.testing.assert_array_equal(table.pull(np.array([9])), initial)
    assert table.statistics().rejected == 1
    push(table, {9: 2})
    np.testing.assert_array_equal(table.pull(np.array([9])), initial - 1)
    assert table.statistics().rows == 1


@pytest.mark.parametrize("fraction", [0.0, 0.25, 1.0])
def test_a_hash_admits_a_fraction_of_ids_always_the_same(fraction):
    table = Table(TableSettings(dim=1, admission=ByHash(fraction=fraction), seed=2))
    push(table, dict.fromkeys(range(20_000), 1))
    admitted = set(table.contents().ids.tolist())
    assert abs(len(admitted) / 20_000 - fraction) < 0.015
    push(table, dict.fromkeys(range(20_000), 50))
    assert set(table.contents().ids.tolist()) == admitted
    other = Table(TableSettings(dim=1, admission=ByHash(fraction=fraction), seed=3))
    push(other, dict.fromkeys(range(20_000), 1))
    assert (set(other.contents().ids.tolist()) == admitted) == (fraction in (0.0, 1.0))


def test_a_row_that_comes_back_begins_with_its_initial_values_and_new_states():
    table = Table(TableSettings(dim=1, dtype="float64", max_rows=1))
    first = table.pull(np.array([1]))
    settings = AdagradSettings(lr=1.0, initial_accumulator_value=3.0)
    for row_id in (1, 2, 1):
        table.push(np.array([row_id]), np.array([1]), np.ones((1, 1)), settings)
    np.testing.assert_allclose(table.pull(np.array([1])), first - 1 / 2, atol=1e-9)  # sqrt(3 + 1)
    assert table.statistics().evicted == 2
    assert table.statistics().rows == 1


def test_rows_of_one_step_are_never_removed_for_each_other():
    table = Table(TableSettings(dim=1, dtype="float64", max_rows=8))
    push(table, dict.fromkeys(range(8), 1))
    push(table, dict.fromkeys(range(4, 20), 1))
    contents = table.contents()
    assert set(range(4, 8)) <= set(contents.ids.tolist())
    assert len(contents.ids) == 8
    assert table.statistics().rejected == 12 - 4


def test_reading_makes_no_rows():
    table = Table(TableSettings(dim=3))
    table.pull(np.arange(1000))
    assert table.statistics().rows == table.statistics().waiting == 0
    assert table.step == 0


def test_many_ids_may_wait_beside_few_rows():
    table = Table(TableSettings(dim=1, max_rows=32, admission=ByCount(occurrences=2)))
    push(table, dict.fromkeys(range(100_000), 1))
    assert table.statistics().waiting == 100_000
    push(table, dict.fromkeys(range(10), 1))
    assert table.statistics().rows == 10


def test_row_numbers_are_used_again():
    table = Table(TableSettings(dim=4, expire_after_steps=2))
    for step in range(50):
        push(table, dict.fromkeys(range(step * 100, step * 100 + 100), 1))
    statistics = table.statistics()
    assert statistics.created == 5000
    assert statistics.expired == 5000 - statistics.rows
    assert statistics.memory_bytes < 1024 * 64 * 16 + 600 * (4 * 4 + 8)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"dim": 0}, "dim of at least 1"),
        ({"dim": 2, "max_rows": 0}, "max_rows of at least 1"),
        ({"dim": 2, "expire_after_steps": 0}, "expire_after_steps of at least 1"),
        ({"dim": 2, "dtype": "float16"}, "dtype float32 or float64"),
        ({"dim": 2, "seed": -1}, "a seed from 0"),
        ({"dim": 2, "admission": ByCount(occurrences=0)}, "occurrences"),
        ({"dim": 2, "admission": ByHash(fraction=1.5)}, "a fraction from 0 to 1"),
    ],
)
def test_settings_out_of_range_are_refused(settings, expected):
    with pytest.raises(TableError, match=expected):
        TableSettings(**settings)
