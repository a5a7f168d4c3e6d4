"""A program ready to run: where its inputs come from, where its outputs go."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from rankless.compiler.capture.capture import CapturedJob
from rankless.compiler.codegen.codegen import LocalProgram
from rankless.compiler.ir.logical_program import ProgramInput
from rankless.jobs.arguments import Arguments
from rankless.jobs.definition import JobDefinition
from rankless.jobs.varying_sizes import VaryingSizes


@dataclass(frozen=True)
class Slot:
    """A parameter's or buffer's place in its module, so that whatever stands there is used."""

    table: Mapping[str, Tensor | None]
    key: str

    def tensor(self) -> Tensor:
        """What stands there now."""
        tensor = self.table[self.key]
        assert tensor is not None, f"{self.key} was captured and is gone"
        return tensor


@dataclass(frozen=True, kw_only=True)
class Executable:
    """A program ready to run, what it was captured from, and how its result is put together."""

    local: LocalProgram
    captured: CapturedJob
    number: int
    """Its place among the job's programs, in the order of their captures: the same on every rank."""
    slots: tuple[Slot | Tensor | int, ...]
    """Where each input comes from: a module's entry, a constant, or the number of a tensor argument."""
    targets: tuple[Slot | None, ...]
    """Where each output goes: a parameter (its gradient), a buffer, or None for a result."""
    parameters: tuple[nn.Parameter, ...]
    varying_sizes: VaryingSizes | None
    """What other sizes of arguments it is right for; None if only for those it was captured with."""

    @property
    def is_valid(self) -> bool:
        """Whether every Python value that it has taken in is what it was."""
        return self.captured.guards.all_hold()

    def sizes(self, arguments: Arguments) -> dict[str, int]:
        """The varying sizes in this call, by name."""
        if self.varying_sizes is None:
            return {}
        return self.varying_sizes.sizes([tensor.shape for tensor in arguments.tensors])


def make_executable(
    job: JobDefinition,
    captured: CapturedJob,
    local: LocalProgram,
    *,
    number: int,
    varying_sizes: VaryingSizes | None = None,
) -> Executable:
    """A job's program with its inputs and outputs found."""
    return Executable(
        local=local,
        captured=captured,
        number=number,
        slots=tuple(input_slot(job, described) for described in local.inputs),
        targets=tuple(
            None if described.kind == "result" else find_slot(job, described.name, described.kind == "gradient")
            for described in local.outputs
        ),
        parameters=tuple(job.parameters()) if job.trains else (),
        varying_sizes=varying_sizes,
    )


def input_slot(job: JobDefinition, described: ProgramInput) -> Slot | Tensor | int:
    """Where an input's value is found at each call."""
    if described.kind == "argument":
        return described.index
    if described.constant is not None:
        return described.constant
    return find_slot(job, described.name, described.kind == "parameter")


def find_slot(job: JobDefinition, full_name: str, is_parameter: bool) -> Slot:
    """The entry of a module's table that a name like "model.layer.weight" stands for."""
    name, _, path = full_name.partition(".")
    owner, _, key = path.rpartition(".")
    module = job.modules[name].get_submodule(owner)
    return Slot(module._parameters if is_parameter else module._buffers, key)
