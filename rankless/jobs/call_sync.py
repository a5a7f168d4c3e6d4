"""Checks, before each call of a job, that all ranks make it with the same values, and keeps their models equal."""

from collections.abc import Sequence
from operator import is_

from torch import Tensor

from rankless.context.optimizer_fingerprint import OptimizerComparison
from rankless.context.world import World
from rankless.jobs.arguments import FlattenedArguments
from rankless.jobs.call_fingerprint import RandomStates, fingerprint_tensors, name_tensors
from rankless.jobs.definition import JobDefinition
from rankless.jobs.model_sync import check_models_equal, sync_models

CHANGED = ", its models changed outside jobs since"
READ = "Python values that the job reads"


class CallSync:
    """Compares the calls of one job with those of the other ranks."""

    def __init__(self, job: JobDefinition, world: World) -> None:
        self._job = job
        self._world = world
        self._optimizers = OptimizerComparison(
            job.optimizers, world.script.optimizer_changes, name_parameter=job.parameter_name
        )
        self.calls = 0
        self._change_count = 0
        self._states: Sequence[Tensor] = ()
        self._is_recorded = False

    def check(
        self,
        description: str,
        *,
        arguments: FlattenedArguments | None = None,
        program: int | None = None,
        random_states: RandomStates | None = None,
        remark: str = "",
    ) -> None:
        """Check that all ranks make this call, with the same values and models.

        At the first call, and after changes outside jobs, models that differ are synchronized from rank 0.

        Args:
            description: The call in words, equal on all ranks.
            arguments: The call's arguments, if every rank has the whole call's.
            program: The number of the job's program for this call. If a Python value that the job reads differs, one
                rank has no program and would capture alone.
            random_states: The generators that the job draws from, if it draws.
            remark: What an error about a difference says of this rank.

        Raises:
            RanksDiverged: Another rank makes another call, or has other values.
        """
        self.calls += 1
        job, mesh = self._job, self._world.mesh
        is_first = self.calls == 1
        changed = not is_first and self._world.script.model_changes.have_changed(self._states)
        self._is_recorded = not is_first and not changed
        if mesh.desync_detector is not None:
            programs = [] if program is None else [program]
            optimizers = self._optimizers.fingerprint()
            drawn = {} if random_states is None else random_states.fingerprint()
            tensors = () if arguments is None else arguments.tensors
            mesh.check_sync_point(
                description + (CHANGED if changed else ""),
                names=lambda: [
                    *[READ for _ in programs],
                    *optimizers.names(),
                    *drawn,
                    *([] if arguments is None else name_tensors(job.function, arguments)),
                ],
                digests=[*programs, *optimizers.digests, *drawn.values(), *fingerprint_tensors(tensors)],
                remark=remark,
                details=optimizers.details,
                describe=optimizers.describe,
            )
        self._synchronize_models(is_first=is_first, changed=changed)

    def _synchronize_models(self, *, is_first: bool, changed: bool) -> None:
        """Compare the models of all ranks if they may differ, and synchronize those that do."""
        job = self._job
        self._change_count += changed
        if is_first:
            sync_models(job, self._world, when="at the first call")
        elif changed and is_power_of_two(self._change_count):
            # Sync only at power-of-two changes: a script that changes its models after every step must not stay slow.
            sync_models(job, self._world, when=f"at call {self.calls}, changed outside jobs")
        if job.check_synchronized_every is not None and self.calls % job.check_synchronized_every == 0:
            check_models_equal(job, self._world, call=self.calls)

    def record_states(self, states: Sequence[Tensor], changed: Sequence[Tensor]) -> None:
        """Remember the tensors of models that the job uses, as it leaves them. The next check finds changes.

        Args:
            states: All of them.
            changed: Those that this call has changed.
        """
        is_same = len(states) == len(self._states) and all(map(is_, states, self._states))
        # Versions that were recorded before, and found unchanged at the begin of this call, need not be recorded again.
        self._world.script.model_changes.record_versions(changed if is_same and self._is_recorded else states)
        self._states = states


def is_power_of_two(number: int) -> bool:
    """Whether a positive number is 1, 2, 4, 8, …"""
    return number & (number - 1) == 0
