"""Contents of tables in parts: no message is larger than a part, however large the table."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rankless.errors import TableError
from rankless.extensions.servers.service.routing import RoutedIds, are_ids_of_shards, route_ids, servers_of_shards
from rankless.extensions.servers.service.wire.messages import Frame, MessageRefusedError, array_of
from rankless.extensions.servers.tables.contents import TableContents
from rankless.extensions.servers.tables.id_map import MOST_OCCURRENCES
from rankless.extensions.servers.tables.settings import TableSettings

PART_BYTES = 64 << 20
ROWS, WAITING = 0, 1
"""Sections: rows, and ids that wait for one."""
_MOST_STEPS = 1 << 39


class ContentsMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What a table's contents are, beside their arrays. `width` is the number of elements of a row with its states."""

    step: int
    optimizer: str
    optimizer_steps: int
    initial_state: float
    width: int
    rows: int
    waiting: int

    def row_bytes(self, section: int, dtype: str) -> int:
        """Return the bytes of one row of a section."""
        return 24 if section == WAITING else 16 + self.width * np.dtype(dtype).itemsize


class ContentsSnapshot(NamedTuple):
    """Contents that are being read in parts."""

    contents: TableContents

    def metadata(self) -> ContentsMetadata:
        """Return what the contents are."""
        contents = self.contents
        return ContentsMetadata(
            step=contents.step,
            optimizer=contents.optimizer,
            optimizer_steps=contents.optimizer_steps,
            initial_state=float(contents.initial_state),
            width=contents.rows.shape[1],
            rows=len(contents.ids),
            waiting=len(contents.waiting_ids),
        )

    def part(self, section: int, start: int, count: int) -> tuple[Frame, ...]:
        """Return rows of a section as frames."""
        return tuple(array[start : start + count] for array in arrays_of(self.contents)[section])


def arrays_of(contents: TableContents) -> tuple[tuple[NDArray[Any], ...], tuple[NDArray[Any], ...]]:
    """Return the arrays of both sections."""
    return (
        (contents.ids, contents.rows, contents.used_steps),
        (contents.waiting_ids, contents.waiting_occurrences, contents.waiting_steps),
    )


class IncomingContents:
    """Contents that arrive in parts."""

    def __init__(self, metadata: ContentsMetadata, dtype: str) -> None:
        self.metadata = metadata
        self._dtype = dtype
        self._parts: tuple[list[list[NDArray[Any]]], ...] = ([], [])
        self._arrived = [0, 0]

    def add(self, section: int, start: int, count: int, frames: Sequence[memoryview]) -> None:
        """Take the next rows of a section. Raises MessageRefusedError if they are not, or of another size."""
        most = (self.metadata.rows, self.metadata.waiting)[section]
        if len(frames) != 3 or start != self._arrived[section] or start + count > most:
            raise MessageRefusedError("a part of contents at another place than the next one")
        shapes: tuple[tuple[int, ...], ...] = ((count,), (count,), (count,))
        types = ("<i8", "<i8", "<i8")
        if section == ROWS:
            shapes, types = ((count,), (count, self.metadata.width), (count,)), ("<i8", self._dtype, "<i8")
        arrays = [array_of(*each) for each in zip(frames, types, shapes, strict=True)]
        self._parts[section].append(arrays)
        self._arrived[section] += count

    def finish(self) -> TableContents:
        """Return the contents. Raises MessageRefusedError if a part is missing."""
        if self._arrived != [self.metadata.rows, self.metadata.waiting]:
            raise MessageRefusedError("the end of contents of which a part is missing")
        columns = [self._column_arrays(ROWS), self._column_arrays(WAITING)]
        return make_contents(self.metadata, columns)

    def _column_arrays(self, section: int) -> list[NDArray[Any]]:
        parts = self._parts[section]
        if not parts:
            empty = np.empty(0, np.int64)
            rows = empty if section == WAITING else np.empty((0, self.metadata.width), self._dtype)
            return [empty, rows, empty]
        return [np.concatenate([part[column] for part in parts]) for column in range(3)]


def make_contents(metadata: ContentsMetadata, columns: Sequence[Sequence[NDArray[Any]]]) -> TableContents:
    """Return contents of the arrays of both sections."""
    (ids, rows, used_steps), (waiting_ids, waiting_occurrences, waiting_steps) = columns
    return TableContents(
        step=metadata.step,
        optimizer=metadata.optimizer,
        optimizer_steps=metadata.optimizer_steps,
        initial_state=metadata.initial_state,
        ids=ids,
        rows=rows,
        used_steps=used_steps,
        waiting_ids=waiting_ids,
        waiting_occurrences=waiting_occurrences,
        waiting_steps=waiting_steps,
    )


def check_contents(contents: TableContents, shard_bits: int, shards: tuple[int, int]) -> None:
    """Raise TableError if contents cannot be those of a table that holds these shards."""
    every_id = np.concatenate((contents.ids, contents.waiting_ids))
    occurrences, steps = contents.waiting_occurrences, (contents.used_steps, contents.waiting_steps)
    problems = {
        "each id once": len(np.unique(every_id)) == len(every_id),
        "ids of this server": are_ids_of_shards(every_id, shard_bits, *shards),
        "occurrences in range": bool(((occurrences >= 0) & (occurrences <= MOST_OCCURRENCES)).all()),
        "steps in range": all(bool(((each >= 0) & (each < _MOST_STEPS)).all()) for each in steps),
        "a number of steps": 0 <= contents.step < _MOST_STEPS and 0 <= contents.optimizer_steps < _MOST_STEPS,
    }
    wrong = [name for name, holds in problems.items() if not holds]
    if wrong:
        raise TableError(
            expected="the contents of a table",
            found=f"not {', '.join(wrong)}",
            fix="restore what a table's contents() gave",
        )


def split_contents(contents: TableContents, settings: TableSettings, server_count: int) -> list[TableContents]:
    """Return the contents for each of several servers. Raises TableError if they cannot be those of a table."""
    check_contents(contents, settings.shard_bits, (0, 1 << settings.shard_bits))
    servers = servers_of_shards(server_count, settings.shard_bits)
    rows_section, waiting_section = arrays_of(contents)
    rows_section = (rows_section[0], rows_section[1].astype(settings.dtype, copy=False), rows_section[2])
    routes: list[RoutedIds] = []
    for section in (rows_section, waiting_section):
        ids = np.ascontiguousarray(section[0], np.int64)
        routes.append(route_ids(ids, settings.shard_bits, servers, server_count))
    parts = []
    for server in range(server_count):
        rows, waiting = (route.places[route.ends[server] : route.ends[server + 1]] for route in routes)
        columns = ([array[rows] for array in rows_section], [array[waiting] for array in waiting_section])
        metadata = ContentsSnapshot(contents).metadata()
        parts.append(make_contents(metadata, columns))
    return parts


def join_contents(parts: Sequence[TableContents]) -> TableContents:
    """Return the contents of all servers, in the order of ids."""
    if len(parts) == 1:
        return parts[0]
    sections = [arrays_of(part) for part in parts]
    columns = []
    for section in (ROWS, WAITING):
        arrays = [np.concatenate([each[section][column] for each in sections]) for column in range(3)]
        order = np.argsort(arrays[0], kind="stable")  # which merges what is in order already
        columns.append([array[order] for array in arrays])
    return make_contents(ContentsSnapshot(parts[0]).metadata(), columns)
