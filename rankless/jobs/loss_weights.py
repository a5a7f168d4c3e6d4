"""What the loss of each call is divided by, read beside the job: in its program on a mesh, alone on one device."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from rankless.compiler.analysis.loss_normalizers import add_loss_normalizers, keep_last_results
from rankless.compiler.capture.capture import ArgumentShape, CapturedJob, JobSource, capture
from rankless.compiler.ir.logical_program import LogicalProgram
from rankless.context.world import World
from rankless.data.logical_tensor import LogicalTensor
from rankless.errors import CaptureError
from rankless.jobs.arguments import Arguments, placements_of, shapes_of
from rankless.jobs.definition import JobDefinition
from rankless.jobs.executable import Executable
from rankless.jobs.gradient_accumulation import Count
from rankless.jobs.program_cache import ProgramCache
from rankless.parallel.placement import Shard


class LossWeights:
    """Programs of one job with the counts of its loss among their results; `alone`: with nothing but the counts."""

    def __init__(self, job: JobDefinition, world: World, *, alone: bool) -> None:
        self._job = job
        self._world = world
        self._alone = alone
        self._device = job.device(world.mesh.device)
        self._finishes: dict[int, tuple[tuple[float, float | None], ...]] = {}
        self.programs = ProgramCache(job, world, changed=self._changed)

    def of_call(self, arguments: Arguments) -> tuple[Count, ...]:
        """The counts of a call on one device."""
        call = self.programs.look_up(arguments, placements_of(arguments, self._world.mesh))
        prepared = call.known or self.programs.captured(call)
        values = [
            arguments.tensors[slot] if isinstance(slot, int) else slot if isinstance(slot, Tensor) else slot.tensor()
            for slot in prepared.slots
        ]
        sizes = list(prepared.sizes(arguments).values())
        return self.read(prepared, prepared.local([value.detach() for value in values], sizes))

    def read(self, prepared: Executable, results: Sequence[Tensor]) -> tuple[Count, ...]:
        """The counts among a program's results: the last ones."""
        adjustments = self._finishes[id(prepared.captured)]
        totals = [float(total) for total in results[len(results) - len(adjustments) :]]
        return tuple(Count(total, plus, least) for total, (plus, least) in zip(totals, adjustments, strict=True))

    def _changed(self, captured: CapturedJob, arguments: Arguments) -> LogicalProgram:
        """The captured program with its counts, or these alone."""
        rows, dims = rows_of(arguments, self._job)

        def capture_with_rows(times: int) -> LogicalProgram:
            return self._captured_with(arguments, rows, dims, times)

        found = add_loss_normalizers(captured.program, capture_with_rows, dims, line=self._job.line)
        self._finishes[id(captured)] = found.adjustments
        return keep_last_results(found.program, len(found.adjustments)) if self._alone else found.program

    def _captured_with(self, arguments: Arguments, rows: int, dims: dict[int, int], times: int) -> LogicalProgram:
        """The job captured for so many times the rows. A plain argument that is the number of rows grows with them."""
        job = self._job
        shapes = [
            grown(shape, dims[index], times) if index in dims else shape
            for index, shape in enumerate(shapes_of(arguments))
        ]
        plain = tuple(
            times * leaf if isinstance(leaf, int) and not isinstance(leaf, bool) and leaf == rows else leaf
            for leaf in arguments.plain
        )
        source = JobSource(name=job.name, function=job.function, modules=job.modules, trains=True, line=job.line)
        return capture(source, replace(arguments, plain=plain).joined, shapes, self._device).program


def rows_of(arguments: Arguments, job: JobDefinition) -> tuple[int, dict[int, int]]:
    """How many rows a call has, and which dim holds them in which tensor argument: all of that length in dim 0."""
    lengths = {
        index: tensor.placement.dim
        if isinstance(tensor, LogicalTensor) and isinstance(tensor.placement, Shard)
        else dim
        for index, (tensor, dim) in enumerate(zip(arguments.tensors, arguments.batch_dims, strict=True))
        if dim is not None and tensor.dim() > dim
    }
    if not lengths:
        raise CaptureError(
            expected=f"a batch among the arguments of job {job.name!r}, for calls to be weighted by its rows",
            found="no tensor with a dim",
            fix="pass the batch as an argument, or leave accumulate= away",
            where=job.line,
        )
    first = next(iter(lengths))
    rows = arguments.tensors[first].shape[lengths[first]]
    return rows, {index: dim for index, dim in lengths.items() if arguments.tensors[index].shape[dim] == rows}


def grown(shape: ArgumentShape, dim: int, times: int) -> ArgumentShape:
    """The shape with so many times the rows."""
    sizes = list(shape.shape)
    sizes[dim] *= times
    return replace(shape, shape=tuple(sizes))
