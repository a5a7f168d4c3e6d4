"""Rows of a table: which ids get one, with which initial values, which lose theirs, and reading.

Initial values are a function of the id and of the table's seed. They are drawn by Philox4x32-10 (Salmon, Moraes, Dror
and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011). The id and the number of a block of four elements are
its counter, and the seed is its key. So no server needs to know another one's draws, and an id that comes back after
its row expired begins with the same values.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rankless.extensions.servers.tables.compiled_functions import compiled
from rankless.extensions.servers.tables.id_map import (
    ENTRY,
    FULL,
    ID,
    MOST_OCCURRENCES,
    IdMap,
    Integer,
    clear_slot,
    find_entry,
    mix,
    pack_occurrences,
    set_entry,
    shard_of,
    unpack_occurrences,
)
from rankless.extensions.servers.tables.undo_log import NO_LOG, UndoLog, remember, remember_elements

CONSTANT, UNIFORM, NORMAL = 0, 1, 2
"""Kinds of distributions. Their two parameters: value and nothing; low and high; mean and standard deviation."""
ROUNDS = 10
_LOW_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)
_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_INCREMENT_0, _INCREMENT_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)


@compiled
def philox(
    word0: np.uint64, word1: np.uint64, word2: np.uint64, word3: np.uint64, seed: np.uint64
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    """Return four words of 32 bits for a counter of four words and a key of 64 bits."""
    key0, key1 = seed & _LOW_WORD, seed >> _WORD_BITS
    for _ in range(ROUNDS):
        product0, product1 = word0 * _MULTIPLIER_0, word2 * _MULTIPLIER_1
        word0, word2 = (product1 >> _WORD_BITS) ^ word1 ^ key0, (product0 >> _WORD_BITS) ^ word3 ^ key1
        word1, word3 = product1 & _LOW_WORD, product0 & _LOW_WORD
        key0, key1 = (key0 + _INCREMENT_0) & _LOW_WORD, (key1 + _INCREMENT_1) & _LOW_WORD
    return word0, word1, word2, word3


@compiled
def _unit_interval(word: np.uint64) -> float:
    return (np.float64(word) + 0.5) / 4294967296.0


@compiled
def _normal_pair(word0: np.uint64, word1: np.uint64) -> tuple[float, float]:
    """Return two normally distributed numbers (Box and Muller, 1958)."""
    radius = math.sqrt(-2.0 * math.log(_unit_interval(word0)))
    angle = 2.0 * math.pi * _unit_interval(word1)
    return radius * math.cos(angle), radius * math.sin(angle)


@compiled
def write_initial_values(
    row: NDArray[np.floating], row_id: int | np.int64, seed: np.uint64, kind: int, parameter0: float, parameter1: float
) -> None:
    """Write the initial values of an id.

    Args:
        row: Where to write them, of shape (dim,), float32 or float64.
        row_id: The id, any int64.
        seed: The table's seed.
        kind: `CONSTANT`, `UNIFORM` or `NORMAL`.
        parameter0: The distribution's first parameter.
        parameter1: Its second one.
    """
    dim = row.shape[0]
    if kind == CONSTANT:
        for column in range(dim):
            row[column] = parameter0
        return
    low, high = np.uint64(row_id) & _LOW_WORD, np.uint64(row_id) >> _WORD_BITS
    for block in range((dim + 3) // 4):
        words = philox(low, high, np.uint64(block), np.uint64(0), seed)
        if kind == UNIFORM:
            span = parameter1 - parameter0
            samples = (
                parameter0 + span * _unit_interval(words[0]),
                parameter0 + span * _unit_interval(words[1]),
                parameter0 + span * _unit_interval(words[2]),
                parameter0 + span * _unit_interval(words[3]),
            )
        else:
            first, second = _normal_pair(words[0], words[1])
            third, fourth = _normal_pair(words[2], words[3])
            samples = (
                parameter0 + parameter1 * first,
                parameter0 + parameter1 * second,
                parameter0 + parameter1 * third,
                parameter0 + parameter1 * fourth,
            )
        for column in range(4 * block, min(4 * block + 4, dim)):
            row[column] = samples[column - 4 * block]


EVERY_ID, BY_COUNT, BY_HASH = 0, 1, 2
"""Kinds of admission."""
NO_ROW = -1
_HASH_UNITS = 9007199254740992.0  # 2**53
_HASH_SHIFT = np.uint64(11)

USED, FREE, CREATED, EXPIRED, EVICTED, REJECTED = 0, 1, 2, 3, 4, 5
"""Counters of a table: row numbers ever used, those on the stack of free ones, rows created, expired and evicted, and
ids of pushes that have no row."""
COUNTERS = 6


class RowPolicy(NamedTuple):
    """Which ids get rows, and what a new row holds, as numba takes it.

    Args:
        seed: Seed of initial values and of hashes.
        initial_kind: `CONSTANT`, `UNIFORM` or `NORMAL`.
        initial0: First parameter of the distribution.
        initial1: Its second parameter.
        admission_kind: `EVERY_ID`, `BY_COUNT` or `BY_HASH`.
        admission_limit: Occurrences, or a fraction.
        shard_rows: Most rows of a shard. 0: no cap.
        expire_after_steps: Steps after which an unused row expires. 0: never.
    """

    seed: np.uint64
    initial_kind: int
    initial0: float
    initial1: float
    admission_kind: int
    admission_limit: float
    shard_rows: int
    expire_after_steps: int


class Rows(NamedTuple):
    """The rows of a table, as numba takes them.

    Args:
        values: Values and, after them, optimizer states, float32 or float64, of shape (most rows, width).
        dim: Number of values in a row.
        used_steps: The last step that used the row, int64, of shape (most rows,).
        free: Stack of the numbers of free rows, int64, of shape (most rows,).
        counters: See `USED`.
        shard_rows: Number of rows of each shard, int64.
        initial_state: What the optimizer states of a new row hold.
        log: Where old elements are noted before they change. `counters` and `shard_rows` are the caller's to note.
    """

    values: NDArray[np.floating]
    dim: int
    used_steps: NDArray[np.int64]
    free: NDArray[np.int64]
    counters: NDArray[np.int64]
    shard_rows: NDArray[np.int64]
    initial_state: float
    log: UndoLog = NO_LOG


@compiled
def read_rows(
    ids: NDArray[np.int64], id_map: IdMap, rows: Rows, policy: RowPolicy, values: NDArray[np.floating]
) -> None:
    """Write the values of each id's row into `values`, of shape (ids, dim): the initial ones if it has no row."""
    for number in range(ids.shape[0]):
        entry = find_entry(id_map, ids[number])
        if entry > 0:
            for column in range(rows.dim):
                values[number, column] = rows.values[entry - 1, column]
        else:
            write_initial_values(
                values[number], ids[number], policy.seed, policy.initial_kind, policy.initial0, policy.initial1
            )


@compiled
def find_rows(ids: NDArray[np.int64], id_map: IdMap, row_numbers: NDArray[np.int64]) -> None:
    """Write each id's row number into `row_numbers`, `NO_ROW` if it has none."""
    for number in range(ids.shape[0]):
        row_numbers[number] = max(find_entry(id_map, ids[number]) - 1, NO_ROW)


@compiled
def admit(
    ids: NDArray[np.int64],
    occurrences: NDArray[np.int64],
    step: Integer,
    tables: tuple[IdMap, Rows, RowPolicy],
    row_numbers: NDArray[np.int64],
) -> Integer:
    """Count the occurrences of a step's ids, give rows to those that are admitted, and find all rows.

    Rows of this step's ids are marked as used before any row is evicted for another one. Ids without rows are looked at
    in rising order, so that their order in the step decides nothing.

    Args:
        ids: Different ids, int64, of shape (n,).
        occurrences: How often the step has each, int64, of shape (n,). 0: an earlier step has counted it.
        step: The step's number.
        tables: The table.
        row_numbers: Where to write the row number of each id, int64, of shape (n,). Ids without one get `NO_ROW`.

    Returns:
        0, or `FULL`: no memory for more ids or rows. The ids before have been admitted.
    """
    id_map, rows, policy = tables
    find_rows(ids, id_map, row_numbers)
    remember_elements(rows.log, rows.used_steps, row_numbers)
    for number in range(ids.shape[0]):
        if row_numbers[number] != NO_ROW:
            rows.used_steps[row_numbers[number]] = step
    without_row = np.flatnonzero(row_numbers == NO_ROW)
    for number in without_row[np.argsort(ids[without_row])]:
        row_id = ids[number]
        entry = find_entry(id_map, row_id)
        seen = min(occurrences[number] + (unpack_occurrences(entry)[0] if entry < 0 else 0), MOST_OCCURRENCES)
        if is_admitted(row_id, seen, policy):
            row_number = _create_row(row_id, step, tables)
            if row_number == FULL:
                return FULL
            row_numbers[number] = row_number
        elif policy.admission_kind == BY_COUNT and set_entry(id_map, row_id, pack_occurrences(seen, step)) == FULL:
            return FULL
        if row_numbers[number] == NO_ROW:
            rows.counters[REJECTED] += 1
    return 0


@compiled
def is_admitted(row_id: Integer, occurrences: int, policy: RowPolicy) -> bool | np.bool_:
    """Return whether an id with that many occurrences may have a row."""
    if policy.admission_kind == BY_COUNT:
        return occurrences >= policy.admission_limit
    if policy.admission_kind == BY_HASH:
        return (
            np.float64(mix(np.int64(mix(row_id) ^ policy.seed)) >> _HASH_SHIFT) < policy.admission_limit * _HASH_UNITS
        )
    return True


@compiled
def _create_row(row_id: Integer, step: Integer, tables: tuple[IdMap, Rows, RowPolicy]) -> Integer:
    """Return the number of a new row for an id, `NO_ROW` if its shard's rows are all in use, or `FULL`."""
    id_map, rows, policy = tables
    shard = shard_of(mix(row_id), id_map.shard_bits)
    if policy.shard_rows > 0 and rows.shard_rows[shard] >= policy.shard_rows and not _evict(shard, step, id_map, rows):
        return NO_ROW
    row_number: Integer = rows.counters[USED]
    if rows.counters[FREE] > 0:
        row_number = rows.free[rows.counters[FREE] - 1]
    elif row_number == rows.used_steps.shape[0]:
        return FULL
    if set_entry(id_map, row_id, row_number + 1) == FULL:
        return FULL
    if rows.counters[FREE] > 0:  # the transaction may have removed the row before
        remember(rows.log, rows.values[row_number])
        remember(rows.log, rows.used_steps[row_number : row_number + 1])
        rows.counters[FREE] -= 1
    else:
        rows.counters[USED] += 1
    values = rows.values[row_number]
    write_initial_values(values[: rows.dim], row_id, policy.seed, policy.initial_kind, policy.initial0, policy.initial1)
    values[rows.dim :] = rows.initial_state
    rows.used_steps[row_number] = step
    rows.shard_rows[shard] += 1
    rows.counters[CREATED] += 1
    return row_number


@compiled
def _evict(shard: Integer, step: Integer, id_map: IdMap, rows: Rows) -> bool | np.bool_:
    """Remove the row of a shard that is unused for longest, the least id of several. False: the step uses all."""
    capacity = id_map.capacities[shard]
    oldest_slot, oldest_step, oldest_id = -1, step, np.int64(0)
    for slot in range(capacity, 2 * capacity):
        entry = id_map.slots[shard, slot, ENTRY]
        if entry > 0:
            used, row_id = rows.used_steps[entry - 1], id_map.slots[shard, slot, ID]
            if used < oldest_step or (used == oldest_step and oldest_slot >= 0 and row_id < oldest_id):
                oldest_slot, oldest_step, oldest_id = slot, used, row_id
    if oldest_slot < 0:
        return False
    _remove_row(shard, oldest_slot, id_map, rows)
    rows.counters[EVICTED] += 1
    return True


@compiled
def _remove_row(shard: Integer, slot: Integer, id_map: IdMap, rows: Rows) -> None:
    free = rows.counters[FREE]
    remember(rows.log, rows.free[free : free + 1])
    rows.free[free] = id_map.slots[shard, slot, ENTRY] - 1
    rows.counters[FREE] += 1
    rows.shard_rows[shard] -= 1
    clear_slot(id_map, shard, slot)


@compiled
def expire(step: Integer, tables: tuple[IdMap, Rows, RowPolicy]) -> None:
    """Remove expired rows and occurrence counts from the shards that are looked at in this step.

    Each shard is looked at once in `expire_after_steps` steps, or once in as many steps as there are shards if that is
    less.
    """
    id_map, rows, policy = tables
    if policy.expire_after_steps == 0:
        return
    shards = id_map.capacities.shape[0]
    period = min(policy.expire_after_steps, shards)
    for shard in range(step % period, shards, period):
        capacity = id_map.capacities[shard]
        slot = capacity
        while slot < 2 * capacity:
            entry = id_map.slots[shard, slot, ENTRY]
            if entry == 0:
                slot += 1
                continue
            used = rows.used_steps[entry - 1] if entry > 0 else unpack_occurrences(entry)[1]
            if step - used <= policy.expire_after_steps:
                slot += 1
            elif entry > 0:  # another id may move into this slot, so it is looked at again
                _remove_row(shard, slot, id_map, rows)
                rows.counters[EXPIRED] += 1
            else:
                clear_slot(id_map, shard, slot)


@compiled
def restore_entries(ids: NDArray[np.int64], entries: NDArray[np.int64], id_map: IdMap, rows: Rows) -> Integer:
    """Set the entries of ids of an empty table, whose positive ones are 1, 2, …. Return 0, or `FULL`."""
    for number in range(ids.shape[0]):
        if entries[number] > rows.used_steps.shape[0] or set_entry(id_map, ids[number], entries[number]) == FULL:
            return FULL
        if entries[number] > 0:
            rows.shard_rows[shard_of(mix(ids[number]), id_map.shard_bits)] += 1
            rows.counters[USED] += 1
    return 0
