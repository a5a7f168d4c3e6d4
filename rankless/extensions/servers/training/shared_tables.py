"""The tables of a process that workers share, and the servers of the run."""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rankless.collectives.byte_messages import all_gather_bytes
from rankless.context.upcoming_batches import UpcomingBatches
from rankless.context.world import World
from rankless.extensions.servers.config import ServersConfig

if TYPE_CHECKING:
    from rankless.extensions.servers.training.worker_tables import WorkerTables

WORKER_TABLES = "rankless.extensions.servers.training.worker_tables"
"""It is imported if workers share tables: only they need numba, and the messages to servers."""


class SharedTables:
    """The tables that workers share, and where their rows are.

    Args:
        servers: The parameter servers of the run, which hold its tables. None: each worker holds them.
        upcoming: The batches that loaders will yield next.
    """

    def __init__(self, servers: ServersConfig | None, upcoming: UpcomingBatches) -> None:
        self.servers = servers
        self.tables: WorkerTables | None = None
        """The shared tables, from the first job that has a table on."""
        self.upcoming = upcoming

    @property
    def makes_own_steps(self) -> bool:
        """Whether each worker trains on batches of its own. Otherwise they make all steps together."""
        return self.servers is not None and self.servers.mode != "sync"

    def reads_early(self, world: World) -> bool:
        """Return whether jobs ask servers for rows before a call needs them; see Note [early rows]."""
        return self.servers is not None and not self.makes_own_steps and world.mesh.size > 1

    def get(self, world: World) -> "WorkerTables":
        """Return the shared tables, made on first use."""
        if self.tables is None:
            self.tables = self._make_tables(world)
        return self.tables

    def _make_tables(self, world: World) -> "WorkerTables":
        workers, recovery = world.numbering, world.recovery
        module = importlib.import_module(WORKER_TABLES)
        loss = module.LossHandling(is_first=lambda: world.current.workers.rank == 0)

        def share_for_all(attempt: Callable[[], Any]) -> Any:
            """Share a table, as an operation of all workers."""

            def share(current: World) -> Any:
                current.workers.check_sync_point("a table that all workers share")
                return attempt()

            return world.run_for_all(share)

        if recovery is not None:
            loss = loss._replace(
                run_for_all=share_for_all,
                is_interrupted=recovery.is_interrupted,
                recover=recovery.recover,
                can_recover=True,
            )
        make: Callable[..., WorkerTables] = module.WorkerTables
        tables = make(
            lambda data: all_gather_bytes(data, mesh=world.current.workers),
            self.servers,
            worker=workers.own,
            worker_count=workers.count,
            notify=world.notify,
            loss=loss,
        )
        if workers.lost:
            tables.regroup(workers, 0)
        return tables
