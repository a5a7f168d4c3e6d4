"""A job's programs: captured once per kind of call, compared between ranks, placed and lowered, and kept."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from rankless.program.agreement import require_same_program
from rankless.program.autocast import autocast_state
from rankless.program.capture import Captured, JobSource, capture
from rankless.program.guards import Guards, guards_of
from rankless.program.logical_program import LogicalProgram, ProgramInput
from rankless.program.run import LocalProgram, built
from rankless.views.arguments import Arguments, placement_of, shapes_of
from rankless.views.definition import JobDefinition
from rankless.views.world import World


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A program ready to run, what it was captured from, and how its result is put together."""

    local: LocalProgram
    captured: Captured
    guards: Guards
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
    """The programs of one job on a mesh; `changed` gives what is run of a captured one."""

    def __init__(
        self,
        job: JobDefinition,
        world: World,
        changed: Callable[[Captured, Arguments], LogicalProgram] = lambda captured, _: captured.program,
    ) -> None:
        self._job = job
        self._world = world
        self._changed = changed
        self._programs: dict[Hashable, list[Prepared]] = {}
        self._modules = [part for module in job.modules.values() for part in module.modules()]

    def program_for(self, arguments: Arguments) -> Prepared:
        """The program for this kind of call: captured now if it is new, or if a value it has taken in has changed."""
        key = self._key(arguments)
        known = self._programs.setdefault(key, [])
        for prepared in known:
            if prepared.guards.hold():
                return prepared
        prepared = self._prepare(arguments)
        known.append(prepared)
        return prepared

    def _key(self, arguments: Arguments) -> Hashable:
        """What a program depends on, other than guarded values: shapes, autocast, modes, which parameters train."""
        return (
            arguments.key(self._job.name),
            autocast_state(self._world.mesh.device.type),
            tuple(placement_of(tensor, self._world.mesh) for tensor in arguments.tensors),
            tuple([part.training for part in self._modules]),
            tuple(
                [item.requires_grad for part in self._modules for item in part._parameters.values() if item is not None]
            ),
        )

    def _prepare(self, arguments: Arguments) -> Prepared:
        """Capture, compare with the other ranks, place, lower."""
        job, mesh = self._job, self._world.mesh
        source = JobSource(name=job.name, function=job.function, modules=job.modules, trains=job.trains, line=job.line)
        captured = capture(source, arguments.joined, shapes_of(arguments), job.device(mesh.device))
        # After the capture: in its first pass a model may have set itself up.
        guards = guards_of(job.function, job.modules)
        require_same_program(captured.program, mesh)
        placements = tuple(placement_of(tensor, mesh) for tensor in arguments.tensors)
        local = built(self._changed(captured, arguments), placements, mesh)
        self._tell(local)
        return Prepared(
            local=local,
            captured=captured,
            guards=guards,
            slots=tuple(self._slot(described) for described in local.inputs),
            targets=tuple(
                None if described.kind == "result" else self._entry(described.name, described.kind == "gradient")
                for described in local.outputs
            ),
            parameters=tuple(job.parameters()) if job.trains else (),
        )

    def _tell(self, local: LocalProgram) -> None:
        """Say once which operators no rule covers."""
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
