"""Read the loss weights of each call, from the job's program on a mesh or from a program of their own."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from rankless.compiler.accumulation.loss_normalizers import add_loss_normalizers, hash_computation, keep_last_results
from rankless.compiler.capture.capture import ArgumentShape, CapturedJob, JobSource, capture
from rankless.compiler.capture.value_reads import ValueNeeded, ValueReads
from rankless.compiler.ir.logical_program import LogicalProgram
from rankless.context.world import World
from rankless.errors import CaptureError
from rankless.jobs.arguments import FlattenedArguments, find_batch_dim, get_shapes, get_shardings
from rankless.jobs.gradient_accumulation import LossWeight
from rankless.jobs.job_definition import JobDefinition
from rankless.jobs.programs.bound_program import BoundProgram
from rankless.jobs.programs.program_cache import ProgramCache, run_program
from rankless.parallel.default_generator import GeneratorStates, restore_generators, save_generators


class LossWeightReader:
    """Programs of one job that also return its loss weights.

    With `weights_only` the programs return nothing else.
    """

    def __init__(self, job: JobDefinition, world: World, *, weights_only: bool) -> None:
        self._job = job
        self._world = world
        self._weights_only = weights_only
        self._device = job.device(world.mesh.device)
        self._offsets_and_minima: dict[int, tuple[tuple[float, float | None], ...]] = {}
        self._constants: set[int] = set()
        """The positions of plain arguments that are not the number of rows."""
        self._tracked: set[tuple[int, int]] = set()
        """The positions of plain arguments that have equalled the rows in each call, with these numbers of rows."""
        self.programs = ProgramCache(job, world, transform=self._add_weights)

    def read_call(self, arguments: FlattenedArguments) -> tuple[LossWeight, ...]:
        """Return the loss weights of a call on one device, whose random numbers are still to be drawn."""
        mesh = self._world.mesh
        call = self.programs.look_up(arguments, get_shardings(arguments, mesh))
        states: list[GeneratorStates] = []

        def run(bound: BoundProgram) -> Sequence[Tensor]:
            states.append(save_generators(bound.captured.program.generators))
            return run_program(bound, call, mesh)

        ran = self.programs.run_checked(call, run)
        restore_generators(states[-1])
        return self.read(ran.bound, ran.outputs)

    def read(self, bound: BoundProgram, results: Sequence[Tensor]) -> tuple[LossWeight, ...]:
        """Return the loss weights among a program's results, which are the last ones."""
        adjustments = self._offsets_and_minima[id(bound.captured)]
        totals = [float(total) for total in results[len(results) - len(adjustments) :]]
        return tuple(
            LossWeight(total, offset, minimum) for total, (offset, minimum) in zip(totals, adjustments, strict=True)
        )

    def _add_weights(self, captured: CapturedJob, arguments: FlattenedArguments) -> LogicalProgram:
        """Return the captured program with its loss weights, or only these."""
        rows, dims = find_row_dims(arguments, self._job)
        known = [read.value for read in captured.reads]
        growing = self._find_growing(arguments, rows, known)
        found = add_loss_normalizers(
            captured.program,
            lambda factor, values: self._capture_rows(arguments, dims, factor, growing, values),
            dims,
            reads=known,
            line=self._job.line,
        )
        self._offsets_and_minima[id(captured)] = found.adjustments
        return keep_last_results(found.program, len(found.adjustments)) if self._weights_only else found.program

    def _find_growing(self, arguments: FlattenedArguments, rows: int, known: Sequence[Any]) -> frozenset[int]:
        """Return the positions of the plain arguments that are the number of rows.

        A number that differed from the rows of an earlier call is a constant. Another one that equals them may be
        either. It counts as the number of rows if the loss weights are the same anyway.

        Raises:
            CaptureError: They are not.
        """
        numbers = {
            position: leaf
            for position, leaf in enumerate(arguments.plain)
            if isinstance(leaf, int) and not isinstance(leaf, bool)
        }
        self._constants |= {position for position, number in numbers.items() if number != rows}
        self._tracked |= {(position, rows) for position in numbers.keys() - self._constants}
        growing = frozenset(numbers.keys() - self._constants)
        sure = frozenset(position for position in growing if sum(item == position for item, _ in self._tracked) > 1)
        if growing <= sure:
            return growing
        as_rows, as_constants = (self._try_weights(arguments, held, known) for held in (growing, sure))
        if as_constants is None or as_rows == as_constants:
            return growing
        if as_rows is None:
            return sure
        raise CaptureError(
            expected="a loss that divides by a number of rows that Rankless can tell from a constant (accumulate=)",
            found=f"an argument of {rows} with a batch of {rows} rows: it may be the number of rows, or a constant",
            fix="compute the number of rows in the job, as len(x) of a batch x, and pass a constant as a tensor",
            where=self._job.line,
        )

    def _try_weights(self, arguments: FlattenedArguments, growing: frozenset[int], known: Sequence[Any]) -> object:
        """Return a description of the loss weights if some plain arguments grow with the rows; None if there are none.

        A loss that does not fit makes no loss weights.
        """
        _, dims = find_row_dims(arguments, self._job)

        def capture_with_rows(factor: int, values: Sequence[Any]) -> LogicalProgram:
            return self._capture_rows(arguments, dims, factor, growing, values)

        try:
            program = capture_with_rows(1, known)
            found = add_loss_normalizers(program, capture_with_rows, dims, reads=known, line=self._job.line)
        except CaptureError:
            return None
        hashes: dict[fx.Node, str] = {}
        nodes = [node for node, _ in found.program.outputs[len(found.program.outputs) - len(found.adjustments) :]]
        return found.adjustments, [hash_computation(node, hashes) for node in nodes]

    def _capture_rows(
        self,
        arguments: FlattenedArguments,
        dims: dict[int, int],
        factor: int,
        growing: frozenset[int],
        known: Sequence[Any],
    ) -> LogicalProgram:
        """Capture the job for `factor` times as many rows, with the plain arguments at `growing` as many times.

        `known` has the values of tensors that the job's Python reads.
        """
        job = self._job
        shapes = [
            scale_rows(shape, dims[index], factor) if index in dims else shape
            for index, shape in enumerate(get_shapes(arguments))
        ]
        plain = tuple(factor * leaf if position in growing else leaf for position, leaf in enumerate(arguments.plain))
        source = JobSource(name=job.name, function=job.function, modules=job.modules, trains=True, line=job.line)
        reads = ValueReads(known)
        try:
            captured = capture(source, replace(arguments, plain=plain).unflatten, shapes, self._device, reads=reads)
        except ValueNeeded:
            reads.lines.append("")
        if len(reads.lines) != len(known):
            raise CaptureError(
                expected="a job that reads as many values of tensors for any number of rows (accumulate=)",
                found=f"{len(known)} for this batch, and others for a larger one",
                fix="compute with tensors, or train without accumulate=",
                where=job.line,
            )
        return captured.program


def find_row_dims(arguments: FlattenedArguments, job: JobDefinition) -> tuple[int, dict[int, int]]:
    """Return the number of rows of a call, and which dim of which tensor argument holds them."""
    found = {index: find_batch_dim(arguments, index) for index in range(len(arguments.tensors))}
    dims = {index: dim for index, dim in found.items() if dim is not None}
    if not dims:
        raise CaptureError(
            expected=f"a batch among the arguments of job {job.name!r}, to weight calls by its rows",
            found="no tensor with a dim",
            fix="pass the batch as an argument, or omit accumulate=",
            where=job.line,
        )
    first = next(iter(dims))
    rows = arguments.tensors[first].shape[dims[first]]
    return rows, {index: dim for index, dim in dims.items() if arguments.tensors[index].shape[dim] == rows}


def scale_rows(shape: ArgumentShape, dim: int, factor: int) -> ArgumentShape:
    """Return the shape with `factor` times as many rows."""
    sizes = list(shape.shape)
    sizes[dim] *= factor
    return replace(shape, shape=tuple(sizes))
