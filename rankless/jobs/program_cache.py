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
from rankless.jobs.arguments import Arguments, get_shapes
from rankless.jobs.definition import JobDefinition
from rankless.jobs.executable import Executable, make_executable
from rankless.jobs.varying_numbers import VaryingNumbers
from rankless.jobs.varying_sizes import (
    ArgumentDim,
    Shapes,
    SizeHistory,
    VaryingSizes,
    is_even_split,
    list_sizes,
    make_symbolic_shapes,
    resize_placement,
)
from rankless.parallel.placement import Placement, Shard

MAX_FAILURES = 3
"""Captures for varying sizes that came to nothing, after which a kind of call is captured for every shape."""
MAX_ENTRIES = 64
"""Kinds of calls whose programs are kept."""
WARN_AFTER_PROGRAMS = 4
"""Programs for varying sizes of one kind of call, of which the user is told."""

MAX_PROGRAMS = 16
"""Programs kept per kind of call and shapes, the latest used."""
WARN_AFTER_RECAPTURES = 4
"""After so many captures because of one value the script is told."""


@dataclass
class CacheEntry:
    """What calls have in common that differ in sizes only."""

    history: SizeHistory = field(default_factory=SizeHistory)
    by_shapes: dict[Shapes, list[Executable]] = field(default_factory=dict)
    varying: list[Executable] = field(default_factory=list)
    """Programs for varying sizes, which are also among those of the shapes that have been seen."""
    failures: int = 0


class SizeGuards(msgspec.Struct, frozen=True):
    """What each rank tells the others of its program for varying sizes: its guards, or why it has none."""

    conditions: list[str]
    failure: str = ""


@dataclass(frozen=True, kw_only=True)
class CachedCall:
    """The tensors of a call, their logical shapes and how they lie; and the programs of calls like it."""

    arguments: Arguments
    shapes: Shapes
    placements: tuple[Placement, ...]
    entry: CacheEntry
    known: Executable | None
    """The program that is right for it, if there is one."""

    def stale_guard(self) -> Guard | None:
        """What has changed since a program was captured that would be right without."""
        programs = (*self.entry.by_shapes.get(self.shapes, ()), *self.entry.varying)
        return next((executable.captured.guards.first_failing() for executable in programs), None)

    def varying(self) -> tuple[tuple[ArgumentDim, ...], ...]:
        """The places whose sizes vary; lengths of shards that do not follow from a size stay as they are."""
        uneven = {
            (number, placement.dim)
            for number, (placement, shape) in enumerate(zip(self.placements, self.shapes, strict=True))
            if isinstance(placement, Shard) and not is_even_split(placement, shape)
        }
        return tuple(group for group in self.entry.history.groups(self.shapes) if not uneven.intersection(group))


class ProgramCache:
    """The programs of one job on a mesh; `changed` gives what is run of a captured one.

    Each rank looks a call up by itself, so that ranks can compare what they have found; a capture is collective.
    """

    def __init__(
        self,
        job: JobDefinition,
        world: World,
        transform: Callable[[CapturedJob, Arguments], LogicalProgram] = lambda captured, _: captured.program,
    ) -> None:
        self._job = job
        self._world = world
        self._transform = transform
        self._entries: dict[Hashable, CacheEntry] = {}
        self._numbers = VaryingNumbers(job, world.notify)
        self._memory = GradientMemory()
        self._recaptures: dict[str, int] = {}
        self._captures = 0

    def look_up(self, arguments: Arguments, placements: tuple[Placement, ...]) -> CachedCall:
        """A call with the program that is known for it, unless it is new or a value that was taken in has changed."""
        shapes = tuple([tensor.shape for tensor in arguments.tensors])
        key = self._key(arguments, placements)
        if key not in self._entries:
            self._numbers.note(arguments)
            if len(self._entries) == MAX_ENTRIES:
                # A number that changes at every call makes a kind of each; they must not fill the memory.
                del self._entries[next(iter(self._entries))]
            self._entries[key] = CacheEntry()
        entry = self._entries[key]
        known = entry.by_shapes.setdefault(shapes, [])
        found = next((executable for executable in known if executable.is_valid), None)
        if found is None:
            entry.history.add(shapes)
            found = find_fitting(entry, shapes)
        if found is not None:
            move_to_front(known, found)
        return CachedCall(arguments=arguments, shapes=shapes, placements=placements, entry=entry, known=found)

    def capture_program(self, call: CachedCall) -> Executable:
        """A program for a call that has none, captured by every rank and kept."""
        stale_guard = call.stale_guard()
        executable = self._capture_varying_sizes(call) or self._capture_fixed_sizes(call)
        self._warn_of_recaptures(stale_guard)
        move_to_front(call.entry.by_shapes[call.shapes], executable)
        return executable

    def capture_exactly(self, call: CachedCall) -> Executable:
        """A program captured for this very call, with no size that varies: to be looked at value by value."""
        return self._capture_fixed_sizes(call)

    def _warn_of_recaptures(self, stale_guard: Guard | None) -> None:
        """Say once of a value that it makes the job be captured again and again."""
        if stale_guard is None:
            return
        count = self._recaptures[stale_guard.label] = self._recaptures.get(stale_guard.label, 0) + 1
        if count == WARN_AFTER_RECAPTURES:
            self._world.notify(
                f"{self._job.line}: job {self._job.name!r} has been captured {count} times again because "
                f"{stale_guard.label} changes (right, but slow); pass it as a tensor argument"
            )

    def _key(self, arguments: Arguments, placements: tuple[Placement, ...]) -> Hashable:
        """What a program depends on, other than sizes and guarded values: arguments, PyTorch's switches."""
        return (
            arguments.cache_key(self._job.name),
            tuple(
                [
                    (tensor.dim(), placement.dim if isinstance(placement, Shard) else None)
                    if is_even_split(placement, tensor.shape)
                    else placement
                    for tensor, placement in zip(arguments.tensors, placements, strict=True)
                ]
            ),
            make_type_keys(arguments.plain),
            get_torch_modes(self._job.device(self._world.mesh.device).type),
        )

    def _capture_fixed_sizes(self, call: CachedCall) -> Executable:
        """Capture, compare with the other ranks, place, lower."""
        captured = self._capture(call.arguments, get_shapes(call.arguments), None)
        program = self._transform(captured, call.arguments)
        require_same_program(program, self._world.mesh)
        local = build_local_program(program, call.placements, self._world.mesh, memory=self._memory)
        self._report_program(local, captured)
        return self._make_executable(captured, local)

    def _capture_varying_sizes(self, call: CachedCall) -> Executable | None:
        """The same with symbols for sizes that have varied; None if there are none, or no such program."""
        entry, groups = call.entry, call.varying()
        if not groups or entry.failures >= MAX_FAILURES:
            return None
        sizes, failure = SymbolicSizes(), ""
        try:
            shapes = make_symbolic_shapes(sizes, get_shapes(call.arguments), groups)
            captured = self._capture(call.arguments, shapes, sizes)
            placements = [
                resize_placement(item, shape.shape) for item, shape in zip(call.placements, shapes, strict=True)
            ]
            mesh, symbols = self._world.mesh, tuple(sizes.symbols)
            program = self._transform(captured, call.arguments)
            local = build_local_program(program, tuple(placements), mesh, memory=self._memory, sizes=symbols)
        except Exception as error:  # the job's own code, which may ask of a size what only a number can answer
            failure = describe_failure(error, self._job.line)
        conditions = self._agree_on_guards(sizes, failure)
        if conditions is None:
            # What raises once raises always; a size may be asked for its number in some shapes only.
            entry.failures += MAX_FAILURES if failure else 1
            return None
        require_same_program(program, self._world.mesh)
        self._report_program(local, captured)
        varied = {place for group in groups for place in group}
        varying_sizes = VaryingSizes(
            groups=groups,
            symbols=symbols,
            fixed={place: size for place, size in list_sizes(call.shapes).items() if place not in varied},
            holds=compile_guards(conditions, len(groups)),
        )
        executable = self._make_executable(captured, local, varying_sizes)
        entry.varying.append(executable)
        del entry.varying[:-MAX_PROGRAMS]
        if sum(known.is_valid for known in entry.varying) == WARN_AFTER_PROGRAMS:
            line = find_fixing_line(sizes) or self._job.line
            self._world.notify(
                f"{line}: what job {self._job.name!r} computes depends on the sizes of its arguments, so it has been "
                f"captured {WARN_AFTER_PROGRAMS} times for sizes that vary, and will be again"
            )
        return executable

    def _agree_on_guards(self, sizes: SymbolicSizes, failure: str) -> list[str] | None:
        """The guards of all ranks' programs for varying sizes, whose own lengths differ; None if any has none.

        With the union all ranks always choose the same program.
        """
        if not failure and not sizes.has_free_symbols():
            failure = (
                f"{find_fixing_line(sizes) or self._job.line}: it asks for the number itself, as len() and range() do"
            )
        told = SizeGuards([] if failure else sizes.guard_expressions(), failure)
        everyone = all_gather_bytes(msgspec.msgpack.encode(told), mesh=self._world.mesh)
        answers = [msgspec.msgpack.decode(data, type=SizeGuards) for data in everyone]
        failed = next((answer.failure for answer in answers if answer.failure), None)
        if failed is None:
            return [text for answer in answers for text in answer.conditions]
        self._world.notify(
            f"{failed}; so job {self._job.name!r} is captured anew for every shape of its arguments (right, but each "
            "costs a capture; pad to a few lengths, or compute with x.shape and x.size() in place of numbers)"
        )
        return None

    def _make_executable(
        self, captured: CapturedJob, local: LocalProgram, varying_sizes: VaryingSizes | None = None
    ) -> Executable:
        self._captures += 1
        return make_executable(self._job, captured, local, number=self._captures, varying_sizes=varying_sizes)

    def _capture(
        self, arguments: Arguments, shapes: Sequence[ArgumentShape], sizes: SymbolicSizes | None
    ) -> CapturedJob:
        """The logical program for arguments of the given shapes."""
        job = self._job
        source = JobSource(name=job.name, function=job.function, modules=job.modules, trains=job.trains, line=job.line)
        namespaces = [] if sizes is None else list_namespaces(job.function, job.modules)
        before = [dict(names) for names in namespaces]
        try:
            captured = capture(source, arguments.unflatten, shapes, job.device(self._world.mesh.device), sizes=sizes)
        finally:
            kept = remove_sizes(namespaces, before)
        if kept:
            raise TypeError(f"the job keeps a size of an argument in {kept[0]!r}")
        return captured

    def _report_program(self, local: LocalProgram, captured: CapturedJob) -> None:
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


def find_fitting(entry: CacheEntry, shapes: Shapes) -> Executable | None:
    """A program for varying sizes that is right for these."""
    for executable in entry.varying:
        if executable.varying_sizes is not None and executable.varying_sizes.fits(shapes) and executable.is_valid:
            return executable
    return None


def move_to_front(programs: list[Executable], used: Executable) -> None:
    """Put the program that is used first, and drop the last: a value that changes always must not fill the memory."""
    programs[:] = [used, *(other for other in programs if other is not used)][:MAX_PROGRAMS]


def describe_failure(error: Exception, line: str) -> str:
    """Why a capture came to nothing, in one line after that of the script; `line` if no nearer one is known."""
    if isinstance(error, RanklessError):
        text, where = str(error.found), error.where
    else:
        text, where = f"{type(error).__name__}: {error}", None
    return f"{where or find_user_line(error) or line}: {text}".partition("\n")[0]


def find_fixing_line(sizes: SymbolicSizes) -> str:
    """The first line of the user's that a size had to be a number for."""
    return next((line for line in sizes.shape_env.specializing_lines if line), "")


def list_namespaces(function: Callable[..., Any], modules: Mapping[str, nn.Module]) -> list[dict[str, Any]]:
    """Where a job may leave a size behind: the attributes of its modules, and its globals."""
    found = [vars(part) for module in modules.values() for part in module.modules()]
    return [*found, getattr(function, "__globals__", {})]


def remove_sizes(namespaces: Sequence[dict[str, Any]], before: Sequence[Mapping[str, Any]]) -> list[str]:
    """Put back what the job has overwritten with a size, which outside the job would be no number; the names."""
    kept = []
    for names, known in zip(namespaces, before, strict=True):
        for name in [name for name, value in names.items() if is_symbolic(value)]:
            kept.append(name)
            names[name] = known.get(name)
    return kept
