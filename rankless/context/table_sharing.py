"""The tables of rows among a script's modules, which all workers of a run share."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

EMBEDDING_MODULE = "rankless.parameter_server.embedding"
"""It is imported if the script uses tables."""


def find_tables(module: nn.Module) -> dict[str, Any]:
    """Return the tables (`rankless.parameter_server.Embedding`) of a module, itself included, by their names in it."""
    known = sys.modules.get(EMBEDDING_MODULE)
    if known is None:
        return {}
    return {name: part for name, part in module.named_modules() if isinstance(part, known.Embedding)}


class SharedTables(Protocol):
    """Holds tables for all workers: in each of them, or on the servers of the run."""

    def share(self, table: Any, before: Any) -> Any:
        """Return the store of rows of all workers for the table of this one. Collective.

        Args:
            table: The table.
            before: The store that had its rows before, or None.
        """
        ...

    def commit(self) -> None:
        """End a step: from here on all workers read what it has changed."""
        ...

    def close(self) -> None:
        """Leave the servers."""
        ...


@dataclass
class TableSharing:
    """The shared tables of a process, from the first job that has a table on."""

    tables: SharedTables | None = None

    def get(self, make: Callable[[], SharedTables]) -> SharedTables:
        """Return the shared tables, made on first use."""
        if self.tables is None:
            self.tables = make()
        return self.tables

    def commit(self) -> None:
        """End a step of a job."""
        if self.tables is not None:
            self.tables.commit()

    def close(self) -> None:
        """Leave the servers: this process needs tables no more."""
        if self.tables is not None:
            self.tables.close()
            self.tables = None
