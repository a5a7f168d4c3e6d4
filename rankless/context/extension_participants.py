"""Events of jobs that all ranks handle together: what extensions hear that share states between ranks.

Note [order of joint events]: unlike a `StepParticipant`, a `JointParticipant` exists on every rank, and may communicate
in each event. For one job the events come in this order.

1. `share`, before each call, for states that are not shared yet. It makes operations of its own; all else lies inside
   the operation of the call.
2. `begin_call`. Then for each program that runs `begin_program`, and `end_program` after it. If a worker is lost, or a
   value that the program depends on has changed, they come again.
3. `count_call`, once the call counts for all ranks. For a train job `end_call`, when parameters have its gradients.
4. `step` around the step of each optimizer, and `end_step` after the last one. With `accumulate=` some calls have no
   step, and the last step of a pass comes without a call.
5. `prepare_next_call`, after the step that a call has made.

A job that runs eagerly has neither `begin_program` nor `end_program`, and no `end_call`. Between calls come `meet`, and
`regroup` after a worker was lost. `finish` comes at the end of a script that did not fail, then `close`.
"""

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch.optim import Optimizer

from rankless.config.extensions import Extension, find_extension, import_declared, list_extensions
from rankless.config.process_configs import WorkerConfig
from rankless.context.step_events import to_all
from rankless.context.upcoming_batches import UpcomingBatches
from rankless.errors import ConfigError
from rankless.ownership.modules_with_states_elsewhere import list_participants
from rankless.ownership.state_owner import StateOwner
from rankless.parallel.mesh import Mesh


class JobParticipant:
    """Takes part in the calls of one job, on every rank. It has the methods of the events that it wants to hear."""

    def share(self) -> None:
        """Share states that are not shared yet. Collective."""

    def begin_call(self) -> None:
        """Hear that a call begins. Collective, and repeatable until `count_call`."""

    def begin_program(self) -> None:
        """Hear that a program of the call is about to run, or is captured."""

    def end_program(self, bound: Any, call: Any) -> None:
        """Hear that a program has run on all ranks. It does not count yet.

        Args:
            bound: The program, a `BoundProgram`.
            call: The call, a `CacheLookup`.
        """

    def count_call(self) -> None:
        """Hear that the call counts for all ranks."""

    def end_call(self) -> None:
        """Hear that the parameters have the gradients of a call."""

    def prepare_next_call(self) -> None:
        """Hear that the step of a call is made."""

    def repeat_call(self, doing: str) -> None:
        """Hear that a program is about to run beside a call. Raises an error if the job's states do not allow that.

        Args:
            doing: What runs it, for the error.
        """


class JointParticipant:
    """Takes part in the jobs of a process, as the same participant of every other rank does."""

    workers: Mesh | None = None
    """All workers, if each makes steps on batches of its own: `World.mesh` is one worker then."""

    def join_job(self, job: Any, world: Any) -> JobParticipant | None:  # noqa: ARG002  # for other participants
        """Return what takes part in a job, a `JobDefinition`, in a `World`; None if nothing does."""
        return None

    def make_view(self, job: Any, world: Any) -> Any:  # noqa: ARG002
        """Return the view that runs a job, if the participant has one; else None."""
        return None

    def make_owner(self) -> StateOwner | None:
        """Return the owner of the states of jobs, if the participant has one. A model alone cannot name such a one."""
        return None

    def find_stages(self, job: Any, program: Any, names: Mapping[str, str], known: Mapping[str, int]) -> Any:  # noqa: ARG002
        """Return the `Stages` of a `LogicalProgram` for workers of several kinds, if the participant has such kinds.

        Args:
            job: The `JobDefinition`.
            program: The program.
            names: For each name of a parameter its first name, which differs if it is tied.
            known: The stages of parameters that have one already.
        """
        return None

    @property
    def own_steps(self) -> str:
        """What makes steps beside optimizers, for errors: an optimizer cannot repeat them. "" for nothing."""
        return ""

    @property
    def committed(self) -> int | None:
        """How many steps this rank has committed; None if a participant does not count them. See `regroup`."""
        return None

    def reads_early(self, world: Any) -> bool:  # noqa: ARG002
        """Return whether loaders of a `World` read a batch early, for `JointEvents.upcoming`."""
        return False

    def step(self, optimizer: Optimizer) -> AbstractContextManager[None]:  # noqa: ARG002
        """Return a context in which an optimizer makes its step."""
        return contextlib.nullcontext()

    def end_step(self) -> None:
        """Hear that a job's optimizers have made a step."""

    def meet(self, operation: str) -> None:
        """Hear that all ranks have come to an operation, such as a save. Collective."""

    def regroup(self, workers: Any, committed: int) -> None:
        """Go on without lost workers.

        Args:
            workers: Those with which the run began, `StartedWorkers`.
            committed: The last step that counts, of all workers that are left.
        """

    def finish(self) -> None:
        """Hear that a script has ended that did not fail. May raise an error of its last step."""

    def close(self) -> None:
        """Hear that the process leaves the run."""


class JobEvents(JobParticipant):
    """Sends each event of a job to all that take part in it, in their order."""

    def __init__(self, participants: Iterable[JobParticipant] = ()) -> None:
        self._participants = tuple(participants)

    share = to_all(JobParticipant.share)
    begin_call = to_all(JobParticipant.begin_call)
    begin_program = to_all(JobParticipant.begin_program)
    end_program = to_all(JobParticipant.end_program)
    count_call = to_all(JobParticipant.count_call)
    end_call = to_all(JobParticipant.end_call)
    prepare_next_call = to_all(JobParticipant.prepare_next_call)
    repeat_call = to_all(JobParticipant.repeat_call)


class JointEvents:
    """The joint participants of a process, in their order: those of its run, then those that its models name."""

    def __init__(self, config: WorkerConfig | None = None, workers: Mesh | None = None) -> None:
        """Make the participants of extensions of which the run has the role, an option or kinds of workers.

        Args:
            config: The configuration of this worker; None for a process without an agent.
            workers: All workers of the run.
        """
        self._config, self._workers = config, workers
        self._by_module: dict[str, JointParticipant] = {}
        self.upcoming = UpcomingBatches()
        """The batches that loaders will yield next, for participants that read early."""
        for extension in () if config is None else _list_extensions(config):
            module = extension.joint_participant
            make = import_declared(extension.name, "joint_participant", module, name="make_joint_participant")
            self._by_module[module] = make(self, config, workers)

    @property
    def _participants(self) -> Collection[JointParticipant]:
        return self._by_module.values()

    @property
    def has_participants(self) -> bool:
        """Whether an extension takes part."""
        return bool(self._by_module)

    @property
    def workers(self) -> Mesh | None:
        """All workers, if each makes steps on batches of its own."""
        return next((each.workers for each in self._participants if each.workers is not None), None)

    def join_job(self, job: Any, world: Any) -> JobEvents:
        """Return what takes part in a job, a `JobDefinition`, in a `World`."""
        self._make_participants(job)
        joined = (each.join_job(job, world) for each in self._participants)
        return JobEvents(each for each in joined if each is not None)

    def _make_participants(self, job: Any) -> None:
        """Make the participants that the models of a job name, unless they are there.

        Raises:
            ConfigError: One of them has an owner. The first use of `World.owner` has decided who owns states.
        """
        for name in list_participants(job.modules.values()):
            if name not in self._by_module:
                make = import_declared(name, "rankless_participant", name, name="make_joint_participant")
                made: JointParticipant = make(self, self._config, self._workers)
                if made.make_owner() is not None:
                    raise ConfigError(
                        expected="a participant that owns states to take part from the start of the run",
                        found=f"{name}, which only a model names",
                        fix="name it as joint_participant in extension.toml, and give the run an option or a role of "
                        "the extension",
                    )
                self._by_module[name] = made

    def make_view(self, job: Any, world: Any) -> Any:
        """Return the view that runs a job, if a participant has one; else None."""
        self._make_participants(job)
        views = (each.make_view(job, world) for each in self._participants)
        return next((view for view in views if view is not None), None)

    def make_owner(self) -> StateOwner | None:
        """Return the owner of the states of jobs, if a participant has one."""
        owners = (each.make_owner() for each in self._participants)
        return next((owner for owner in owners if owner is not None), None)

    def find_stages(self, job: Any, program: Any, names: Mapping[str, str], known: Mapping[str, int]) -> Any:
        """Return the `Stages` of a program for workers of several kinds, if a participant has such kinds; else None."""
        found = (each.find_stages(job, program, names, known) for each in self._participants)
        return next((stages for stages in found if stages is not None), None)

    @property
    def own_steps(self) -> str:
        """What makes steps beside optimizers, for errors; "" for nothing."""
        return next((each.own_steps for each in self._participants if each.own_steps), "")

    @property
    def counts_steps(self) -> bool:
        """Whether a participant counts the steps that this rank commits."""
        return any(each.committed is not None for each in self._participants)

    @property
    def committed(self) -> int:
        """How many steps this rank has committed, as participants count them."""
        return max((each.committed or 0 for each in self._participants), default=0)

    def reads_early(self, world: Any) -> bool:
        """Return whether loaders of a `World` read a batch early."""
        return any(each.reads_early(world) for each in self._participants)

    def step(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Return a context in which an optimizer makes its step."""
        return self._step(optimizer) if self._participants else contextlib.nullcontext()

    @contextlib.contextmanager
    def _step(self, optimizer: Optimizer) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for each in self._participants:
                stack.enter_context(each.step(optimizer))
            yield

    end_step = to_all(JointParticipant.end_step)
    meet = to_all(JointParticipant.meet)
    regroup = to_all(JointParticipant.regroup)
    finish = to_all(JointParticipant.finish)

    def close(self) -> None:
        """Send this event to all, also if one raises an error. No participant takes part in anything after it."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._by_module.clear)
            for each in reversed(list(self._participants)):
                stack.callback(each.close)


def _list_extensions(config: WorkerConfig) -> list[Extension]:
    """Return the extensions whose participants a run has, whatever its models are."""
    found = {name: find_extension(name) for name in (*config.options, *config.roles)}
    if any(axis.stage_workers for axis in config.mesh):
        found |= {extension.name: extension for extension in list_extensions() if extension.worker_kinds}
    return [extension for extension in found.values() if extension is not None and extension.joint_participant]
