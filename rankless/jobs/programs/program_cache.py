"""The program cache of a job: it captures, compares between ranks, compiles and keeps a program per kind of call.

The cache key holds everything that a program depends on except sizes and guarded values. One entry of the cache holds
the programs for its shapes, and programs for varying sizes. Guards decide whether a program is still valid.
"""

import hashlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import msgspec
from torch import Tensor

from rankless.collectives.byte_messages import all_gather_bytes
from rankless.compiler.capture.capture import ArgumentShape, CapturedJob, capture
from rankless.compiler.capture.global_modes import get_torch_modes
from rankless.compiler.capture.value_reads import ValueNeeded, ValueReads
from rankless.compiler.guards.guards import Guard
from rankless.compiler.ir.logical_program import LogicalProgram
from rankless.compiler.local_program import LocalProgram, build_local_program
from rankless.compiler.lowering.value_check import OtherValueRead
from rankless.compiler.probing.operator_probe import OperatorProbe
from rankless.compiler.scheduling.gradient_buckets_and_state_storage import GradientMemory
from rankless.compiler.tracing.symbolic_sizes import SymbolicSizes, compile_guards
from rankless.compiler.tracing.value_snapshots import is_equal, make_type_keys
from rankless.context.world import World
from rankless.errors import CaptureError, ProgramMismatch, RanksDiverged
from rankless.jobs.arguments import FlattenedArguments, find_leaf_names, get_shapes
from rankless.jobs.job_definition import JobDefinition
from rankless.jobs.programs.bound_program import BoundProgram, bind_program, collect_inputs, find_storage
from rankless.jobs.programs.pipelines import Pipelines
from rankless.jobs.programs.program_recorder import ProgramNotices
from rankless.jobs.programs.varying_sizes import (
    ArgumentDim,
    Shapes,
    SizeConstraints,
    SizeGuards,
    SizeHistory,
    describe_failure,
    find_fixing_line,
    list_namespaces,
    list_sizes,
    list_uneven_dims,
    make_symbolic_shapes,
    remove_sizes,
    resize_sharding,
)
from rankless.parallel.default_generator import restore_generators, save_generators
from rankless.parallel.mesh import Mesh
from rankless.parallel.tensor_placement import Shard, Sharding
from rankless.records.encoding import encode_msgpack

MAX_PROGRAMS = 16
"""Programs kept per entry and shapes, the most recently used."""


@dataclass
class CacheEntry:
    """The programs of calls that differ only in sizes."""

    history: SizeHistory = field(default_factory=SizeHistory)
    by_shapes: dict[Shapes, list[BoundProgram]] = field(default_factory=dict)
    varying: list[BoundProgram] = field(default_factory=list)
    """Programs for varying sizes. `by_shapes` holds them too, under the shapes seen so far."""
    failures: int = 0


@dataclass(frozen=True, kw_only=True)
class CacheLookup:
    """A call with its logical shapes and shardings, and the cache entry that it belongs to."""

    arguments: FlattenedArguments
    shapes: Shapes
    shardings: tuple[Sharding, ...]
    entry: CacheEntry
    known: BoundProgram | None
    """The valid program for it, if there is one."""

    def stale_guard(self) -> Guard | None:
        """Return a guard that failed, so that a program for these shapes is no longer valid."""
        programs = (*self.entry.by_shapes.get(self.shapes, ()), *self.entry.varying)
        return next((bound.captured.guards.first_failing() for bound in programs), None)

    def varying(self) -> tuple[tuple[ArgumentDim, ...], ...]:
        """Return the dims with varying sizes, except those that a sharding splits unevenly."""
        uneven = {
            (number, dim)
            for number, (sharding, shape) in enumerate(zip(self.shardings, self.shapes, strict=True))
            for dim in list_uneven_dims(sharding, shape)
        }
        return tuple(group for group in self.entry.history.groups(self.shapes) if not uneven.intersection(group))


def find_fitting(entry: CacheEntry, shapes: Shapes) -> BoundProgram | None:
    """Return a valid program for varying sizes that fits these shapes."""
    for bound in entry.varying:
        if bound.varying_sizes is not None and bound.varying_sizes.fits(shapes) and bound.is_valid:
            return bound
    return None


def move_to_front(programs: list[BoundProgram], used: BoundProgram) -> None:
    """Move the used program to the front and drop the oldest, so that changing values cannot fill memory."""
    programs[:] = [used, *(other for other in programs if other is not used)][:MAX_PROGRAMS]


WARN_AFTER_VALUES = 3
"""Number of values of one argument after which the user is warned."""


class RecaptureWarner:
    """Warns once of a changing plain number among arguments: each value is part of a program and costs a capture."""

    def __init__(self, job: JobDefinition, notify: Callable[[str], None]) -> None:
        self._job = job
        self._notify = notify
        self._values: dict[Hashable, list[set[Any]]] = {}

    def record(self, arguments: FlattenedArguments) -> None:
        """Record the numbers of a call that needs a new cache entry."""
        values = self._values.setdefault(arguments.spec, [set() for _ in arguments.plain])
        for index, (seen, value) in enumerate(zip(values, arguments.plain, strict=True)):
            if not is_number(value) or value in seen or len(seen) == WARN_AFTER_VALUES:
                continue
            seen.add(value)
            if len(seen) == WARN_AFTER_VALUES:
                name = find_leaf_names(self._job.function, arguments)[index]
                self._notify(
                    f"{self._job.line}: job {self._job.name!r} is captured again for each value of {name!r}, "
                    f"{value!r} now (correct, but slow); if it changes often pass a tensor: torch.tensor({value!r})"
                )


def is_number(leaf: Any) -> bool:
    """Whether a leaf is a number other than a boolean."""
    return isinstance(leaf, int | float | complex) and not isinstance(leaf, bool)


MAX_FAILURES = 3
"""Failed captures for varying sizes after which an entry captures for every shape."""
MAX_ENTRIES = 64
"""Largest number of entries in a cache."""
WARN_AFTER_PROGRAMS = 4
"""Number of programs for varying sizes in one entry from which on the cache warns."""
WARN_AFTER_RECAPTURES = 4
"""Number of captures because of one value after which the cache warns."""


@dataclass(frozen=True, kw_only=True)
class ProgramRun:
    """A program that has run, and the values of its outputs."""

    bound: BoundProgram
    outputs: Sequence[Tensor]


class ProgramCache:
    """The programs of one job on a mesh.

    `transform` turns a captured program into the one that runs. Each rank looks up a call by itself, so that ranks
    can compare their results. A capture is collective.
    """

    def __init__(
        self,
        job: JobDefinition,
        world: World,
        transform: Callable[[CapturedJob, FlattenedArguments], LogicalProgram] = lambda captured, _: captured.program,
    ) -> None:
        self._job = job
        self._world = world
        self._transform = transform
        self._entries: dict[tuple[Hashable, ...], CacheEntry] = {}
        self._recapture_warner = RecaptureWarner(job, world.notify)
        self._memory = GradientMemory()
        self.pipelines = Pipelines(job, world)
        self._probe = OperatorProbe(world.mesh)
        self._notices = ProgramNotices(job, world.notify)
        self._early_captures: dict[tuple[Hashable, Shapes], CapturedJob] = {}
        """What was captured for calls before there was a program for them, by `_logical_key`."""
        self._recaptures: dict[str, int] = {}
        self._captures = 0

    def begin_call(self, number: int) -> None:
        """Note the number of the present call of the job, which all ranks have agreed on."""
        self._probe.calls.value = number

    def look_up(self, arguments: FlattenedArguments, shardings: tuple[Sharding, ...]) -> CacheLookup:
        """Return a call with its valid program, if the cache has one."""
        shapes = tuple([tensor.shape for tensor in arguments.tensors])
        key = self._key(arguments, shardings)
        if key not in self._entries:
            self._recapture_warner.record(arguments)
            if len(self._entries) == MAX_ENTRIES:
                # A number that changes at every call makes an entry for each; they must not fill memory.
                del self._entries[next(iter(self._entries))]
            self._entries[key] = CacheEntry()
        entry = self._entries[key]
        known = entry.by_shapes.setdefault(shapes, [])
        found = next((bound for bound in known if bound.is_valid), None)
        if found is None:
            entry.history.add(shapes)
            found = find_fitting(entry, shapes)
        if found is not None:
            move_to_front(known, found)
        return CacheLookup(arguments=arguments, shapes=shapes, shardings=shardings, entry=entry, known=found)

    def capture_program(self, call: CacheLookup) -> BoundProgram:
        """Capture a program for a call without one, on every rank, and store it."""
        stale_guard = call.stale_guard()
        bound = self._capture_varying_sizes(call) or self._capture_fixed_sizes(call)
        self._warn_of_recaptures(stale_guard)
        move_to_front(call.entry.by_shapes[call.shapes], bound)
        return bound

    def capture_before_division(self, call: CacheLookup) -> LogicalProgram:
        """Capture a program for a call to find out how its parameters are divided between workers. Collective.

        The next capture for fixed sizes uses it, if it is valid then.
        """
        captured = self._take_early_capture(call) or self._capture_with_reads(call, ())
        require_same_program(captured.program, self._world.mesh)
        self._early_captures[self._logical_key(call.arguments, call.shapes)] = captured
        return captured.program

    def take_captures(self, before: "ProgramCache") -> None:
        """Take what another cache of the job has captured for fixed sizes: it says nothing of who has which shard.

        Captures that read values of tensors are made again: all workers together compute the values.
        """
        for key, entry in before._entries.items():
            for shapes, programs in entry.by_shapes.items():
                for bound in reversed(programs):
                    if bound.varying_sizes is None and not bound.captured.reads:
                        self._early_captures[key[0], shapes] = bound.captured

    def run_checked(self, call: CacheLookup, run: Callable[[BoundProgram], Sequence[Tensor]]) -> ProgramRun:
        """Run a call's program, and others until one read the values that it was captured for. Collective.

        See Note [values that Python reads]. A program changes nothing but the state of random generators, which is
        restored before another one runs.

        Args:
            call: The call, with a valid program if there is one.
            run: Runs a program and returns the values of its outputs.
        """
        bound = call.known or self.capture_program(call)
        while True:
            captured = bound.captured
            states = save_generators(captured.program.generators) if captured.reads else None
            try:
                return ProgramRun(bound=bound, outputs=run(bound))
            except OtherValueRead as other:
                position, value = other.position, other.value
            if states is not None:
                restore_generators(states)
            bound = self._get_program_for(call, bound, [*bound.read_values[:position], value])

    def _get_program_for(self, call: CacheLookup, bound: BoundProgram, known: Sequence[Any]) -> BoundProgram:
        """Return a program that was captured for other values of what the job reads first, or capture one."""
        programs = call.entry.by_shapes[call.shapes]
        for other in programs:
            if other.is_valid and is_equal(list(other.read_values[: len(known)]), list(known)):
                move_to_front(programs, other)
                return other
        line = bound.captured.reads[len(known) - 1].line
        count = self._recaptures[line] = self._recaptures.get(line, 0) + 1
        if count == WARN_AFTER_RECAPTURES:
            self._world.notify(
                f"{line}: job {self._job.name!r} was captured {count} times again because it reads the value of a "
                "tensor here, which changes (correct, but slow); compute with the tensor, or read it outside the job"
            )
        captured = self._capture_fixed_sizes(call, known)
        move_to_front(programs, captured)
        return captured

    def capture_exactly(self, call: CacheLookup) -> BoundProgram:
        """Capture a program for exactly this call, without varying sizes, to inspect its values.

        If the job reads values of tensors, run it, so that it is the program for the values of this call.
        """
        bound = self._capture_fixed_sizes(call)
        if not bound.captured.reads:
            return bound
        states = save_generators(bound.captured.program.generators)
        known = replace(call, known=bound)
        ran = self.run_checked(known, lambda program: run_program(program, call, self._world.mesh))
        restore_generators(states)
        return ran.bound

    def _warn_of_recaptures(self, stale_guard: Guard | None) -> None:
        """Warn once of a value whose changes cause many captures."""
        if stale_guard is None:
            return
        count = self._recaptures[stale_guard.label] = self._recaptures.get(stale_guard.label, 0) + 1
        if count == WARN_AFTER_RECAPTURES:
            self._world.notify(
                f"{self._job.line}: job {self._job.name!r} was captured {count} times again because "
                f"{stale_guard.label} changes (correct, but slow); pass it as a tensor argument"
            )

    def _key(self, arguments: FlattenedArguments, shardings: tuple[Sharding, ...]) -> tuple[Hashable, ...]:
        """Return the cache key: arguments, shardings, kinds of plain values, and PyTorch's global modes."""
        return (
            self._logical_key(arguments, ())[0],
            tuple(
                [
                    sharding
                    if list_uneven_dims(sharding, tensor.shape)
                    else (tensor.dim(), *[item.dim if isinstance(item, Shard) else None for item in sharding])
                    for tensor, sharding in zip(arguments.tensors, shardings, strict=True)
                ]
            ),
            self._world.owner.version,
        )

    def _logical_key(self, arguments: FlattenedArguments, shapes: Shapes) -> tuple[Hashable, Shapes]:
        """Return what a captured program depends on, without how workers divide it."""
        modes = get_torch_modes(self._job.device(self._world.mesh.device).type)
        return (arguments.cache_key(self._job.name), make_type_keys(arguments.plain), modes), shapes

    def _capture_fixed_sizes(self, call: CacheLookup, known: Sequence[Any] = ()) -> BoundProgram:
        """Capture for these sizes, and the values of the first tensors that the job's Python reads; compile."""
        captured = self._take_early_capture(call) if not known else None
        captured = captured or self._capture_with_reads(call, known)
        local = self._compile(self._transform(captured, call.arguments), call)
        self._report_program(local, captured)
        return self._bind_program(captured, local)

    def _take_early_capture(self, call: CacheLookup) -> CapturedJob | None:
        """Return what was captured for a call before it had a program, once and if it still holds."""
        known = self._early_captures.pop(self._logical_key(call.arguments, call.shapes), None)
        return None if known is None or not known.guards.all_hold() else known

    def _compile(self, program: LogicalProgram, call: CacheLookup) -> LocalProgram:
        """Compare a program with those of the other ranks, and compile it. Operators without a rule are probed."""
        require_same_program(program, self._world.mesh)
        if self.pipelines.axis is not None:
            storage = find_storage(self._job, program, self._world, self._memory)
            return self.pipelines.build(program, call.arguments, call.shardings, storage, self._probe)
        return self._build(program, call.shardings, probe=self._probe)

    def _build(
        self,
        program: LogicalProgram,
        shardings: Sequence[Sharding],
        *,
        sizes: Sequence[str] = (),
        probe: OperatorProbe | None = None,
    ) -> LocalProgram:
        """Compile a program for this rank."""
        storage = find_storage(self._job, program, self._world, self._memory)
        return build_local_program(program, shardings, self._world.mesh, storage=storage, sizes=sizes, probe=probe)

    def _capture_with_reads(self, call: CacheLookup, known: Sequence[Any]) -> CapturedJob:
        """Capture for these sizes and for the values of this call; see Note [values that Python reads]."""
        shapes = get_shapes(call.arguments)
        while True:
            reads = ValueReads(known)
            try:
                return self._capture(call.arguments, shapes, None, reads)
            except (ValueNeeded, Exception) as error:  # with a wrong value the job's own code may fail
                if not reads.has_guesses:
                    raise
                if isinstance(error, CaptureError) and not isinstance(error.__cause__, ValueNeeded):
                    raise
            known = [*known, self._compute_next_value(call, known)]

    def _compute_next_value(self, call: CacheLookup, known: Sequence[Any]) -> Any:
        """Return the value of the first tensor that the job reads after the known ones, in this call."""
        reads = ValueReads(known, ends_at_unknown=True)
        captured = self._capture(call.arguments, get_shapes(call.arguments), None, reads)
        local = self._compile(captured.program, call)
        bound = bind_program(self._job, captured, local, number=0, owner=self._world.owner)
        states = save_generators(captured.program.generators)
        outputs = run_program(bound, call, self._world.mesh)
        restore_generators(states)
        results = zip(outputs, local.outputs, strict=True)
        return next(value for value, output in results if output.kind == "result").item()

    def _capture_varying_sizes(self, call: CacheLookup) -> BoundProgram | None:
        """Do the same with symbols for sizes that have varied; None if there are none or it fails."""
        entry, groups = call.entry, call.varying()
        if not groups or entry.failures >= MAX_FAILURES or self.pipelines.axis is not None:
            return None
        sizes, failure = SymbolicSizes(), ""
        try:
            shapes = make_symbolic_shapes(sizes, get_shapes(call.arguments), groups)
            captured = self._capture(call.arguments, shapes, sizes)
            shardings = [resize_sharding(item, shape.shape) for item, shape in zip(call.shardings, shapes, strict=True)]
            symbols = tuple(sizes.symbols)
            program = self._transform(captured, call.arguments)
            local = self._build(program, shardings, sizes=symbols)
        except Exception as error:  # user code may need a number where it gets a symbolic size
            failure = describe_failure(error, self._job.line)
        conditions = self._agree_on_guards(sizes, failure)
        if conditions is None:
            # An error will recur. A size may be needed as a number for some shapes only, so try again later.
            entry.failures += MAX_FAILURES if failure else 1
            return None
        require_same_program(program, self._world.mesh)
        self._report_program(local, captured)
        varied = {dim_key for group in groups for dim_key in group}
        varying_sizes = SizeConstraints(
            groups=groups,
            symbols=symbols,
            fixed={dim_key: size for dim_key, size in list_sizes(call.shapes).items() if dim_key not in varied},
            holds=compile_guards(conditions, len(groups)),
        )
        bound = self._bind_program(captured, local, varying_sizes)
        entry.varying.append(bound)
        del entry.varying[:-MAX_PROGRAMS]
        if sum(known.is_valid for known in entry.varying) == WARN_AFTER_PROGRAMS:
            line = find_fixing_line(sizes) or self._job.line
            self._world.notify(
                f"{line}: what job {self._job.name!r} computes depends on the sizes of its arguments, so it was "
                f"captured {WARN_AFTER_PROGRAMS} times for varying sizes, and will be captured again"
            )
        return bound

    def _agree_on_guards(self, sizes: SymbolicSizes, failure: str) -> list[str] | None:
        """Return the guards of all ranks' programs for varying sizes, or None if a rank has no such program.

        Ranks differ in the lengths of their shards. With the union of the guards they always choose the same
        program.
        """
        if not failure and not sizes.has_free_symbols():
            failure = (
                f"{find_fixing_line(sizes) or self._job.line}: it needs the number itself, as len() and range() do"
            )
        own_guards = SizeGuards([] if failure else sizes.guard_expressions(), failure)
        everyone = all_gather_bytes(encode_msgpack(own_guards), mesh=self._world.mesh)
        answers = [msgspec.msgpack.decode(data, type=SizeGuards) for data in everyone]
        failed = next((answer.failure for answer in answers if answer.failure), None)
        if failed is None:
            return [text for answer in answers for text in answer.conditions]
        self._world.notify(
            f"{failed}; so job {self._job.name!r} is captured again for every shape of its arguments (correct, but "
            "slow; pad to a few lengths, or compute with x.shape and x.size() instead of numbers)"
        )
        return None

    def _bind_program(
        self, captured: CapturedJob, local: LocalProgram, varying_sizes: SizeConstraints | None = None
    ) -> BoundProgram:
        self._captures += 1
        owner = self._world.owner
        return bind_program(self._job, captured, local, number=self._captures, owner=owner, varying_sizes=varying_sizes)

    def _capture(
        self,
        arguments: FlattenedArguments,
        shapes: Sequence[ArgumentShape],
        sizes: SymbolicSizes | None,
        reads: ValueReads | None = None,
    ) -> CapturedJob:
        """Capture the logical program for arguments of the given shapes."""
        job = self._job
        source = job.as_source()
        namespaces = [] if sizes is None else list_namespaces(job.function, job.modules)
        before = [dict(names) for names in namespaces]
        try:
            self._world.events.begin_capture(job)
            device = job.device(self._world.mesh.device)
            captured = capture(source, arguments.unflatten, shapes, device, sizes=sizes, reads=reads)
        finally:
            removed = remove_sizes(namespaces, before)
        if removed:
            raise TypeError(f"the job stores a size of an argument in {removed[0]!r}")
        return captured

    def _report_program(self, local: LocalProgram, captured: CapturedJob) -> None:
        """Warn of prints and of values that every rank gathers, and record the program for `rankless plan`."""
        if captured.print_line is not None:
            self._world.notify(f"{captured.print_line}: job {self._job.name!r} prints and logs only during its capture")
        if self._world.settings.programs is not None:
            self._world.settings.programs.record(self._job, local)
        self._notices.report(local)


def run_program(bound: BoundProgram, call: CacheLookup, mesh: Mesh) -> Sequence[Tensor]:
    """Run a program on the values of a call, and return the values of its outputs."""
    values = collect_inputs(bound, call.arguments, call.shardings, mesh)
    return bound.local(values, list(bound.sizes(call.arguments).values()))


Operations = list[tuple[str, str]]
"""The operations of a program as text, each with its line of the script; see `LogicalProgram.operations`."""


def require_same_program(program: LogicalProgram, mesh: Mesh) -> None:
    """Return if every rank captured this program, and draws the same numbers from the script's generators.

    Otherwise raise `ProgramMismatch` or `RanksDiverged` on every rank.
    """
    digests = all_gather_bytes(program.digest().encode() + digest_generators(program), mesh=mesh)
    if len(set(digests)) == 1:
        return
    own = encode_msgpack(program.operations())
    programs = [msgspec.msgpack.decode(data, type=Operations) for data in all_gather_bytes(own, mesh=mesh)]
    differences = ((rank, find_first_difference(programs[0], other)) for rank, other in enumerate(programs))
    other, difference = next((item for item in differences if item[1] is not None), (0, None))
    if difference is None:
        rank = next(rank for rank, item in enumerate(digests) if item != digests[0])
        raise RanksDiverged(
            expected=f"generators of the script, which job {program.name!r} draws from, in one state on every rank",
            found=f"rank {rank} has another state than rank 0",
            fix="seed them with the same number on every rank",
            where=next((node.meta.get("line") for node in program.graph.nodes if "generator" in node.meta), None),
        )
    (ours, our_line), (theirs, their_line) = difference
    raise ProgramMismatch(
        expected=f"job {program.name!r} to be the same program on every rank; rank 0 has: {ours}",
        found=f"on rank {other}: {theirs}",
        fix="run the same code on every rank; branch on rankless.rank() only outside jobs",
        where=their_line or our_line or None,
    )


def digest_generators(program: LogicalProgram) -> bytes:
    """Return a digest of the states of the script's generators that a program draws from."""
    digest = hashlib.blake2b(digest_size=8)
    for generator in program.generators:
        digest.update(generator.get_state().numpy().data)
    return digest.digest()


def find_first_difference(one: Operations, other: Operations) -> tuple[tuple[str, str], tuple[str, str]] | None:
    """Return the first operations in which two programs differ, each with its line; None if they are the same."""
    pairs = zip_longest(one, other, fillvalue=("nothing more", ""))
    return next(((left, right) for left, right in pairs if left[0] != right[0]), None)
