"""An executable: a compiled program with the sources of its inputs and the targets of its outputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from rankless.compiler.capture.capture import CapturedJob
from rankless.compiler.codegen.codegen import LocalProgram
from rankless.compiler.ir.logical_program import ProgramInput
from rankless.compiler.tracing.recomputed_weights import RecomputedWeight, find_recomputed_weights
from rankless.jobs.arguments import FlattenedArguments, get_local_piece
from rankless.jobs.definition import JobDefinition
from rankless.jobs.varying_sizes import SizeConstraints
from rankless.parallel.mesh import Mesh
from rankless.parallel.tensor_placement import Placement


@dataclass(frozen=True)
class ModuleTensorReference:
    """The name of a parameter or buffer in its module. Each run reads the tensor that has this name then."""

    table: Mapping[str, Tensor | None]
    key: str

    def tensor(self) -> Tensor:
        """Return the current tensor."""
        tensor = self.table[self.key]
        assert tensor is not None, f"{self.key} was captured and no longer exists"
        return tensor


@dataclass(frozen=True, kw_only=True)
class Executable:
    """A compiled program, what it was captured from, and where its inputs and outputs belong."""

    local: LocalProgram
    captured: CapturedJob
    number: int
    """Its number among the job's programs, in the order of capture: the same on every rank."""
    slots: tuple[ModuleTensorReference | Tensor | int, ...]
    """The source of each input: a module's slot, a constant, or the number of a tensor argument."""
    targets: tuple[ModuleTensorReference | None, ...]
    """The target of each output: the parameter of a gradient, what gets a new value, or None for a result."""
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
    executable: Executable, arguments: FlattenedArguments, placements: Sequence[Placement], mesh: Mesh
) -> list[Tensor]:
    """Return this rank's values of a program's inputs, without autograd history."""
    values = []
    for slot in executable.slots:
        if isinstance(slot, int):
            values.append(get_local_piece(arguments.tensors[slot], placements[slot], mesh))
        else:
            values.append(slot if isinstance(slot, Tensor) else slot.tensor())
    return [value.detach() for value in values]


def make_executable(
    job: JobDefinition,
    captured: CapturedJob,
    local: LocalProgram,
    *,
    number: int,
    varying_sizes: SizeConstraints | None = None,
) -> Executable:
    """Return an executable of a job's compiled program."""
    return Executable(
        local=local,
        captured=captured,
        number=number,
        slots=tuple(find_input(job, described) for described in local.inputs),
        targets=tuple(
            None if described.kind in ("result", "check") else find_slot(job, described.name)
            for described in local.outputs
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
