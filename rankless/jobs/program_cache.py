"""A job's programs: captured once per kind of call, compared between ranks, placed and lowered, and kept."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from torch import nn

from rankless.collectives.byte_messages import all_gather_bytes
from rankless.compiler.capture.capture import ArgumentShape, CapturedJob, JobSource, capture
from rankless.compiler.capture.torch_modes import get_torch_modes
from rankless.compiler.capture.trace_errors import find_user_line
from rankless.compiler.codegen.codegen import LocalProgram, build_local_program
from rankless.compiler.guards.guards import Guard
from rankless.compiler.ir.logical_program import LogicalProgram
from rankless.compiler.program_agreement import require_same_program
from rankless.compiler.scheduling.schedule import GradientMemory
from rankless.compiler.tracing.plain_values import make_type_keys
from rankless.compiler.tracing.symbolic_sizes import SymbolicSizes, compile_guards, is_symbolic
from rankless.context.world import World
from rankless.errors import RanklessError
from rankless.jobs.arguments import Arguments, shapes_of
from rankless.jobs.definition import JobDefinition
from rankless.jobs.executable import Executable, ready
from rankless.jobs.varying_numbers import VaryingNumbers
from rankless.jobs.varying_sizes import History, Place, Shapes, Variation, placed_as, sizes_of, splits_evenly, symbolic
from rankless.parallel.placement import Placement, Shard

MOST_FAILURES = 3
"""Captures for varying sizes that came to nothing, after which a kind of call is captured for every shape."""
MOST_KINDS = 64
"""Kinds of calls whose programs are kept."""
MANY_PROGRAMS = 4
"""Programs for varying sizes of one kind of call, of which the user is told."""

KEPT = 16
"""Programs kept per kind of call and shapes, the latest used."""
TOLD_AT = 4
"""After so many captures because of one value the script is told."""


@dataclass
class KindOfCall:
    """What calls have in common that differ in sizes only."""

    history: History = field(default_factory=History)
    by_shapes: dict[Shapes, list[Executable]] = field(default_factory=dict)
    varying: list[Executable] = field(default_factory=list)
    """Programs for varying sizes, which are also among those of the shapes that have been seen."""
    failures: int = 0


class Told(msgspec.Struct, frozen=True):
    """What each rank tells the others of its program for varying sizes: its guards, or why it has none."""

    conditions: list[str]
    failure: str = ""


@dataclass(frozen=True, kw_only=True)
class Call:
    """The tensors of a call, their logical shapes and how they lie; and the programs of calls like it."""

    arguments: Arguments
    shapes: Shapes
    placements: tuple[Placement, ...]
    kind: KindOfCall
    known: Executable | None
    """The program that is right for it, if there is one."""

    def stale(self) -> Guard | None:
        """What has changed since a program was captured that would be right without."""
        programs = (*self.kind.by_shapes.get(self.shapes, ()), *self.kind.varying)
        return next((prepared.captured.guards.first_failing() for prepared in programs), None)

    def varying(self) -> tuple[tuple[Place, ...], ...]:
        """The places whose sizes vary; lengths of shards that do not follow from a size stay as they are."""
        uneven = {
            (number, placement.dim)
            for number, (placement, shape) in enumerate(zip(self.placements, self.shapes, strict=True))
            if isinstance(placement, Shard) and not splits_evenly(placement, shape)
        }
        return tuple(group for group in self.kind.history.groups(self.shapes) if not uneven.intersection(group))


class ProgramCache:
    """The programs of one job on a mesh; `changed` gives what is run of a captured one.

    Each rank looks a call up by itself, so that ranks can compare what they have found; a capture is collective.
    """

    def __init__(
        self,
        job: JobDefinition,
        world: World,
        changed: Callable[[CapturedJob, Arguments], LogicalProgram] = lambda captured, _: captured.program,
    ) -> None:
        self._job = job
        self._world = world
        self._changed = changed
        self._kinds: dict[Hashable, KindOfCall] = {}
        self._numbers = VaryingNumbers(job, world.notify)
        self._memory = GradientMemory()
        self._recaptures: dict[str, int] = {}
        self._captures = 0

    def look_up(self, arguments: Arguments, placements: tuple[Placement, ...]) -> Call:
        """A call with the program that is known for it, unless it is new or a value that was taken in has changed."""
        shapes = tuple([tensor.shape for tensor in arguments.tensors])
        key = self._key(arguments, placements)
        if key not in self._kinds:
            self._numbers.note(arguments)
            if len(self._kinds) == MOST_KINDS:
                # A number that changes at every call makes a kind of each; they must not fill the memory.
                del self._kinds[next(iter(self._kinds))]
            self._kinds[key] = KindOfCall()
        kind = self._kinds[key]
        known = kind.by_shapes.setdefault(shapes, [])
        found = next((prepared for prepared in known if prepared.is_right), None)
        if found is None:
            kind.history.add(shapes)
            found = fitting(kind, shapes)
        if found is not None:
            keep(known, found)
        return Call(arguments=arguments, shapes=shapes, placements=placements, kind=kind, known=found)

    def captured(self, call: Call) -> Executable:
        """A program for a call that has none, captured by every rank and kept."""
        stale = call.stale()
        prepared = self._for_varying_sizes(call) or self._for_these_sizes(call)
        self._tell_of_change(stale)
        keep(call.kind.by_shapes[call.shapes], prepared)
        return prepared

    def captured_exactly(self, call: Call) -> Executable:
        """A program captured for this very call, with no size that varies: to be looked at value by value."""
        return self._for_these_sizes(call)

    def _tell_of_change(self, stale: Guard | None) -> None:
        """Say once of a value that it makes the job be captured again and again."""
        if stale is None:
            return
        count = self._recaptures[stale.label] = self._recaptures.get(stale.label, 0) + 1
        if count == TOLD_AT:
            self._world.notify(
                f"{self._job.line}: job {self._job.name!r} has been captured {count} times again because {stale.label} "
                "changes (right, but slow); pass it as a tensor argument"
            )

    def _key(self, arguments: Arguments, placements: tuple[Placement, ...]) -> Hashable:
        """What a program depends on, other than sizes and guarded values: arguments, PyTorch's switches."""
        return (
            arguments.key(self._job.name),
            tuple(
                [
                    (tensor.dim(), placement.dim if isinstance(placement, Shard) else None)
                    if splits_evenly(placement, tensor.shape)
                    else placement
                    for tensor, placement in zip(arguments.tensors, placements, strict=True)
                ]
            ),
            make_type_keys(arguments.plain),
            get_torch_modes(self._job.device(self._world.mesh.device).type),
        )

    def _for_these_sizes(self, call: Call) -> Executable:
        """Capture, compare with the other ranks, place, lower."""
        captured = self._capture(call.arguments, shapes_of(call.arguments), None)
        program = self._changed(captured, call.arguments)
        require_same_program(program, self._world.mesh)
        local = build_local_program(program, call.placements, self._world.mesh, memory=self._memory)
        self._tell(local, captured)
        return self._ready(captured, local)

    def _for_varying_sizes(self, call: Call) -> Executable | None:
        """The same with symbols for sizes that have varied; None if there are none, or no such program."""
        kind, groups = call.kind, call.varying()
        if not groups or kind.failures >= MOST_FAILURES:
            return None
        sizes, failure = SymbolicSizes(), ""
        try:
            shapes = symbolic(sizes, shapes_of(call.arguments), groups)
            captured = self._capture(call.arguments, shapes, sizes)
            placements = [placed_as(item, shape.shape) for item, shape in zip(call.placements, shapes, strict=True)]
            mesh, symbols = self._world.mesh, tuple(sizes.symbols)
            program = self._changed(captured, call.arguments)
            local = build_local_program(program, tuple(placements), mesh, memory=self._memory, sizes=symbols)
        except Exception as error:  # the job's own code, which may ask of a size what only a number can answer
            failure = reason_of(error, self._job.line)
        conditions = self._agreed(sizes, failure)
        if conditions is None:
            # What raises once raises always; a size may be asked for its number in some shapes only.
            kind.failures += MOST_FAILURES if failure else 1
            return None
        require_same_program(program, self._world.mesh)
        self._tell(local, captured)
        varied = {place for group in groups for place in group}
        variation = Variation(
            groups=groups,
            symbols=symbols,
            fixed={place: size for place, size in sizes_of(call.shapes).items() if place not in varied},
            holds=compile_guards(conditions, len(groups)),
        )
        prepared = self._ready(captured, local, variation)
        kind.varying.append(prepared)
        del kind.varying[:-KEPT]
        if sum(known.is_right for known in kind.varying) == MANY_PROGRAMS:
            self._world.notify(
                f"{fixing_line(sizes) or self._job.line}: what job {self._job.name!r} computes depends on the sizes of "
                f"its arguments, so it has been captured {MANY_PROGRAMS} times for sizes that vary, and will be again"
            )
        return prepared

    def _agreed(self, sizes: SymbolicSizes, failure: str) -> list[str] | None:
        """The guards of all ranks' programs for varying sizes, whose own lengths differ; None if any has none.

        With the union all ranks always choose the same program.
        """
        if not failure and not sizes.has_free_symbols():
            failure = f"{fixing_line(sizes) or self._job.line}: it asks for the number itself, as len() and range() do"
        told = Told([] if failure else sizes.guard_expressions(), failure)
        everyone = all_gather_bytes(msgspec.msgpack.encode(told), mesh=self._world.mesh)
        answers = [msgspec.msgpack.decode(data, type=Told) for data in everyone]
        failed = next((answer.failure for answer in answers if answer.failure), None)
        if failed is None:
            return [text for answer in answers for text in answer.conditions]
        self._world.notify(
            f"{failed}; so job {self._job.name!r} is captured anew for every shape of its arguments (right, but each "
            "costs a capture; pad to a few lengths, or compute with x.shape and x.size() in place of numbers)"
        )
        return None

    def _ready(self, captured: CapturedJob, local: LocalProgram, variation: Variation | None = None) -> Executable:
        self._captures += 1
        return ready(self._job, captured, local, number=self._captures, variation=variation)

    def _capture(
        self, arguments: Arguments, shapes: Sequence[ArgumentShape], sizes: SymbolicSizes | None
    ) -> CapturedJob:
        """The logical program for arguments of the given shapes."""
        job = self._job
        source = JobSource(name=job.name, function=job.function, modules=job.modules, trains=job.trains, line=job.line)
        namespaces = [] if sizes is None else namespaces_of(job.function, job.modules)
        before = [dict(names) for names in namespaces]
        try:
            captured = capture(source, arguments.joined, shapes, job.device(self._world.mesh.device), sizes=sizes)
        finally:
            kept = without_sizes(namespaces, before)
        if kept:
            raise TypeError(f"the job keeps a size of an argument in {kept[0]!r}")
        return captured

    def _tell(self, local: LocalProgram, captured: CapturedJob) -> None:
        """Say once which operators no rule covers and what is lost, and show the program to whoever asked for it."""
        if captured.print_line is not None:
            self._world.notify(
                f"{captured.print_line}: what job {self._job.name!r} prints or logs comes only while it is captured"
            )
        if self._world.programs is not None:
            self._world.programs.record(self._job, local)
        for node in local.sharded.nodes_without_rule:
            self._world.notify(
                f"{node.meta.get('line', '')}: no rule to split {node.target} yet; in job {self._job.name!r} it is "
                "gathered and computed whole on every rank (right, but not faster with more workers)"
            )


def fitting(kind: KindOfCall, shapes: Shapes) -> Executable | None:
    """A program for varying sizes that is right for these."""
    for prepared in kind.varying:
        if prepared.variation is not None and prepared.variation.fits(shapes) and prepared.is_right:
            return prepared
    return None


def keep(programs: list[Executable], used: Executable) -> None:
    """Put the program that is used first, and drop the last: a value that changes always must not fill the memory."""
    programs[:] = [used, *(other for other in programs if other is not used)][:KEPT]


def reason_of(error: Exception, line: str) -> str:
    """Why a capture came to nothing, in one line after that of the script; `line` if no nearer one is known."""
    if isinstance(error, RanklessError):
        text, where = str(error.found), error.where
    else:
        text, where = f"{type(error).__name__}: {error}", None
    return f"{where or find_user_line(error) or line}: {text}".partition("\n")[0]


def fixing_line(sizes: SymbolicSizes) -> str:
    """The first line of the user's that a size had to be a number for."""
    return next((line for line in sizes.shape_env.specializing_lines if line), "")


def namespaces_of(function: Callable[..., Any], modules: Mapping[str, nn.Module]) -> list[dict[str, Any]]:
    """Where a job may leave a size behind: the attributes of its modules, and its globals."""
    found = [vars(part) for module in modules.values() for part in module.modules()]
    return [*found, getattr(function, "__globals__", {})]


def without_sizes(namespaces: Sequence[dict[str, Any]], before: Sequence[Mapping[str, Any]]) -> list[str]:
    """Put back what the job has overwritten with a size, which outside the job would be no number; the names."""
    kept = []
    for names, known in zip(namespaces, before, strict=True):
        for name in [name for name, value in names.items() if is_symbolic(value)]:
            kept.append(name)
            names[name] = known.get(name)
    return kept
