"""The tables of rows among a job's models, which all workers share."""

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from rankless.collectives.byte_messages import all_gather_bytes
from rankless.context.table_sharing import SharedTables, find_sparse_embeddings, list_tables
from rankless.context.world import World
from rankless.errors import TableError
from rankless.jobs.definition import JobDefinition

WORKER_TABLES = "rankless.extensions.servers.worker_tables"


class JobTables:
    """Shares the tables of one job, and tells them when a call and a step begin and end."""

    def __init__(self, job: JobDefinition, world: World) -> None:
        self._job = job
        self._world = world
        self._tables: list[Any] | None = None
        self._embeddings: dict[str, Any] | None = None

    def share(self) -> None:
        """Share tables that are not shared yet, with other workers or with servers. Collective."""
        world = self._world
        for table in self.find():
            self._require_mesh_of_tables()
            if world.mesh.size > 1 or world.tables.servers is not None:
                table.share(world.tables.get(self._make_shared_tables))
            if self._job.accumulates:
                table.let_programs_read()  # that of the loss weights
        if world.independent is not None:
            world.tables.get(self._make_shared_tables)  # servers hold the other parameters, too
        elif world.tables.servers is not None:
            self._share_weights()

    def _share_weights(self) -> None:
        """Let servers have the weights of embeddings with sparse gradients that the job trains. Collective."""
        weights = self._find_weights()
        if weights:
            self._require_mesh_of_tables()
            if any(axis.stage_workers for axis in self._world.mesh.axes):
                expected = "tables of rankless.parameter_server, where the run has heterogeneous workers"
                fix = "use rankless.parameter_server.Embedding, or sparse=False"
                raise self._error(expected, f"{next(iter(weights))} of an embedding with sparse gradients", fix)
            self._world.tables.get(self._make_shared_tables).share_weights(weights)

    def list_sparse_weights(self) -> list[nn.Parameter]:
        """Return the weights of embeddings with sparse gradients in the job's models."""
        weights = (part._parameters.get("weight") for part in self._list_embeddings().values())
        return [each for each in weights if each is not None]

    def _list_embeddings(self) -> dict[str, Any]:
        """Return the embeddings with sparse gradients in the job's models, by name."""
        if self._embeddings is None:
            self._embeddings = {
                f"{model}.{name}".removesuffix("."): part
                for model, module in self._job.modules.items()
                for name, part in find_sparse_embeddings(module).items()
            }
        return self._embeddings

    def _find_weights(self) -> dict[str, tuple[nn.Parameter, Optimizer]]:
        """Return the weights of embeddings with sparse gradients that the job's optimizers step, by name."""
        embeddings = self._list_embeddings()
        if not embeddings or not self._job.trains:
            return {}
        owners = {
            id(parameter): optimizer
            for optimizer in self._job.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        found: dict[str, tuple[nn.Parameter, Optimizer]] = {}
        for name, part in embeddings.items():
            weight = part._parameters.get("weight")  # None where it is computed, as by a parametrization
            is_trained = weight is not None and weight.requires_grad and weight.numel() and id(weight) in owners
            if is_trained and part.max_norm is None:  # which changes rows within a call
                found[f"{name}.weight"] = weight, owners[id(weight)]
        return found

    def begin_plain_call(self) -> None:
        """Share tables, and let servers have what the script has changed in weights. Collective."""
        self.share()
        self._begin_weights()
        self.note_call()

    def begin_call(self) -> None:
        """Share tables, and let them forget earlier gradients, before a program is captured. Collective.

        It can be repeated until `note_call`.
        """
        self.share()
        self._begin_weights()
        self.begin_program()

    def note_call(self) -> None:
        """Note that a call counts for all workers, and servers have what the script has changed before it."""
        known = self._world.tables.weights
        if known is not None:
            known.end_call()

    def _begin_weights(self) -> None:
        known = self._world.tables.weights
        if known is not None:
            known.begin_call()

    def begin_program(self) -> None:
        """Let tables forget earlier gradients: a captured program runs, perhaps again after one for another value."""
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
                run_for_all=self._share_for_all,
                is_interrupted=recovery.is_interrupted,
                recover=recovery.go_on,
                can_recover=True,
            )
        make: Callable[..., SharedTables] = module.WorkerTables
        tables = make(
            lambda data: all_gather_bytes(data, mesh=world.current.workers),
            world.tables.servers,
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
        """Give the servers the gradients of the program that has run, if workers may be lost before they step.

        A step of several calls has more than these: a worker that is lost ends its run.
        """
        if self._world.recovery is not None and not self._job.accumulates and self._world.tables.tables is not None:
            self._world.tables.tables.prepare([table.weight for table in self.find()])

    def require_none(self, doing: str) -> None:
        """Raise TableError if the job has tables, whose gradients a program would give them once more."""
        if self.find():
            found = f"{doing} in job {self._job.name!r}, which has tables"
            raise self._error("a job without tables", found, "look at the first step that differs, in the table above")

    def find(self) -> list[Any]:
        """Return the tables in the order of the job's models."""
        if self._tables is None:
            self._tables = list_tables(self._job.modules.values())
        return self._tables

    def _require_mesh_of_tables(self) -> None:
        mesh, options = self._world.mesh, self._job.step_options
        is_data = len(mesh.axes) == 1 and (mesh.axes[0].role == "data" or mesh.axes[0].stage_workers)
        if mesh.size > 1 and not is_data:
            found = "the axes " + ", ".join(f"{axis.name}={axis.size}" for axis in mesh.axes)
            raise self._error("a mesh with the axis data alone, where a job has tables", found, "omit --mesh and plan=")
        if mesh.size > 1 and options.zero is not None:
            raise self._error("a job with tables without zero=", f"zero={options.zero!r}", "omit zero=")

    def _error(self, expected: str, found: str, fix: str) -> TableError:
        return TableError(expected=expected, found=found, fix=fix, where=self._job.line)
