"""A job's programs: captured once per kind of call, compared between ranks, placed and lowered, and kept."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from rankless.program.agreement import require_same_program
from rankless.program.capture import Captured, JobSource, capture
from rankless.program.guards import Guard
from rankless.program.logical_program import ProgramInput
from rankless.program.modes import modes
from rankless.program.plain_values import kinds_of_plain
from rankless.program.run import LocalProgram, built
from rankless.views.arguments import Arguments, placement_of, shapes_of
from rankless.views.definition import JobDefinition
from rankless.views.world import World

KEPT = 16
"""Programs kept per kind of call, the latest used: a value that changes at every step must not fill the memory."""

TOLD_AT = 4
"""After so many captures because of one value the script is told."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A program ready to run, what it was captured from, and how its result is put together."""

    local: LocalProgram
    captured: Captured
    slots: tuple["Slot | Tensor | int", ...]
    """Where each input comes from: a module's entry, a constant, or the number of a tensor argument."""
    targets: tuple["Slot | None", ...]
    """Where each output goes: a parameter (its gradient), a buffer, or None for a result."""
    parameters: tuple[nn.Parameter, ...]


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


class Programs:
    """The programs of one job on a mesh."""

    def __init__(self, job: JobDefinition, world: World) -> None:
        self._job = job
        self._world = world
        self._programs: dict[Hashable, list[Prepared]] = {}
        self._recaptures: dict[str, int] = {}

    def program_for(self, arguments: Arguments) -> Prepared:
        """The program for this kind of call: captured now if it is new, or if a value it has taken in has changed."""
        key = self._key(arguments)
        known = self._programs.setdefault(key, [])
        for place, prepared in enumerate(known):
            if prepared.captured.guards.hold():
                known.insert(0, known.pop(place))
                return prepared
        stale = known[0].captured.guards.first_changed() if known else None
        prepared = self._prepare(arguments)
        known.insert(0, prepared)
        del known[KEPT:]
        if stale is not None:
            self._captured_again(stale)
        return prepared

    def _captured_again(self, stale: Guard) -> None:
        """Say once of a value that it makes the job be captured again and again."""
        count = self._recaptures[stale.label] = self._recaptures.get(stale.label, 0) + 1
        if count == TOLD_AT:
            self._world.say(
                f"{self._job.line}: job {self._job.name!r} has been captured {count} times again because {stale.label} "
                "changes (right, but slow); pass it as a tensor argument"
            )

    def _key(self, arguments: Arguments) -> Hashable:
        """What a program depends on, other than guarded values: arguments, shapes, PyTorch's switches."""
        return (
            arguments.key(self._job.name),
            tuple(placement_of(tensor, self._world.mesh) for tensor in arguments.tensors),
            kinds_of_plain(arguments.plain),
            modes(self._job.device(self._world.mesh.device).type),
        )

    def _prepare(self, arguments: Arguments) -> Prepared:
        """Capture, compare with the other ranks, place, lower."""
        job, mesh = self._job, self._world.mesh
        source = JobSource(name=job.name, function=job.function, modules=job.modules, trains=job.trains, line=job.line)
        captured = capture(source, arguments.joined, shapes_of(arguments), job.device(mesh.device))
        require_same_program(captured.program, mesh)
        placements = tuple(placement_of(tensor, mesh) for tensor in arguments.tensors)
        local = built(captured.program, placements, mesh)
        self._tell(local, captured)
        return Prepared(
            local=local,
            captured=captured,
            slots=tuple(self._slot(described) for described in local.inputs),
            targets=tuple(
                None if described.kind == "result" else self._entry(described.name, described.kind == "gradient")
                for described in local.outputs
            ),
            parameters=tuple(job.parameters()) if job.trains else (),
        )

    def _tell(self, local: LocalProgram, captured: Captured) -> None:
        """Say once which operators no rule covers, and what does not happen at every call."""
        if captured.printed is not None:
            self._world.say(
                f"{captured.printed}: print inside job {self._job.name!r} happens only while it is captured"
            )
        for node in local.placed.ruleless:
            self._world.say(
                f"{node.meta.get('line', '')}: no rule to split {node.target} yet; in job {self._job.name!r} it is "
                "gathered and computed whole on every rank (right, but not faster with more workers)"
            )

    def _slot(self, described: ProgramInput) -> "Slot | Tensor | int":
        """Where an input's value is found at each call."""
        if described.kind == "argument":
            return described.index
        if described.constant is not None:
            return described.constant
        return self._entry(described.name, described.kind == "parameter")

    def _entry(self, full_name: str, is_parameter: bool) -> Slot:
        """The entry of a module's table that a name like "model.layer.weight" stands for."""
        name, _, path = full_name.partition(".")
        owner, _, key = path.rpartition(".")
        module = self._job.modules[name].get_submodule(owner)
        return Slot(module._parameters if is_parameter else module._buffers, key)
