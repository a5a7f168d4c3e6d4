"""The view of `capture=False`: every rank runs the job eagerly on the whole batch, as one device would.

Note [equal on every rank]: ranks that start with the same models, arguments and random states compute the same. Kernels
that add in no fixed order, clocks and files can break that. After each call the ranks therefore compare all that the
call computed: results, loss, gradients, and the parameters and buffers that it changed. If anything differs, every rank
takes rank 0's, and the script is warned once.

A later view may split such a job. It can take the place of this one in `jobs.views.view_choice_and_recovery.make_view`.
"""

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy
import torch
from torch import Tensor

from rankless.collectives.byte_messages import all_gather_bytes, broadcast_bytes
from rankless.collectives.value_encoding import decode_value, encode_value, view_bytes
from rankless.compiler.capture.result_structure import flatten_result
from rankless.compiler.capture.trace_to_program import named_tensors
from rankless.compiler.tracing.value_snapshots import PLAIN_TYPES
from rankless.context.world import World
from rankless.data.logical_tensor import LogicalTensor
from rankless.errors import RanksDiverged
from rankless.jobs.arguments import FlattenedArguments
from rankless.jobs.call_agreement import CallSync, RandomStates, format_call
from rankless.jobs.job_definition import CallResult, JobDefinition
from rankless.jobs.model_sync_between_ranks import require_usable_models
from rankless.jobs.views.one_device import PlainView
from rankless.records.encoding import encode_msgpack

SENT_TYPES = (bool, int, float, str, numpy.generic)
"""Types of plain results that rank 0 sends, if ranks computed other values."""


class UncapturedView:
    """Runs one job on every rank of a mesh, each time with the whole batch."""

    def __init__(self, job: JobDefinition, world: World) -> None:
        self._job = job
        self._world = world
        self._sync = CallSync(job, world)
        self._plain = PlainView(job, world)
        self._random_states = RandomStates(with_python=True)
        self._has_warned = False
        require_usable_models(job, world)

    def run(self, arguments: FlattenedArguments) -> CallResult:
        """Return the job's result, the same on every rank. A train job also sets its parameters' gradients.

        Raises:
            RanksDiverged: Ranks make other calls, have other values, or return results of other structures.
        """
        if self._sync.calls == 0:
            self._world.notify(
                f"{self._job.line}: job {self._job.name!r} with capture=False runs on the whole batch on every rank "
                "(correct, but not faster with more workers)"
            )
        self._sync.check(
            format_call(self._job.name, self._sync.calls + 1, arguments),
            arguments=arguments,
            random_states=self._random_states,
        )
        owner = self._world.owner
        owner.begin_call()
        states = self._list_states()
        versions = list_versions(states)
        whole = [item.whole() if isinstance(item, LogicalTensor) else item for item in arguments.tensors]
        outcome = self._plain.run(replace(arguments, tensors=tuple(whole)))
        self._world.mesh.check_sync_point_again()
        owner.begin_call()  # the job may have changed parameters of which this worker has a shard
        pairs = zip(list_versions(states), versions, strict=True)
        outcome = self._make_equal(outcome, states, [after != before for after, before in pairs])
        self._sync.record_states(states, states)
        return outcome

    def _make_equal(self, outcome: CallResult, states: Sequence[Tensor], changed: Sequence[bool]) -> CallResult:
        """Return rank 0's outcome if ranks computed other values; see Note [equal on every rank].

        Of the parameters and buffers in `states`, only those that the call has changed are compared.
        """
        mesh = self._world.mesh
        leaves, spec = flatten_result(outcome.result)
        gradients = [parameter.grad for parameter in outcome.parameters]
        values = [*leaves, outcome.loss, *gradients]
        kinds = [*map(describe_kind, values), str(spec)]
        digests = [*map(digest, values)]
        digests += [digest(tensor) if is_new else 0 for tensor, is_new in zip(states, changed, strict=True)]
        own = encode_msgpack((kinds, digests))
        everyone = all_gather_bytes(own, mesh=mesh)
        if len(set(everyone)) == 1:
            return outcome
        self._require_same_structure(everyone)
        self._warn(everyone)
        values += states
        sent = encode_value([value if is_sent(value) else None for value in values]) if mesh.rank == 0 else b""
        first = decode_value(broadcast_bytes(sent, mesh=mesh))
        return self._take(outcome, values, first)

    def _take(self, outcome: CallResult, values: Sequence[Any], first: Sequence[Any]) -> CallResult:
        """Put rank 0's values in the place of this rank's."""
        leaves, spec = flatten_result(outcome.result)
        results: list[Any] = []
        for index, (own, value) in enumerate(zip(values, first, strict=True)):
            if isinstance(own, Tensor) and is_sent(own):
                with torch.no_grad():
                    own.copy_(value)
            if index < len(leaves):
                results.append(value if is_sent(own) and not isinstance(own, Tensor) else own)
        return replace(outcome, result=spec.build(results))

    def _require_same_structure(self, everyone: Sequence[bytes]) -> None:
        """Raise `RanksDiverged` if results or gradients of ranks are of other kinds or shapes."""
        kinds = [msgspec.msgpack.decode(data, type=tuple[list[str], list[int]])[0] for data in everyone]
        other = next((rank for rank, item in enumerate(kinds) if item != kinds[0]), None)
        if other is not None:
            pairs = zip([*kinds[0], "nothing"], [*kinds[other], "nothing"], strict=False)
            first, found = next((one, two) for one, two in pairs if one != two)
            raise RanksDiverged(
                expected=f"results and gradients of the same kinds on every rank from job {self._job.name!r}",
                found=f"{first} on rank 0, {found} on rank {other}",
                fix="make the job depend only on its arguments, its models, and random numbers; not on the rank, the "
                "time or files",
                where=self._job.line,
            )

    def _warn(self, everyone: Sequence[bytes]) -> None:
        """Warn once that ranks computed other values."""
        if self._has_warned:
            return
        self._has_warned = True
        others = [str(rank) for rank, data in enumerate(everyone) if data != everyone[0]]
        self._world.notify(
            f"{self._job.line}: job {self._job.name!r} computed other values on rank {', '.join(others)} than on rank "
            "0, because its kernels add in no fixed order or because it depends on the rank, the time or files; all "
            "ranks take rank 0's"
        )

    def _list_states(self) -> list[Tensor]:
        return [tensor for _, tensor in sorted(named_tensors(self._job.modules).items())]


def digest(value: Any) -> int:
    """Return a digest of a tensor's bytes or of a plain value; 0 for another object, which is not compared."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            return 0
        return zlib.crc32(view_bytes(value.cpu()).numpy().data)
    return zlib.crc32(repr(value).encode()) if isinstance(value, PLAIN_TYPES) else 0


def describe_kind(value: Any) -> str:
    """Describe what must be the same on all ranks for values to be taken from rank 0."""
    if isinstance(value, Tensor):
        return f"a tensor {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"a value of type {type(value).__name__}"


def is_sent(value: Any) -> bool:
    """Whether rank 0 can send a value."""
    return value.layout is torch.strided if isinstance(value, Tensor) else isinstance(value, SENT_TYPES)


def list_versions(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return what changes with each change of a tensor: its version, and the address of its memory."""
    return [(tensor._version, tensor.data_ptr()) for tensor in tensors]
