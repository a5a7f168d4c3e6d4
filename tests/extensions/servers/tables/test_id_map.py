"""The map from ids to entries does what a dictionary does, whatever the ids."""

import numpy as np
import pytest

from rankless.extensions.servers.tables.id_map import (
    ENTRY,
    FULL,
    MOST_OCCURRENCES,
    IdMap,
    clear_slot,
    find_entry,
    find_slot,
    list_entries,
    mix,
    pack_occurrences,
    set_entry,
    shard_of,
    unpack_occurrences,
)

EXTREMES = (0, -1, 1, 2**63 - 1, -(2**63), 2**32, -(2**32))


def make_map(shard_bits: int, most_slots: int = 2**13) -> IdMap:
    shards = 1 << shard_bits
    slots = np.zeros((shards, most_slots, 2), np.int64)
    return IdMap(slots, np.full(shards, 64, np.int64), np.zeros(shards, np.int64), shard_bits)


def remove(id_map: IdMap, row_id: int) -> None:
    mixed = np.uint64(mix(row_id))
    shard = shard_of(mixed, id_map.shard_bits)
    clear_slot(id_map, shard, find_slot(id_map, shard, mixed, row_id))


def entries_of(id_map: IdMap) -> dict[int, int]:
    ids, entries = np.empty((2, int(id_map.occupied.sum())), np.int64)
    list_entries(id_map, ids, entries)
    return dict(zip(ids.tolist(), entries.tolist(), strict=True))


def colliding_ids(count: int) -> list[int]:
    """Return ids that all have the last of 64 slots as their first one, so that they go around the end of the map."""
    found: list[int] = []
    candidate = 0
    while len(found) < count:
        if int(mix(candidate)) % 64 == 63:
            found.append(candidate)
        candidate += 1
    return found


@pytest.mark.ci_sample(5)
@pytest.mark.parametrize("shard_bits", [0, 1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_random_changes_leave_what_a_dictionary_has(shard_bits, seed):
    generator = np.random.default_rng(seed)
    pool = [*EXTREMES, *generator.integers(-(2**63), 2**63 - 1, 300).tolist(), *range(-50, 50)]
    id_map, expected = make_map(shard_bits), {}
    for number in range(4000):
        row_id = int(generator.choice(pool))
        if generator.random() < 0.4 and row_id in expected:
            remove(id_map, row_id)
            del expected[row_id]
        else:
            entry = int(generator.integers(1, 1000)) * int(generator.choice((-1, 1)))
            assert set_entry(id_map, row_id, entry) == 0
            expected[row_id] = entry
        if number % 100 == 0:
            assert {one: find_entry(id_map, one) for one in pool if find_entry(id_map, one)} == expected
    assert entries_of(id_map) == expected


@pytest.mark.parametrize("order", [1, -1])
def test_ids_that_go_around_the_end_stay_reachable_when_others_leave(order):
    ids = colliding_ids(20)
    for removed in range(len(ids)):
        id_map = make_map(0)
        for number, row_id in enumerate(ids[::order]):
            set_entry(id_map, row_id, number + 1)
        remove(id_map, ids[removed])
        remaining = {row_id: number + 1 for number, row_id in enumerate(ids[::order]) if row_id != ids[removed]}
        assert entries_of(id_map) == remaining
        assert {row_id: find_entry(id_map, row_id) for row_id in remaining} == remaining
        assert find_entry(id_map, ids[removed]) == 0


def test_shards_grow_one_after_the_other():
    id_map = make_map(8)
    growths, previous = [], id_map.capacities.copy()
    for start in range(0, 256 * 200, 1000):
        for row_id in range(start, start + 1000):
            set_entry(id_map, row_id, 1)
        growths.append(int((id_map.capacities > previous).sum()))
        previous = id_map.capacities.copy()
    assert sum(growths) > 256
    assert max(growths) < 256 / 4


def test_a_map_without_room_refuses_and_stays_as_it_was():
    id_map = make_map(0, most_slots=256)
    held = 0
    while set_entry(id_map, held, held + 1) != FULL:
        held += 1
    assert held >= 128 * 0.375 - 1
    assert entries_of(id_map) == {row_id: row_id + 1 for row_id in range(held)}
    assert set_entry(id_map, 0, 77) == 0
    assert find_entry(id_map, 0) == 77


def test_mixed_bits_are_those_of_splitmix64():
    # The first outputs of SplitMix64 from seed 0 (Vigna's reference): state n * 0x9E3779B97F4A7C15, mixed.
    increment = 0x9E3779B97F4A7C15
    states = [(number * increment) % 2**64 for number in (1, 2, 3)]
    signed = [state - 2**64 if state >= 2**63 else state for state in states]
    assert [int(mix(state)) for state in signed] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize("occurrences", [1, 5, MOST_OCCURRENCES])
@pytest.mark.parametrize("step", [0, 1, 2**38])
def test_occurrences_and_step_come_back_from_an_entry(occurrences, step):
    entry = pack_occurrences(occurrences, step)
    assert entry < 0
    assert unpack_occurrences(entry) == (occurrences, step)


def test_an_empty_slot_has_entry_0():
    assert make_map(0).slots[0, 64, ENTRY] == 0
