"""Tables that outlive their process: Note [durable memory] in `durable_memory`, Note [undo log] in `undo_log`."""

import contextlib
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from rankless.errors import TableError
from rankless.extensions.servers.tables.contents import TableState
from rankless.extensions.servers.tables.durable_memory import STATES_BYTES, TEXT_BYTES, DurableMemory, require_sound
from rankless.extensions.servers.tables.row_optimizers import OPTIMIZER_NAMES
from rankless.extensions.servers.tables.settings import TableSettings
from rankless.extensions.servers.tables.table import Table
from rankless.extensions.servers.tables.undo_log import WORD_BYTES, remember

_OPTIMIZERS = ("", *OPTIMIZER_NAMES)
_ARRAYS = ("numbers", "slots", "values", "used_steps", "free", "caught_up", "movements", "decays")
_NOWHERE = -1
_STATE_WORDS = 32
_STATE = struct.Struct(f"<3qd6q{len(_ARRAYS)}q")
MOST_TABLES = STATES_BYTES // WORD_BYTES // _STATE_WORDS


class _StoredTable(msgspec.Struct, frozen=True):
    name: str
    settings: str
    """As whoever opened the table encoded them."""


class _Directory(msgspec.Struct, frozen=True):
    tables: tuple[_StoredTable, ...] = ()
    note: str = ""


class DurableTables:
    """Tables in a file in memory that another process holds. It changes by transactions.

    Example:
        >>> tables = DurableTables(os.memfd_create("tables"), decode_table_settings)
        >>> table = tables.open("items", settings)
        >>> tables.begin()
        >>> table.push(ids, occurrences, gradients, SgdSettings(lr=0.1))
        >>> tables.commit(1)

    Attributes:
        tables: Tables by name, in the order in which they were opened.
    """

    def __init__(self, descriptor: int, decode_settings: Callable[[bytes], TableSettings]) -> None:
        """Map the file, undo what has not been committed, and find its tables.

        Args:
            descriptor: The file, as from `os.memfd_create`. Of size 0: there are no tables yet. No other process may
                use it at the same time.
            decode_settings: Returns the settings of a table from the bytes with which it was opened.

        Raises:
            TableError: The file is damaged, or cannot be mapped.
        """
        self._memory = DurableMemory(descriptor)
        self._in_transaction = False
        self._directory = _decode_directory(self._memory.text)
        states = [self._read_state(number) for number in range(len(self._directory.tables))]
        self.tables: dict[str, Table] = {
            stored.name: Table(decode_settings(stored.settings.encode()), self._memory, state)
            for stored, state in zip(self._directory.tables, states, strict=True)
        }
        self._decode_settings = decode_settings
        self._memory.keep_only(_positions_of(states))  # also what a killed process has begun to make

    @property
    def committed(self) -> int:
        """The number of the last transaction that has been committed. 0: none."""
        return self._memory.committed

    @property
    def settings(self) -> Mapping[str, bytes]:
        """The settings of each table, as it was opened with them."""
        return {stored.name: stored.settings.encode() for stored in self._directory.tables}

    @property
    def note(self) -> str:
        """A text that the user of the tables keeps with them."""
        return self._directory.note

    def set_note(self, note: str) -> None:
        """Change the note, within a transaction."""
        text = msgspec.json.encode(_Directory(self._directory.tables, note))
        self._memory.set_text(text)
        self._directory = _decode_directory(text)

    def open(self, name: str, settings: bytes) -> Table:
        """Return the table of that name, which is made if it does not exist. A kill leaves all of it or nothing.

        Args:
            name: The table's name.
            settings: Its settings, as text that `decode_settings` understands.

        Raises:
            TableError: There is no memory for it, or there are too many tables.
        """
        if name in self.tables:
            return self.tables[name]
        text = msgspec.json.encode(
            _Directory((*self._directory.tables, _StoredTable(name, settings.decode())), self.note)
        )
        if len(self._directory.tables) == MOST_TABLES or len(text) > TEXT_BYTES:
            raise TableError(
                expected=f"at most {MOST_TABLES} tables with names and settings of {TEXT_BYTES:,} bytes",
                found=f"{len(self._directory.tables) + 1} tables, {len(text):,} bytes",
                fix="use fewer tables or shorter names",
            )
        with self.transaction():
            table = Table(self._decode_settings(settings), self._memory)
            self._memory.set_text(text)
            self._directory = _decode_directory(text)
            self.tables[name] = table
        return table

    @contextlib.contextmanager
    def transaction(self, number: int | None = None) -> Iterator[None]:
        """Commit what a `with` block changes. If it raises an error, undo that instead."""
        self.begin()
        with contextlib.ExitStack() as undoing:
            undoing.callback(self.undo)
            yield
            undoing.pop_all()
        self.commit(number)

    def begin(self) -> None:
        """Begin a transaction. Tables may change within one only."""
        assert not self._in_transaction
        self._in_transaction = True

    def commit(self, transaction: int | None = None) -> None:
        """Make all changes since `begin` final.

        Args:
            transaction: The number that `committed` has from now on. None: as before.
        """
        assert self._in_transaction
        states = [table.state() for table in self.tables.values()]
        for number, state in enumerate(states):
            self._write_state(number, state)
        if transaction is not None:
            self._memory.set_committed(transaction)
        self._memory.commit()
        self._in_transaction = False
        self._give_back(states)
        for table in self.tables.values():
            table.release_memory()

    def undo(self) -> None:
        """Undo all changes since `begin`. Tables that were opened before remain, as they were."""
        assert self._in_transaction
        self._memory.undo()
        self._in_transaction = False
        self._directory = _decode_directory(self._memory.text)
        states = [self._read_state(number) for number in range(len(self._directory.tables))]
        self.tables = {stored.name: self.tables[stored.name] for stored in self._directory.tables}
        for table, state in zip(self.tables.values(), states, strict=True):
            table.load(state)
        self._give_back(states)

    def close(self) -> None:
        """Unmap the memory. The tables may not be used any more."""
        self.tables.clear()
        self._memory.close()

    def _give_back(self, states: Sequence[TableState]) -> None:
        """Give back memory that no table has any more."""
        positions = _positions_of(states)
        if positions != self._memory.positions:
            self._memory.keep_only(positions)

    def _words_of(self, number: int) -> NDArray[np.int64]:
        return self._memory.states[number * _STATE_WORDS : (number + 1) * _STATE_WORDS]

    def _write_state(self, number: int, state: TableState) -> None:
        """Write a table's state, under the log, if it has changed."""
        packed = _STATE.pack(
            state.step,
            _OPTIMIZERS.index(state.optimizer),
            state.optimizer_steps,
            state.initial_state,
            state.width,
            state.most_rows,
            state.most_slots,
            state.history_steps,
            state.history_first_moving,
            state.history_length,
            *(state.positions.get(name, _NOWHERE) for name in _ARRAYS),
        )
        words = self._words_of(number)
        if words.tobytes()[: _STATE.size] != packed:
            remember(self._memory.log, words)
            words[: len(packed) // WORD_BYTES] = np.frombuffer(packed, np.int64)
            words[-1] = zlib.crc32(packed)

    def _read_state(self, number: int) -> TableState:
        words = self._words_of(number)
        packed = words.tobytes()[: _STATE.size]
        checksum = int(words[-1])
        require_sound(
            checksum == zlib.crc32(packed),
            f"the state of table {number} with the checksum {checksum}",
            zlib.crc32(packed),
        )
        numbers = _STATE.unpack(packed)
        step, optimizer, optimizer_steps, initial_state, width, most_rows, most_slots, *history = numbers[:10]
        return TableState(
            step=step,
            optimizer=_OPTIMIZERS[optimizer],
            optimizer_steps=optimizer_steps,
            initial_state=initial_state,
            width=width,
            most_rows=most_rows,
            most_slots=most_slots,
            history_steps=history[0],
            history_first_moving=history[1],
            history_length=history[2],
            positions={
                name: position for name, position in zip(_ARRAYS, numbers[10:], strict=True) if position != _NOWHERE
            },
        )


def _decode_directory(text: bytes) -> _Directory:
    return msgspec.json.decode(text, type=_Directory) if text else _Directory()


def _positions_of(states: Sequence[TableState]) -> set[int]:
    return {position for state in states for position in state.positions.values()}
