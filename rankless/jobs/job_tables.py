"""The tables of rows among a job's models, which all workers share."""

import importlib
from collections.abc import Callable
from typing import Any

from rankless.collectives.byte_messages import all_gather_bytes
from rankless.context.table_sharing import SharedTables, find_tables
from rankless.context.world import World
from rankless.errors import TableError
from rankless.jobs.definition import JobDefinition

WORKER_TABLES = "rankless.parameter_server.worker_tables"


class JobTables:
    """Shares the tables of one job, and tells them when a call and a step begin and end."""

    def __init__(self, job: JobDefinition, world: World) -> None:
        self._job = job
        self._world = world
        self._tables: list[Any] | None = None

    def share(self) -> None:
        """Share tables that are not shared yet, with other workers or with servers. Collective."""
        world = self._world
        for table in self.find():
            self._require_usable()
            if world.mesh.size > 1 or world.servers is not None:
                table.share(world.tables.get(self._make_shared_tables))
        if world.independent is not None:
            world.tables.get(self._make_shared_tables)  # servers hold the other parameters, too

    def begin_call(self) -> None:
        """Share tables, and let them forget earlier gradients: the call runs a captured program. Collective."""
        self.share()
        for table in self.find() if self._job.trains else ():
            table.begin_program()

    def end_call(self) -> None:
        """Let tables see the gradients that a call has set."""
        for table in self.find():
            table.end_program()

    def _make_shared_tables(self) -> SharedTables:
        world, workers = self._world, self._world.numbering
        module = importlib.import_module(WORKER_TABLES)
        recovery = world.recovery
        loss = module.LossHandling(is_first=lambda: world.current.workers.rank == 0)
        if recovery is not None:
            loss = loss._replace(
                run_for_all=self._share_for_all, is_interrupted=recovery.is_interrupted, recover=recovery.go_on
            )
        make: Callable[..., SharedTables] = module.WorkerTables
        tables = make(
            lambda data: all_gather_bytes(data, mesh=world.current.workers),
            world.servers,
            worker=workers.own,
            worker_count=workers.count,
            notify=world.notify,
            loss=loss,
        )
        if workers.lost:
            tables.regroup(workers, 0)
        return tables

    def _share_for_all(self, attempt: Callable[[], Any]) -> Any:
        """Share a table, as an operation of all workers."""

        def share(world: World) -> Any:
            world.workers.check_sync_point("a table that all workers share")
            return attempt()

        return self._world.run_for_all(share)

    def prepare_step(self) -> None:
        """Give the servers the gradients of the program that has run, if workers may be lost before they step."""
        if self._world.recovery is not None and self._world.tables.tables is not None:
            self._world.tables.tables.prepare([table.weight for table in self.find()])

    def require_none(self, doing: str) -> None:
        """Raise TableError if the job has tables, whose gradients a program would give them once more."""
        if self.find():
            found = f"{doing} in job {self._job.name!r}, which has tables"
            raise self._error("a job without tables", found, "look at the first step that differs, in the table above")

    def find(self) -> list[Any]:
        """Return the tables in the order of the job's models."""
        if self._tables is None:
            self._tables = [table for model in self._job.modules.values() for table in find_tables(model).values()]
        return self._tables

    def _require_usable(self) -> None:
        mesh, options = self._world.mesh, self._job.step_options
        if mesh.size > 1 and (len(mesh.axes) > 1 or mesh.axes[0].role != "data"):
            found = "the axes " + ", ".join(f"{axis.name}={axis.size}" for axis in mesh.axes)
            raise self._error("a mesh with the axis data alone, where a job has tables", found, "omit --mesh and plan=")
        if mesh.size > 1 and options.zero is not None:
            raise self._error("a job with tables without zero=", f"zero={options.zero!r}", "omit zero=")
        if options.accumulate > 1:
            found = f"accumulate={options.accumulate}"
            raise self._error("one step per call, where a job has tables", found, "omit accumulate=")

    def _error(self, expected: str, found: str, fix: str) -> TableError:
        return TableError(expected=expected, found=found, fix=fix, where=self._job.line)
