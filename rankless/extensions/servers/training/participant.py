"""What takes part in jobs for tables of rows, and for the servers of a run that hold them.

With heterogeneous workers it cuts each program into two stages.

Note [dense stages]: what the dense modules compute and all that follows from it is the second stage. The rest is the
first one, wherever it stands in the script: lookups in tables, pooling, and what is added to the scores of the dense
part. A lookup whose ids follow from the dense part would have to come after it, so it is refused.
"""

import contextlib
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from operator import getitem

from torch import fx
from torch.optim import Optimizer

from rankless.compiler.ir.logical_program import LogicalProgram
from rankless.compiler.pipeline_parallel.stages import (
    Stages,
    assign_backward,
    find_free,
    find_owners,
    list_forward,
    list_prefixes,
)
from rankless.compiler.rules.extension_operators import is_lookup
from rankless.config.process_configs import WorkerConfig
from rankless.context.extension_participants import JointEvents, JointParticipant
from rankless.context.world import StartedWorkers, World
from rankless.errors import CaptureError, ConfigError
from rankless.extensions.servers.config import ServersConfig, find_served
from rankless.extensions.servers.dense_parts import find_dense
from rankless.extensions.servers.training.independent_view import IndependentView
from rankless.extensions.servers.training.independent_workers import IndependentWorkers, ServedOwner
from rankless.extensions.servers.training.job_tables import JobTables, list_tables
from rankless.extensions.servers.training.own_steps import OwnSteps
from rankless.extensions.servers.training.shared_tables import SharedTables
from rankless.jobs.job_definition import JobDefinition
from rankless.parallel.mesh import Mesh

DENSE = 1
"""The number of the dense stage."""
COUNT = 2


def find_dense_stages(
    program: LogicalProgram,
    dense: Collection[str],
    names: Mapping[str, str],
    owners: Mapping[str, int],
    *,
    where: str,
) -> Stages:
    """Return the two stages of a program; see Note [dense stages].

    Args:
        program: The program.
        dense: The paths of the modules that begin the dense part, such as "model.layers".
        names: For each name of a parameter its first name, which differs if it is tied.
        owners: The stages of parameters that have one already.
        where: The line of the job, for errors.

    Raises:
        CaptureError: A lookup depends on the dense part.
        ConfigError: The program trains, and no module is marked.
    """
    if not dense and any(described.kind == "gradient" for _, described in program.outputs):
        raise ConfigError(
            expected="a dense part in each job that trains, because the run has heterogeneous workers",
            found="no module that is marked as dense",
            fix="mark the layers after all lookups: rankless.parameter_server.mark_dense(model.layers)",
            where=where,
        )
    of: dict[fx.Node, int] = {}
    for node in list_forward(program):
        if node.target is getitem:
            of[node] = of[node.all_input_nodes[0]]
            continue
        is_marked = any(path in dense for path in list_prefixes(node))
        follows = any(of.get(value) == DENSE for value in node.all_input_nodes)
        of[node] = DENSE if is_marked or follows else 0
        if of[node] == DENSE and is_lookup(node.target):
            raise CaptureError(
                expected="lookups in tables before the dense part, which heterogeneous workers compute",
                found="a lookup in it, or one whose ids follow from it",
                fix="mark only the layers after all lookups with rankless.parameter_server.mark_dense",
                where=node.meta.get("line") or where,
            )
    assign_backward(program, of, find_free(program), COUNT)
    borders = (next(iter(dense), ""),)
    return Stages(count=COUNT, of=of, owners=find_owners(program, of, COUNT, names) | dict(owners), borders=borders)


def make_joint_participant(
    events: JointEvents, config: WorkerConfig | None, workers: Mesh | None
) -> "TableParticipant":
    """Return what takes part in jobs for tables and servers. See `context.extension_participants.JointEvents`."""
    return TableParticipant(events, None if config is None else find_served(config.roles), workers)


class TableParticipant(JointParticipant):
    """The tables of a process that workers share, and the servers of the run.

    Args:
        events: What sends it events.
        servers: The parameter servers of the run, which hold its tables. None: each worker holds them.
        workers: All workers of the run; None for a process that has joined without servers.
    """

    def __init__(self, events: JointEvents, servers: ServersConfig | None, workers: Mesh | None) -> None:
        self._shared = SharedTables(servers, events.upcoming)
        self._independent: IndependentWorkers | None = None
        """What the workers do together where each trains on batches of its own. None: they make all steps together."""
        if servers is not None and self._shared.makes_own_steps:
            assert workers is not None
            staleness = servers.staleness if servers.mode == "bounded" else None
            self._independent = IndependentWorkers(workers, self._get_own_steps, staleness)
            self.workers = workers

    def _get_own_steps(self) -> OwnSteps:
        assert self._shared.tables is not None
        return self._shared.tables.own_steps

    def join_job(self, job: JobDefinition, world: World) -> JobTables | None:
        """See `JointParticipant`."""
        concerns = self._shared.servers is not None or list_tables(job.modules.values())
        return JobTables(job, world, self._shared) if concerns else None

    def make_view(self, job: JobDefinition, world: World) -> IndependentView | None:
        """See `JointParticipant`."""
        if self._independent is None:
            return None
        return IndependentView(job, world, self._independent, JobTables(job, world, self._shared))

    def make_owner(self) -> ServedOwner | None:
        """See `JointParticipant`."""
        return None if self._independent is None else ServedOwner(self._independent.step_on_servers)

    def find_stages(
        self, job: JobDefinition, program: LogicalProgram, names: Mapping[str, str], known: Mapping[str, int]
    ) -> Stages:
        """Return the stages of heterogeneous workers, and of the others; see Note [dense stages]."""
        return find_dense_stages(program, find_dense(job.modules), names, known, where=job.line)

    @property
    def own_steps(self) -> str:
        """See `JointParticipant`."""
        return "" if self._shared.tables is None and self._independent is None else "tables, or servers that step"

    @property
    def committed(self) -> int | None:
        """See `JointParticipant`."""
        return None if self._shared.tables is None else self._shared.tables.committed

    def reads_early(self, world: World) -> bool:
        """See `JointParticipant` and Note [early rows]."""
        return self._shared.reads_early(world)

    def step(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Return a context in which servers make an optimizer's step for the weights whose rows they have."""
        weights = None if self._shared.tables is None else self._shared.tables.weights
        return contextlib.nullcontext() if weights is None else weights.step(optimizer)

    def end_step(self) -> None:
        """End a step of a job."""
        if self._shared.tables is not None:
            self._shared.tables.commit()

    def meet(self, operation: str) -> None:
        """See Note [where workers meet]."""
        if self._independent is not None:
            self._independent.meet(operation)

    def regroup(self, workers: StartedWorkers, committed: int) -> None:
        """See `JointParticipant`."""
        if self._shared.tables is not None:
            self._shared.tables.regroup(workers, committed)

    def finish(self) -> None:
        """Wait until servers have noted the last step, at the end of a script. Raises TableError if they could not."""
        if self._shared.tables is not None:
            self._shared.tables.finish()

    def close(self) -> None:
        """Leave the servers: this process needs tables no more."""
        if self._shared.tables is not None:
            self._shared.tables.close()
            self._shared.tables = None
