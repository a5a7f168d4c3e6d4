"""Which row an id has: open addressing with linear probing, in many small maps.

Note [virtual shards]: the upper bits of an id's mixed bits choose one of a power of two of virtual shards, each with a
map of its own. A server holds a range of them, so that tables move to another number of servers by whole shards. Growth
concerns one shard at a time, which takes about a millisecond instead of a second.

Note [growth in place]: a map with c slots lies at slots c to 2c - 1 of its shard's memory, so the next size never
overlaps it. Shards grow at loads between `LEAST_LOAD` and `MOST_LOAD`, which differ from shard to shard. So they grow
one after the other, though all have about as many ids at any time.

Note [entries]: a slot is an id and an entry. Entry 0 is an empty slot, a positive one the row's number plus 1, and a
negative one the occurrences so far of an id without a row, with the last step that had it (`pack_occurrences`).

The same probing finds the different ids of a batch, and adds up what belongs to equal ones (`find_distinct`,
`sum_rows`).
"""

from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from rankless.extensions.servers.tables.compiled_functions import compiled
from rankless.extensions.servers.tables.undo_log import NO_LOG, UndoLog, remember, remember_zeros

Integer = int | np.int64
Integers = TypeVar("Integers", int | np.int64, NDArray[np.int64])

FIRST_CAPACITY = 64
LEAST_LOAD, MOST_LOAD = 0.375, 0.75
ID, ENTRY = 0, 1
"""The two columns of a slot."""
FULL = -2
"""There is no memory for more ids or rows."""
OCCURRENCE_BITS = 24
MOST_OCCURRENCES = (1 << OCCURRENCE_BITS) - 1
"""Occurrences are counted up to here."""

_SHIFT_30, _SHIFT_27, _SHIFT_31 = np.uint64(30), np.uint64(27), np.uint64(31)
_FACTOR_0, _FACTOR_1 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_WORD_BITS = 64


class IdMap(NamedTuple):
    """The maps of all shards, as numba takes them.

    Args:
        slots: Ids and entries, int64, of shape (shards, most slots of a shard, 2).
        capacities: Number of slots of each shard's map, a power of two, int64.
        occupied: Number of slots in use, int64.
        shard_bits: Binary logarithm of the number of shards.
        log: Where old slots are noted before they change. The other arrays are the caller's to note.
    """

    slots: NDArray[np.int64]
    capacities: NDArray[np.int64]
    occupied: NDArray[np.int64]
    shard_bits: int
    log: UndoLog = NO_LOG


@compiled
def mix(row_id: Integer) -> np.uint64:
    """Return the bits of an id, mixed (the finalizer of SplitMix64; Steele, Lea and Flood, OOPSLA 2014).

    It is a bijection: different ids have different bits.
    """
    bits = np.uint64(row_id)
    bits = (bits ^ (bits >> _SHIFT_30)) * _FACTOR_0
    bits = (bits ^ (bits >> _SHIFT_27)) * _FACTOR_1
    return bits ^ (bits >> _SHIFT_31)


@compiled
def shard_of(mixed: np.uint64, shard_bits: int) -> Integer:
    """Return the virtual shard of mixed bits."""
    return np.int64(mixed >> np.uint64(_WORD_BITS - shard_bits)) if shard_bits > 0 else np.int64(0)


@compiled
def find_slot(id_map: IdMap, shard: Integer, mixed: np.uint64, row_id: Integer) -> Integer:
    """Return the number of an id's slot, or of the empty slot where it belongs."""
    capacity = id_map.capacities[shard]
    mask = capacity - 1
    position = np.int64(mixed & np.uint64(mask))
    while True:
        slot: Integer = capacity + position
        if id_map.slots[shard, slot, ENTRY] == 0 or id_map.slots[shard, slot, ID] == row_id:
            return slot
        position = (position + 1) & mask


@compiled
def find_entry(id_map: IdMap, row_id: Integer) -> Integer:
    """Return an id's entry; see Note [entries]."""
    mixed = mix(row_id)
    shard = shard_of(mixed, id_map.shard_bits)
    entry: Integer = id_map.slots[shard, find_slot(id_map, shard, mixed, row_id), ENTRY]
    return entry


@compiled
def set_entry(id_map: IdMap, row_id: Integer, entry: Integer) -> Integer:
    """Set the entry, not 0, of an id, which may be new. Return 0, or `FULL`, and then nothing has changed."""
    mixed = mix(row_id)
    shard = shard_of(mixed, id_map.shard_bits)
    slot = find_slot(id_map, shard, mixed, row_id)
    if id_map.slots[shard, slot, ENTRY] == 0:
        load = LEAST_LOAD + (MOST_LOAD - LEAST_LOAD) * shard / id_map.capacities.shape[0]
        if id_map.occupied[shard] + 1 > load * id_map.capacities[shard]:
            if grow_shard(id_map, shard) == FULL:
                return FULL
            slot = find_slot(id_map, shard, mixed, row_id)
        remember(id_map.log, id_map.slots[shard, slot])
        id_map.slots[shard, slot, ID] = row_id
        id_map.occupied[shard] += 1
    else:
        remember(id_map.log, id_map.slots[shard, slot])
    id_map.slots[shard, slot, ENTRY] = entry
    return 0


@compiled
def grow_shard(id_map: IdMap, shard: Integer) -> Integer:
    """Double the number of a shard's slots; see Note [growth in place]. Return 0, or `FULL`."""
    old = id_map.capacities[shard]
    if 4 * old > id_map.slots.shape[1]:
        return FULL
    remember_zeros(id_map.log, id_map.slots[shard, 2 * old], 4 * old)
    id_map.capacities[shard] = 2 * old
    for source in range(old, 2 * old):
        entry = id_map.slots[shard, source, ENTRY]
        if entry != 0:
            row_id = id_map.slots[shard, source, ID]
            slot = find_slot(id_map, shard, mix(row_id), row_id)
            id_map.slots[shard, slot, ID] = row_id
            id_map.slots[shard, slot, ENTRY] = entry
    return 0


@compiled
def clear_slot(id_map: IdMap, shard: Integer, slot: Integer) -> None:
    """Remove the id of a slot. Ids after it move back, so that each stays reachable from its first position.

    This is deletion from Knuth, "The Art of Computer Programming", volume 3, section 6.4, algorithm R.
    """
    capacity = id_map.capacities[shard]
    mask = capacity - 1
    hole = slot - capacity
    position = (hole + 1) & mask
    while id_map.slots[shard, capacity + position, ENTRY] != 0:
        first = np.int64(mix(id_map.slots[shard, capacity + position, ID]) & np.uint64(mask))
        if (position - first) & mask >= (position - hole) & mask:
            remember(id_map.log, id_map.slots[shard, capacity + hole])
            id_map.slots[shard, capacity + hole, ID] = id_map.slots[shard, capacity + position, ID]
            id_map.slots[shard, capacity + hole, ENTRY] = id_map.slots[shard, capacity + position, ENTRY]
            hole = position
        position = (position + 1) & mask
    remember(id_map.log, id_map.slots[shard, capacity + hole])
    id_map.slots[shard, capacity + hole, ENTRY] = 0
    id_map.occupied[shard] -= 1


@compiled
def pack_occurrences(occurrences: Integers, step: Integers) -> Integers:
    """Return the entry of an id without a row: its occurrences so far, up to `MOST_OCCURRENCES`, and its last step."""
    packed = (step << OCCURRENCE_BITS) | occurrences
    return -1 - packed


@compiled
def unpack_occurrences(entry: Integers) -> tuple[Integers, Integers]:
    """Return the occurrences and the step of a negative entry, or of an array of them."""
    packed = -1 - entry
    return packed & MOST_OCCURRENCES, packed >> OCCURRENCE_BITS


@compiled
def list_entries(id_map: IdMap, ids: NDArray[np.int64], entries: NDArray[np.int64]) -> None:
    """Write all ids and their entries, each of shape (occupied slots,), shard by shard."""
    number = 0
    for shard in range(id_map.capacities.shape[0]):
        capacity = id_map.capacities[shard]
        for slot in range(capacity, 2 * capacity):
            if id_map.slots[shard, slot, ENTRY] != 0:
                ids[number] = id_map.slots[shard, slot, ID]
                entries[number] = id_map.slots[shard, slot, ENTRY]
                number += 1


_NONE = -1


@compiled
def find_distinct(ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the different ids of a batch in the order of their first occurrence.

    Args:
        ids: Ids, int64, of shape (n,).

    Returns:
        The different ids, of shape (m,), the number of each id of the batch among them, of shape (n,), and how often
        each occurs, of shape (m,).
    """
    count = ids.shape[0]
    capacity = 4
    while capacity < 2 * count:
        capacity *= 2
    mask = capacity - 1
    numbers = np.full(capacity, _NONE, np.int64)
    distinct, occurrences = np.empty(count, np.int64), np.zeros(count, np.int64)
    places = np.empty(count, np.int64)
    found = 0
    for index in range(count):
        row_id = ids[index]
        position = np.int64(mix(row_id) & np.uint64(mask))
        while numbers[position] != _NONE and distinct[numbers[position]] != row_id:
            position = (position + 1) & mask
        if numbers[position] == _NONE:
            numbers[position] = found
            distinct[found] = row_id
            found += 1
        places[index] = numbers[position]
        occurrences[numbers[position]] += 1
    return distinct[:found], places, occurrences[:found]


@compiled
def sum_rows(rows: NDArray[np.floating], places: NDArray[np.int64], count: int) -> NDArray[np.floating]:
    """Return sums of rows that have the same place, added in their order.

    Args:
        rows: Rows, of shape (n, dim).
        places: The place of each row, from 0 to `count` - 1, int64, of shape (n,).
        count: Number of places.

    Returns:
        The sums, of shape (count, dim), zeros where there is no row.
    """
    sums = np.zeros((count, rows.shape[1]), rows.dtype)
    for index in range(places.shape[0]):
        row, total = rows[index], sums[places[index]]
        for column in range(row.shape[0]):
            total[column] += row[column]
    return sums
