"""Continues a run without lost workers: this process's side of Note [operations] in `context.world`.

The agent ends the round of a lost worker, and starts the next one when all others have asked for it
(`launch.recovery.survivors`). The workers that are left then make a process group, and a world with it (decision 0049).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from math import prod
from typing import TypeVar
from weakref import WeakSet

import msgspec
import torch.distributed as dist

from rankless.collectives.backends.process_group import SharedMemoryProcessGroup
from rankless.collectives.byte_messages import all_gather_bytes
from rankless.collectives.desync_detection import DesyncDetector
from rankless.config import environment
from rankless.config.mesh_option import AXES
from rankless.config.process_configs import WorkerConfig
from rankless.config.run_config import Backend
from rankless.context.all_or_nothing_operations import ReaderProcesses, list_groups
from rankless.context.exception_serialization import RaisedError, describe_error, is_of_another_rank, make_same_error
from rankless.context.extension_participants import JointEvents
from rankless.context.world import PipelineStages, World
from rankless.errors import CollectiveError, LostWorkerError
from rankless.ownership.sharded_state_owner import ShardedStateOwner
from rankless.ownership.state_owner import StateOwner
from rankless.parallel.mesh import Mesh, MeshAxis, find_pipeline_axis, list_state_axes
from rankless.records.encoding import encode_msgpack
from rankless.records.parallel_plan import PlannedAxis
from rankless.runtime.elastic_round import ElasticMember, Round
from rankless.runtime.fork_replacement import IN_REPLACEMENT, explain_obstacle
from rankless.runtime.hooks.torch_settings import find_original_destroy
from rankless.runtime.process_groups import make_group_of_equals, make_world_group, make_world_mesh

Result = TypeVar("Result")

NOTICE_SECONDS = 10.0
"""How long a worker whose group has failed waits for the agent to say that another one is lost. The agent of a lost
host is silent for some seconds before host 0 takes it for lost."""
OTHER_ERROR_SECONDS = 0.5
"""The same after an error that another backend than the shared memory may have raised."""


class _Progress(msgspec.Struct, frozen=True):
    """What one worker tells the others in a new round."""

    worker: int
    passed: int
    """How many operations it has passed."""
    counted: int
    """How many steps of participants they include."""
    asks_left: int
    """How often it may still ask for replacements."""


class WorkerRecovery:
    """Runs operations of all workers, again without those that are lost meanwhile."""

    def __init__(
        self,
        member: ElasticMember,
        joint: JointEvents,
        *,
        replaces: bool,
        leave_round: Callable[[], None],
        join_round: Callable[[Round], World],
        enter: Callable[[World], None],
    ) -> None:
        """Make operations once `begin` has been called.

        Args:
            member: The connection to the agent.
            joint: Counts the steps that extensions commit, and continues in each world.
            replaces: Whether a copy of another worker takes the place of a lost one.
            leave_round: Leaves the process group.
            join_round: Joins the process group of a round, and returns a world with it. Collective.
            enter: Lets this process use a world from now on.
        """
        self._member, self._joint, self._replaces = member, joint, replaces
        self._leave_round, self._join_round, self._enter = leave_round, join_round, enter
        self.readers: WeakSet[ReaderProcesses] = WeakSet()
        self._world: World | None = None
        self._begun: World | None = None
        """The world with which the run began."""
        self._described: World | None = None
        """The world whose mesh the user knows."""
        self._last: World | None = None
        """The world of the last operation."""
        self._passed = 0
        self._counted = 0
        """How many steps of participants the operations so far include."""
        self._made = 0
        """How many operations of the script have counted."""
        self._asks_left = 0
        """How often the workers may still ask for replacements, after a loss."""
        self._whole_at = 0
        """How many operations had been passed when all workers had all states."""
        self._ask_at = 0
        """How many operations must have been passed before they do."""
        self._is_inside = False
        self._divided: World | None = None
        """The world in which workers have divided states, until those of a lost one are taken over."""
        self._levels: list[ShardedStateOwner] = []
        """The owners in it whose states are not whole yet, from the innermost."""
        self._equals: dist.ProcessGroup | None = None
        """The group of some workers in which the last states were collected."""

    def begin(self, world: World) -> None:
        """Make operations in a world, in which all workers are.

        If its group cannot be aborted, the agent never hears that this worker has joined, and a loss ends the run.
        """
        self._world = self._last = self._begun = self._described = world
        self._member.on_ended, self._member.explain_obstacle = self._abort, self._explain_obstacle
        IN_REPLACEMENT.call(self._take_place)
        if isinstance(world.mesh.group, SharedMemoryProcessGroup):
            self._member.report_joined()

    @property
    def world(self) -> World:
        """The world of the workers that are left."""
        assert self._world is not None
        return self._world

    @property
    def world_of_last_operation(self) -> World:
        """See `World.of_last_operation`."""
        assert self._last is not None
        return self._last

    @property
    def owner(self) -> StateOwner:
        """The owner that has the states of jobs."""
        return (self._divided or self.world).owner

    def run(
        self,
        attempt: Callable[[World], Result],
        *,
        commits: Callable[[], bool] = lambda: False,
        is_in_step: bool = False,
    ) -> Result:
        """Return what an operation returns. Within another one it is part of that."""
        if self._is_inside or (self.world.mesh.size == 1 and self._divided is None):
            self._last = self.world
            return attempt(self.world)  # a lone worker has nobody to lose
        if not is_in_step:
            self._counted = self._joint.committed
        while True:
            self._take_over(is_in_step=is_in_step)
            found = self._try(attempt, commits)
            if found:
                self._made += 1
                return found[0]

    def _take_over(self, *, is_in_step: bool) -> None:
        """Take over the states of lost workers; see Note [states of lost workers]. An operation of its own."""
        while self._divided is not None or self._may_ask:
            if not self._levels:
                self._divided = None
                if self._may_ask:
                    self._ask_for_replacements()
                continue
            owner = self._levels[0]

            def collect(world: World, owner: ShardedStateOwner = owner) -> Callable[[], None]:
                group = make_group_of_equals(world.mesh, owner.outer_ranks)
                self._equals = group.group
                with raised_by_all(world.mesh):
                    return owner.collect_states(group, with_gradients=is_in_step)

            collected = self._try(collect, lambda: False)
            if collected:
                collected[0]()
                self._levels.remove(owner)
                self._whole_at = self._passed

    @property
    def _may_ask(self) -> bool:
        return self._asks_left > 0 and self._passed >= self._ask_at

    def _ask_for_replacements(self) -> None:
        """Ask for a round in which lost workers are replaced. States that are divided again are taken over first."""
        is_divided = self.world.numbering.has_copies and self._passed > self._whole_at
        if not is_divided:
            self._asks_left -= 1
        self._regroup(has_states=not is_divided, is_loss=False)

    def _try(self, attempt: Callable[[World], Result], commits: Callable[[], bool]) -> list[Result]:
        """Return what an operation returns; nothing if a worker was lost, and all others begin it again."""
        number = self._passed + 1
        finished: list[Result] = []
        self._is_inside, self._last = True, self.world
        try:
            if self.world.mesh.size > 1:
                self._require_all_workers()
            finished.append(attempt(self.world))
            if self.world.mesh.size > 1:
                dist.barrier(group=self.world.mesh.group)
            self._passed, self._counted = number, max(self._counted, self._joint.committed + commits())
            return finished
        except Exception as error:  # the script's own, or that of any library that lost its group
            if not self.has_lost(error):
                raise
        finally:
            self._is_inside = False
        self._regroup()
        return finished if self._passed == number else []  # a result counts if this worker was in the barrier

    def is_interrupted(self) -> bool:
        """Return whether a worker has been lost, and the others have not formed a group anew."""
        return self._member.has_ended and self.world.mesh.size > 1

    def recover(self) -> None:
        """Form a group without lost workers. Called in the handler of an error, which it raises again in operations."""
        if self._is_inside:
            raise
        self._regroup()

    def _require_all_workers(self) -> None:
        if self._member.has_ended:
            raise CollectiveError(
                expected="all workers in an operation that they make together",
                found="a worker that was killed",
                fix="continue without it",
            )

    def has_lost(self, error: BaseException) -> bool:
        """See `Recovery`."""
        if is_of_another_rank(error, None):
            return self._member.has_ended
        seconds = OTHER_ERROR_SECONDS if isinstance(error, RuntimeError) else 0.0
        if _has_group_failed(error):
            seconds = NOTICE_SECONDS
        deadline = time.monotonic() + seconds
        while not self._member.has_ended:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.002)
        return True

    def _regroup(self, *, has_states: bool = False, is_loss: bool = True) -> None:
        """Form a group of the workers that are left or have been replaced, and agree with them on what counts.

        Args:
            has_states: Whether each worker has all states, also where workers divide them.
            is_loss: Whether a worker was lost. Else all have asked for another round.
        """
        before = self.world
        self._leave_round()
        if is_loss and self._divided is None:
            self._asks_left = 2 if self._replaces else 0
        if before.numbering.has_copies and self._divided is None and not has_states:
            self._divided = before
            self._levels = before.owner.list_levels() if isinstance(before.owner, ShardedStateOwner) else []
        self._member.keeps_state, self._member.progress = self._divided is None, self._made
        world, progress = self._member.join_next_round(self._join)
        self._world, self._passed, self._counted = world, progress.passed, progress.counted
        # Another one may have asked, when it had passed a barrier in which this one was. The next time is a step later.
        has_asked = has_states or progress.asks_left < self._asks_left
        self._ask_at = progress.passed + (has_asked or not before.numbering.has_copies)
        self._asks_left = progress.asks_left if world.numbering.lost else 0
        self._enter(world)
        if world.numbering.axes and not self._asks_left:
            self._describe_mesh(world)
        self._joint.regroup(world.numbering, progress.counted)
        self._member.report_joined()

    def _describe_mesh(self, world: World) -> None:
        """Tell the user what the mesh of the workers is now, if it is another one than the user knows."""
        known, self._described = self._described, world
        assert known is not None
        if [axis.size for axis in world.mesh.axes] != [axis.size for axis in known.mesh.axes]:
            is_dropped = known.settings.plan is not None and world.settings.plan is None
            plan = ", without the plan that was given" if is_dropped else ""
            world.notify(describe_new_mesh(known.mesh, world.mesh) + plan)

    def _explain_obstacle(self) -> str:
        """Return why this process cannot be copied; "" if it can. The processes that read batches are started again."""
        config = environment.read_worker_config()
        if config is None or self._joint.has_participants:
            return "an extension takes part in the run"
        for readers in list(self.readers):
            readers.stop()
        return explain_obstacle(config)

    def _take_place(self, config: WorkerConfig) -> None:
        """Be the worker whose place this process takes, from now on."""
        self._member.take_process(config)
        self._world = replace(self.world, started=replace(self.world.numbering, own=config.rank))
        self._enter(self._world)

    def _join(self, joined: Round) -> tuple[World, _Progress]:
        """Join a round. Return its world, and what counts for all workers."""
        world = self._join_round(joined)
        started = world.numbering
        own = _Progress(started.own, self._passed, max(self._counted, self._joint.committed), self._asks_left)
        gathered = all_gather_bytes(encode_msgpack(own), mesh=world.mesh)
        everyone = [msgspec.msgpack.decode(data, type=_Progress) for data in gathered]
        lost = tuple(sorted(set(range(started.count)) - {each.worker for each in everyone}))
        hosts = tuple(started.hosts[each.worker] for each in everyone) if started.hosts else ()
        numbering = replace(started, lost=lost, round=joined.number, present_hosts=hosts)
        progress = _Progress(
            started.own,
            max(each.passed for each in everyone),
            max(each.counted for each in everyone),
            min(each.asks_left for each in everyone),
        )
        mesh = arrange_kinds(world.mesh, [each.worker for each in everyone], started.kinds)
        if started.axes:
            arranged = make_world_mesh(mesh.device, choose_axes(started.axes, mesh.size))
            mesh = replace(mesh, axes=arranged.axes)
        before, after = find_pipeline_axis(self.world.mesh), find_pipeline_axis(mesh)
        has_same_stages = bool(started.kinds) or (before and before.size) == (after and after.size)
        pipeline = PipelineStages(stages=world.pipeline.stages) if has_same_stages else PipelineStages()
        assert self._begun is not None
        plan = None if lost else self._begun.settings.plan  # it is for all workers
        settings = replace(world.settings, plan=plan)
        return replace(world, started=numbering, mesh=mesh, pipeline=pipeline, settings=settings), progress

    def _abort(self) -> None:
        """End the waits of this process in its groups, whose round has ended. Called from another thread.

        It may be late: groups of the next round may be there already.
        """
        for group in [*list_groups(self.world.mesh), self._equals]:
            if isinstance(group, SharedMemoryProcessGroup):
                group.abort()


@contextmanager
def raised_by_all(mesh: Mesh) -> Iterator[None]:
    """Within the context, all workers of a mesh raise the `LostWorkerError` of one of them. Collective."""
    own = None
    try:
        yield
    except LostWorkerError as error:
        own = error
    texts = all_gather_bytes(b"" if own is None else encode_msgpack(describe_error(own)), mesh=mesh)
    if own is not None:
        raise own
    for rank, text in enumerate(texts):
        if text:
            raise make_same_error(msgspec.msgpack.decode(text, type=RaisedError), rank=rank)


def _has_group_failed(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, is that of a process group in shared memory."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, CollectiveError):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def leave_round_world(before: World) -> None:
    """Leave the process group of a round, unless that has been done."""
    if isinstance(before.mesh.desync_detector, DesyncDetector):
        before.mesh.desync_detector.close()
    if dist.is_initialized():
        find_original_destroy()()


def join_round_world(before: World, joined: Round, backend: Backend) -> tuple[World, Callable[[], None]]:
    """Join the process group of a round, and return a world with it. Collective.

    Args:
        before: The world so far.
        joined: The round.
        backend: The backend of the run's default process group.

    Returns:
        The world, and the function that destroys its group.
    """
    leave_round_world(before)  # a round that could not be joined may have left a group
    device, place = before.mesh.device, joined.assignment
    end = make_world_group(
        backend, device, store=joined.store, rank=place.rank, world_size=place.size, must_be_abortable=True
    )
    mesh = make_world_mesh(device)
    detector = DesyncDetector(mesh, notify=before.notify) if mesh.size > 1 else None
    if detector is not None:
        detector.open()
    return replace(before, mesh=replace(mesh, desync_detector=detector)), end


def choose_axes(axes: Sequence[PlannedAxis], count: int) -> tuple[PlannedAxis, ...]:
    """Return the axes of the mesh of the workers that are left, of whom each has a part of the work.

    The axes other than `data` keep as many workers as they can: their sizes divide those of before, and all together
    the number of workers. The axis `data` has the rest.

    Args:
        axes: The axes with which the run began, from the outermost.
        count: The number of workers.

    Example:
        >>> tensor, data = (PlannedAxis(name=name, role=name, size=2) for name in ("tensor", "data"))
        >>> [(axis.name, axis.size) for axis in choose_axes([data, tensor], 3)]
        [('data', 3), ('tensor', 1)]
    """
    begun = {axis.name: axis.size for axis in axes if axis.role != "data"}
    possible = [[size for size in range(1, most + 1) if most % size == 0] for most in begun.values()]
    fitting = [sizes for sizes in product(*possible) if count % prod(sizes) == 0]
    # Of those with as many workers along other axes, keep the inner axes, whose workers are neighbours.
    best = max(fitting, key=lambda sizes: (prod(sizes), sizes[::-1]))
    sizes = dict(zip(begun, best, strict=True)) | {"data": count // prod(best)}
    return tuple(PlannedAxis(name=name, role=name, size=sizes[name]) for name in AXES if name in sizes)


def describe_new_mesh(before: Mesh, now: Mesh) -> str:
    """Return what has changed for the workers that are left."""
    shares = [prod(axis.size for axis in list_state_axes(mesh) if axis.role != "data") for mesh in (before, now)]
    factor = shares[0] / shares[1]
    more = f"; each worker has up to {factor:g} times as much of the model" if factor > 1 else ""
    meshes = [", ".join(f"{axis.name}={axis.size}" for axis in mesh.axes) for mesh in (now, before)]
    return f"the mesh is {meshes[0]} instead of {meshes[1]}{more}"


def arrange_kinds(mesh: Mesh, members: Sequence[int], kinds: Sequence[Sequence[int]]) -> Mesh:
    """Return the mesh of a round with its workers along one axis `pipeline`, if some are heterogeneous.

    Args:
        mesh: The workers, along one axis `data`.
        members: The number of each, by rank.
        kinds: The numbers of the workers of each kind with which the run began; none if all are alike.
    """
    if not kinds:
        return mesh
    ranks = tuple(tuple(rank for rank, number in enumerate(members) if number in kind) for kind in kinds)
    axis = MeshAxis(
        name="pipeline", role="pipeline", rank=mesh.rank, size=mesh.size, group=mesh.group, stage_workers=ranks
    )
    return replace(mesh, axes=(axis,))
