"""The tables of rows among a job's models, which all workers share.

After a step they ask servers for the rows of the next call; see Note [early rows] in `context.upcoming_batches`.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rankless.context.extension_participants import JobParticipant
from rankless.context.world import World
from rankless.data.logical_tensor import LogicalTensor
from rankless.errors import TableError
from rankless.extensions.servers.training import PARTICIPANT
from rankless.extensions.servers.training.shared_tables import SharedTables
from rankless.jobs.job_definition import JobDefinition
from rankless.jobs.programs.bound_program import BoundProgram, collect_inputs
from rankless.jobs.programs.program_cache import CacheLookup
from rankless.ownership.modules_with_states_elsewhere import list_extension_modules


class EarlyRows:
    """Predicts the lookups of a job's next call: those of its last program, with the loaders' next batches."""

    def __init__(self, world: World, shared: SharedTables) -> None:
        self._world = world
        self._shared = shared
        self._last: tuple[BoundProgram, CacheLookup] | None = None
        self._is_of_use = True

    def note_call(self, bound: BoundProgram, call: CacheLookup) -> None:
        """Note a call and the program that has run for it."""
        can_predict = self._is_of_use and self._shared.reads_early(self._world) and bound.local.ids is not None
        self._last = (bound, call) if can_predict else None
        if can_predict:
            self._shared.upcoming.is_wanted = True

    def request(self) -> None:
        """Ask for the rows of the next call, if the last call had tensors of a batch that another one follows."""
        if self._last is None:
            return
        bound, call = self._last
        self._last = None
        found = [self._find_next(tensor) for tensor in call.arguments.tensors]
        if not any(is_next for _, is_next in found) or bound.local.ids is None:
            return
        tensors = tuple(tensor for tensor, _ in found)
        if [each.shape for each in tensors] != [each.shape for each in call.arguments.tensors]:
            return  # the next call has another program
        arguments = replace(call.arguments, tensors=tensors)
        values = collect_inputs(bound, arguments, call.shardings, self._world.mesh)
        try:
            lookups = bound.local.ids(values, list(bound.sizes(arguments).values()))
        except Exception:  # an operator refuses the values of the next batch: the next call raises it
            return
        if self._shared.tables is not None:
            self._is_of_use = self._shared.tables.request_rows(lookups)

    def _find_next(self, tensor: Tensor) -> tuple[Tensor, bool]:
        """Return what follows an argument, and whether it does: otherwise it is the argument itself."""
        if not isinstance(tensor, LogicalTensor) or not tensor.fingerprint:
            return tensor, False
        following = self._shared.upcoming.find(tensor.fingerprint)
        is_alike = (
            isinstance(following, LogicalTensor)
            and following.mesh is tensor.mesh
            and following.placement == tensor.placement
        )
        if following is None or not is_alike:
            return tensor, False
        with torch.no_grad():
            return following.to(tensor.device, tensor.dtype), True


class JobTables(JobParticipant):
    """Shares the tables of one job, and tells them when a call and a step begin and end."""

    def __init__(self, job: JobDefinition, world: World, shared: SharedTables) -> None:
        self._job = job
        self._world = world
        self._shared = shared
        self._early = EarlyRows(world, shared)
        self._tables: list[Any] | None = None
        self._embeddings: dict[str, Any] | None = None

    def share(self) -> None:
        """Share tables that are not shared yet, with other workers or with servers. Collective."""
        world = self._world
        for table in self.find():
            self._require_mesh_of_tables()
            if world.mesh.size > 1 or self._shared.servers is not None:
                table.share(self._shared.get(world))
            if self._job.accumulates:
                table.let_programs_read()  # that of the loss weights
        if self._shared.makes_own_steps:
            self._shared.get(world)  # servers hold the other parameters, too
        elif self._shared.servers is not None:
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
            self._shared.get(self._world).share_weights(weights)

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

    def begin_call(self) -> None:
        """Share tables, and let servers have what the script has changed in weights. Collective, repeatable."""
        self.share()
        if self._shared.tables is not None and self._shared.tables.weights is not None:
            self._shared.tables.weights.begin_call()

    def count_call(self) -> None:
        """Note that a call counts for all workers, and servers have what the script has changed before it."""
        if self._shared.tables is not None and self._shared.tables.weights is not None:
            self._shared.tables.weights.end_call()

    def begin_program(self) -> None:
        """Let tables forget earlier gradients: a captured program runs, perhaps again after one for another value."""
        for table in self.find() if self._job.trains else ():
            table.begin_program()

    def end_call(self) -> None:
        """Let tables see the gradients that a call has set."""
        for table in self.find():
            table.end_program()

    def end_program(self, bound: BoundProgram, call: CacheLookup) -> None:
        """Give the servers the gradients of the program that has run, if workers may be lost before they step.

        A step of several calls has more than these: a worker that is lost ends its run.
        """
        self._early.note_call(bound, call)
        may_lose = self._world.recovery is not None and not self._job.accumulates
        if self._job.trains and may_lose and self._shared.tables is not None:
            self._shared.tables.prepare([table.weight for table in self.find()])

    def prepare_next_call(self) -> None:
        """After a step, ask servers for the rows that the next call is expected to look up."""
        self._early.request()

    def repeat_call(self, doing: str) -> None:
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


def list_tables(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the tables of modules, each once, in their order."""
    return [each for each in list_extension_modules(modules) if each.rankless_participant == PARTICIPANT]


def find_sparse_embeddings(module: nn.Module) -> dict[str, Any]:
    """Return the embeddings with sparse gradients of a module, itself included, by their names in it."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {name: part for name, part in module.named_modules() if isinstance(part, kinds) and part.sparse}
