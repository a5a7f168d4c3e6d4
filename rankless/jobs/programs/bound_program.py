"""A bound program: a compiled program with the sources of its inputs and the targets of its outputs.

`find_storage` tells the compiler before how the owner of the states stores them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import getitem, is_
from typing import Any, cast

import torch
from torch import Tensor, nn

from rankless.compiler.capture.capture import CapturedJob
from rankless.compiler.ir.logical_program import LogicalProgram, ProgramInput, ProgramOutput
from rankless.compiler.ir.looked_up_parameter import take_input
from rankless.compiler.local_program import LocalProgram
from rankless.compiler.scheduling.gradient_buckets_and_state_storage import GradientMemory, StateStorage
from rankless.compiler.tracing.recomputed_weights import RecomputedWeight, find_recomputed_weights
from rankless.context.world import World
from rankless.data.tensors_on_cpu_ranks import ReaderTensor, find_kinds_axis, share_values
from rankless.jobs.arguments import FlattenedArguments, get_local_shard
from rankless.jobs.job_definition import JobDefinition
from rankless.jobs.programs.varying_sizes import SizeConstraints
from rankless.ownership.state_owner import StateOwner
from rankless.parallel.mesh import Mesh, MeshAxis, find_axis, list_layer_axes
from rankless.parallel.tensor_placement import BlockedShard, Replicate, Shard, Sharding, read_stored


@dataclass(frozen=True)
class ModuleTensorReference:
    """The name of a parameter or buffer in its module. Each run reads the tensor that has this name then."""

    table: Mapping[str, Tensor | None]
    key: str


class ModuleTensorReferences:
    """Parameters and buffers by their names. All are read at once, because a model may have thousands."""

    def __init__(self, references: Iterable[ModuleTensorReference] = ()) -> None:
        given = list(references)
        self._tables = [reference.table for reference in given]
        self._keys = [reference.key for reference in given]

    def read(self) -> list[Tensor]:
        """Return the current tensors."""
        tensors = list(map(getitem, self._tables, self._keys))
        assert not any(map(is_, tensors, repeat(None))), "a tensor was captured and no longer exists"
        return cast("list[Tensor]", tensors)


class InputSources:
    """Where the inputs of a program come from, in its order."""

    def __init__(self, slots: Sequence[ModuleTensorReference | Tensor | int], owner: StateOwner) -> None:
        self._owner = owner
        self.states = ModuleTensorReferences(slot for slot in slots if isinstance(slot, ModuleTensorReference))
        """Those that are parameters and buffers."""
        self.arguments = [slot for slot in slots if isinstance(slot, int)]
        """The numbers of the tensor arguments."""
        self._constants = [slot for slot in slots if isinstance(slot, Tensor)]
        kinds = (ModuleTensorReference, int, Tensor)  # the order in which `collect` concatenates
        grouped = [place for kind in kinds for place, slot in enumerate(slots) if isinstance(slot, kind)]
        self._order = sorted(range(len(slots)), key=grouped.__getitem__)
        states = enumerate(self.states.read())
        self._divided = [place for place, state in states if owner.find_value_placements(state)]

    def collect(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        """Return the inputs without autograd history.

        Args:
            arguments: The tensors for `self.arguments`.
        """
        states = self.states.read()
        if self._divided:
            divided = self._owner.get_inputs([states[place] for place in self._divided])
            for place, value in zip(self._divided, divided, strict=True):
                states[place] = value
        values = [*states, *arguments, *self._constants]
        return [take_input(values[place]) for place in self._order]


class OutputTargets:
    """What becomes of the outputs of a program."""

    def __init__(
        self, outputs: Sequence[tuple[ProgramOutput, ModuleTensorReference | None]], owner: StateOwner
    ) -> None:
        self._owner = owner
        places = {
            kind: [place for place, (described, _) in enumerate(outputs) if described.kind == kind]
            for kind in ("result", "gradient")
        }
        self._results, self._gradients = places["result"], places["gradient"]
        self._parameters = ModuleTensorReferences(
            target for described, target in outputs if described.kind == "gradient" and target is not None
        )
        self._updates = [
            (place, ModuleTensorReferences([target]), described.renews_memory)
            for place, (described, target) in enumerate(outputs)
            if described.kind != "gradient" and target is not None
        ]

    def list_gradients(self, outputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parameters that get gradients, and the gradients."""
        return self._parameters.read(), [outputs[place] for place in self._gradients]

    def apply(self, outputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Set gradients of parameters, and new values of tensors.

        Returns:
            The job's results, and the tensors that have new values.
        """
        self._owner.take_gradients(*self.list_gradients(outputs))
        changed = []
        for place, target, renews_memory in self._updates:
            (tensor,) = target.read()
            changed.append(tensor)
            if renews_memory and not self._owner.find_value_placements(tensor):
                tensor.data = outputs[place].clone()
            else:
                self._owner.set_value(tensor, outputs[place])
        return [outputs[place] for place in self._results], changed


@dataclass(frozen=True, kw_only=True)
class BoundProgram:
    """A compiled program, what it was captured from, and where its inputs and outputs belong."""

    local: LocalProgram
    captured: CapturedJob
    number: int
    """Its number among the job's programs, in the order of capture: the same on every rank."""
    sources: InputSources
    targets: OutputTargets
    parameters: tuple[nn.Parameter, ...]
    recomputed_weights: tuple[RecomputedWeight, ...]
    """See Note [recomputed weights]."""
    varying_sizes: SizeConstraints | None
    """For which other sizes of arguments it is valid; None if only for those it was captured with."""

    @property
    def is_valid(self) -> bool:
        """Whether every Python value that the capture read is unchanged."""
        return self.captured.guards.all_hold()

    @property
    def read_values(self) -> tuple[Any, ...]:
        """What the job's Python read of tensors when it was captured."""
        return tuple(read.value for read in self.captured.reads)

    def sizes(self, arguments: FlattenedArguments) -> dict[str, int]:
        """Return the varying sizes of this call by symbol."""
        if self.varying_sizes is None:
            return {}
        return self.varying_sizes.sizes([tensor.shape for tensor in arguments.tensors])


def collect_inputs(
    bound: BoundProgram, arguments: FlattenedArguments, shardings: Sequence[Sharding], mesh: Mesh
) -> list[Tensor]:
    """Return this rank's values of a program's inputs, without autograd history."""
    sources, tensors = bound.sources, share_arguments(bound.local, arguments.tensors, mesh)
    return sources.collect([get_local_shard(tensors[number], shardings[number], mesh) for number in sources.arguments])


def share_arguments(local: LocalProgram, tensors: Sequence[Tensor], mesh: Mesh) -> Sequence[Tensor]:
    """Give heterogeneous workers the arguments of a loader that their part of a program takes. Collective.

    Args:
        local: The program.
        tensors: The arguments of the call.
        mesh: The workers.

    Returns:
        The arguments; on heterogeneous workers those that the program does not take there have no values.
    """
    axis = find_kinds_axis(mesh)
    read = {number: each for number, each in enumerate(tensors) if isinstance(each, ReaderTensor)}
    unknown = {number: each for number, each in read.items() if not each.is_everywhere}
    if axis is None or not unknown:
        return tensors
    takers = [local.takers.get(number, ()) for number in unknown]
    found = list(tensors)
    for number, value in zip(unknown, share_values(list(unknown.values()), takers, axis), strict=True):
        given = tensors[number]
        if value is None:
            value = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="meta")
        found[number] = value
    return found


def bind_program(
    job: JobDefinition,
    captured: CapturedJob,
    local: LocalProgram,
    *,
    number: int,
    owner: StateOwner,
    varying_sizes: SizeConstraints | None = None,
) -> BoundProgram:
    """Return a bound program of a job's compiled program."""
    return BoundProgram(
        local=local,
        captured=captured,
        number=number,
        sources=InputSources([find_input(job, described) for described in local.inputs], owner),
        targets=OutputTargets(
            [
                (described, None if described.kind in ("result", "check") else find_slot(job, described.name))
                for described in local.outputs
            ],
            owner,
        ),
        parameters=tuple(job.parameters()) if job.trains else (),
        recomputed_weights=tuple(
            find_recomputed_weights(item for module in job.modules.values() for item in module.modules())
        ),
        varying_sizes=varying_sizes,
    )


def find_input(job: JobDefinition, described: ProgramInput) -> ModuleTensorReference | Tensor | int:
    """Return where each call finds an input's value."""
    if described.kind == "argument":
        return described.index
    if described.constant is not None:
        return described.constant
    return find_slot(job, described.name)


def find_slot(job: JobDefinition, full_name: str) -> ModuleTensorReference:
    """Return the slot of a name such as "model.layer.weight"."""
    name, _, path = full_name.partition(".")
    owner, _, key = path.rpartition(".")
    module = job.modules[name].get_submodule(owner)
    return ModuleTensorReference(module._parameters if key in module._parameters else module._buffers, key)


Placements = Mapping[str, Shard | BlockedShard]
"""How a state is divided, by axis."""


def find_storage(job: JobDefinition, program: LogicalProgram, world: World, memory: GradientMemory) -> StateStorage:
    """Return how the states of a program are stored.

    Args:
        job: The job.
        program: A program of it.
        world: Has the owner of the states.
        memory: The memory of the job's gradients.
    """
    owner, mesh = world.owner, world.mesh
    values: dict[str, Placements] = {}
    shared: dict[str, int] = {}
    gradients: dict[str, Placements] = {}
    for described in program.inputs.values():
        if described.kind in ("parameter", "buffer") and described.constant is None:
            tensor = read_slot(job, described.name)
            values[described.name] = owner.find_value_placements(tensor)
            number = owner.find_shared_memory(tensor)
            if number is not None:
                shared[described.name] = number
    for _, output in program.outputs:
        if output.kind == "gradient":
            gradients[output.name] = owner.find_gradient_placements(read_slot(job, output.name))
    data, pipeline = find_axis(mesh, "data"), find_axis(mesh, "pipeline")
    # A tied parameter may be an input under one name and have its gradient under another.
    both = values | gradients
    return StateStorage(
        axis=data,
        values=select_shards(values, data),
        shared=shared,
        gradients=select_shards(gradients, data),
        shardings=make_shardings(both, mesh),
        ranks=tuple(axis.rank for axis in mesh.axes),
        owned=select_shards(both, pipeline),
        copies={name: owner.find_copies(read_slot(job, name)) for name in select_shards(both, pipeline)},
        memory=memory,
    )


def select_shards(placements: Mapping[str, Placements], axis: MeshAxis | None) -> dict[str, Shard]:
    """Return how an axis divides states, by name."""
    found = {name: None if axis is None else known.get(axis.name) for name, known in placements.items()}
    return {name: placement for name, placement in found.items() if isinstance(placement, Shard)}


def make_shardings(placements: Mapping[str, Placements], mesh: Mesh) -> dict[str, Sharding]:
    """Return the shardings of the states that programs take in shards, by name."""
    names = {axis.name for axis in list_layer_axes(mesh)}
    return {
        name: tuple(
            read_stored(known[axis.name]) if axis.name in names & set(known) else Replicate() for axis in mesh.axes
        )
        for name, known in placements.items()
        if names & set(known)
    }


def read_slot(job: JobDefinition, name: str) -> Tensor:
    """Return the parameter or buffer with a name such as "model.layer.weight"."""
    slot = find_slot(job, name)
    tensor = slot.table[slot.key]
    assert tensor is not None, f"{name} no longer exists"
    return tensor
