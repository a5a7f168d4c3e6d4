"""Batches are copied to the device one ahead if that changes nothing else, and always in order."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from data.loader_cases import Items, Texts, freeze, loader_on
from support.processes import on_mesh

from rankless.data.logical_tensor import LogicalTensor
from rankless.data.prefetching import PlainCopier, copy_to_device, get_local_data, make_copier
from rankless.parallel.mesh import Mesh


class EventLog:
    """A source of three items and a copier that record the order of events."""

    def __init__(self, *, fails_at: int | None = None) -> None:
        self.entries: list[str] = []
        self.fails_at = fails_at

    def items(self) -> Iterator[tuple[int, Any]]:
        for number in range(3):
            if number == self.fails_at:
                raise OSError("disk gone")
            self.entries.append(f"read {number}")
            yield number, f"batch {number}"

    def start(self, batch: Any) -> Any:
        self.entries.append(f"start {batch[-1]}")
        return batch + " in flight"

    def finish(self, batch: Any) -> Any:
        self.entries.append(f"finish {batch[6]}")
        return batch.replace("in flight", "done")

    def run(self, *, ahead: bool) -> list[Any]:
        found = []
        for item in copy_to_device(self.items(), copier=self, ahead=ahead):
            self.entries.append(f"use {item[0]}")
            found.append(item)
        return found


def test_prefetching_starts_the_next_copy_before_a_batch_is_used():
    log = EventLog()
    assert log.run(ahead=True) == [(number, f"batch {number} done") for number in range(3)]
    assert log.entries == [
        *("read 0", "start 0", "read 1", "start 1", "finish 0", "use 0"),
        *("read 2", "start 2", "finish 1", "use 1", "finish 2", "use 2"),
    ]


def test_without_reader_processes_nothing_is_read_ahead():
    log = EventLog()
    assert [number for number, _ in log.run(ahead=False)] == [0, 1, 2]
    assert log.entries[:5] == ["read 0", "start 0", "finish 0", "use 0", "read 1"]


@pytest.mark.parametrize("ahead", [True, False])
def test_a_prefetching_error_is_raised_after_the_previous_batches(ahead):
    log = EventLog(fails_at=2)
    with pytest.raises(OSError, match="disk gone"):
        log.run(ahead=ahead)
    assert log.entries[-1] == "use 1"


def test_prefetched_batches_do_not_count_for_the_position():
    loader = loader_on(Mesh.solo(), Items(), batch_size=5, num_workers=1, device="cpu")
    batches = iter(loader)
    next(batches)
    assert loader.position == 1
    next(batches)
    assert loader.position == 2


def test_the_cpu_copier_uses_no_stream_and_keeps_texts():
    copier = make_copier(torch.device("cpu"))
    assert isinstance(copier, PlainCopier)
    batch = {"x": torch.ones(2), "names": ["a", "b"]}
    assert freeze(copier.finish(copier.start(batch))) == freeze(batch)


def read_on_device(mesh: Mesh) -> list[Any]:
    plain = [freeze(batch) for batch in loader_on(mesh, Texts(), batch_size=4)]
    placed = list(loader_on(mesh, Texts(), batch_size=4, device="cpu", num_workers=1))
    kinds = [type(batch[0]) is LogicalTensor for batch in placed]
    rows = [get_local_data(batch[0]).shape[0] for batch in placed]
    return [[freeze(batch) for batch in placed] == plain, kinds, rows]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_on_a_mesh_local_rows_move_to_the_device_and_stay_logical(size):
    for rank, found in enumerate(on_mesh(size, read_on_device)):
        rows = [4 // size + (rank < 4 % size)] * 2 + [3 // size + (rank < 3 % size)]
        assert found == [True, [True, True, True], rows]
