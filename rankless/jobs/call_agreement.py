"""Checks, before each call of a job, that all ranks make it with the same values, and keeps their models equal.

Note [cheap fingerprints]: a tensor's fingerprint samples 256 evenly spaced ranges of 64 bytes, or all of a smaller
tensor. Ranks that read different batches differ everywhere, so the sample shows it. A difference in single elements is
left to `check_synchronized_every`, which compares models. The fingerprint of a loader's batch comes from the indices of
all its samples, which every rank knows. Tensors on a GPU are not read, because that would synchronize with the GPU.
"""

import pickle
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import numpy
import torch
from torch import Tensor

from rankless.collectives.value_encoding import view_bytes
from rankless.compiler.tracing.value_snapshots import PLAIN_TYPES
from rankless.context.optimizer_fingerprint import OptimizerComparison
from rankless.context.world import World
from rankless.data.logical_tensor import LogicalTensor
from rankless.jobs.arguments import TENSOR, FlattenedArguments, find_leaf_paths
from rankless.jobs.job_definition import JobDefinition
from rankless.jobs.model_sync_between_ranks import check_models_equal, sync_models

PIECES = 256
PIECE_BYTES = 64
GENERATOR = "state of torch's random generator"


def format_call(job: str, call: int, arguments: FlattenedArguments) -> str:
    """Describe a call: the job, its number, the shapes of tensors, plain values."""
    tensors = iter(arguments.tensors)
    leaves = [format_tensor(next(tensors)) if leaf is TENSOR else format_plain(leaf) for leaf in arguments.plain]
    return f"call {call} of job {job!r} with {', '.join(leaves) or 'no arguments'}"


def format_tensor(tensor: Tensor) -> str:
    """Return a tensor's dtype and logical shape, as "float32[8, 3]"."""
    return f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"


def format_plain(value: Any) -> str:
    """Return the `repr` of a simple value, and only the type of any other, whose text could hold an address."""
    return repr(value) if isinstance(value, PLAIN_TYPES) else type(value).__qualname__


def name_tensors(function: Callable[..., Any], arguments: FlattenedArguments) -> list[str]:
    """Return the function's names of its tensor arguments: "images", "batch['ids']"."""
    paths = find_leaf_paths(function, arguments)
    return [name + rest for (name, rest), leaf in zip(paths, arguments.plain, strict=True) if leaf is TENSOR]


def fingerprint_tensor(tensor: Tensor) -> int:
    """Return a fingerprint of a tensor's values, equal on all ranks with the same; see Note [cheap fingerprints]."""
    if isinstance(tensor, LogicalTensor):
        return tensor.fingerprint
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.numel() == 0:
        return 0
    plain = tensor.detach()
    while not plain.is_contiguous() and plain.dim() > 1:
        plain = plain[plain.shape[0] // 2]
    data = view_bytes(plain).numpy()
    if data.nbytes <= PIECES * PIECE_BYTES:
        return zlib.crc32(data.data)
    stride = data.nbytes // PIECES
    return zlib.crc32(data[: stride * PIECES].reshape(PIECES, stride)[:, :PIECE_BYTES].tobytes())


class RandomStates:
    """The random generators that a job may draw from.

    Args:
        generators: Generators of the script, besides PyTorch's own.
        with_python: Include the generators of Python's `random` and of NumPy.
    """

    def __init__(self, generators: Sequence[torch.Generator] = (), *, with_python: bool = False) -> None:
        self._generators = generators
        self._with_python = with_python

    def fingerprint(self) -> dict[str, int]:
        """Return a fingerprint of each generator's state, by name."""
        found = {GENERATOR: zlib.crc32(torch.default_generator.get_state().numpy().data)}
        for number, generator in enumerate(self._generators):
            found[f"state of generator {number} of the script"] = zlib.crc32(generator.get_state().numpy().data)
        if self._with_python:
            found["state of Python's random module"] = hash(random.getstate()[1]) % 2**64
            state = numpy.random.get_state(legacy=False)
            found["state of NumPy's random generator"] = zlib.crc32(pickle.dumps(state))
        return found


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
        self.calls = self._change_count = 0
        self._states: Sequence[Tensor] = ()
        self._is_recorded = False

    def take_over(self, before: "CallSync") -> None:
        """Continue the comparison of more workers: those that are left had the same models, and have them still."""
        self.calls, self._change_count, self._states = before.calls, before._change_count, before._states

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Within the context a call is counted, unless it raises: another rank may have raised before it counted."""
        counts = self.calls, self._change_count, self._optimizers.change_counts
        try:
            yield
        except Exception:
            self.calls, self._change_count, self._optimizers.change_counts = counts
            raise

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
                digests=[*programs, *optimizers.digests, *drawn.values(), *map(fingerprint_tensor, tensors)],
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
        elif changed and self._change_count.bit_count() == 1:
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
