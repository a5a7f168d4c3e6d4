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
from rankless.jobs.arguments import Arguments, get_placements, get_shapes
from rankless.jobs.definition import JobDefinition
from rankless.jobs.executable import Executable
from rankless.jobs.gradient_accumulation import LossWeight
from rankless.jobs.program_cache import ProgramCache
from rankless.parallel.placement import Shard


class LossWeightReader:
    """Programs of one job with the counts of its loss among their results; `alone`: with nothing but the counts."""

    def __init__(self, job: JobDefinition, world: World, *, weights_only: bool) -> None:
        self._job = job
        self._world = world
        self._weights_only = weights_only
        self._device = job.device(world.mesh.device)
        self._finishes: dict[int, tuple[tuple[float, float | None], ...]] = {}
        self.programs = ProgramCache(job, world, transform=self._add_weights)

    def of_call(self, arguments: Arguments) -> tuple[LossWeight, ...]:
        """The counts of a call on one device."""
        call = self.programs.look_up(arguments, get_placements(arguments, self._world.mesh))
        executable = call.known or self.programs.capture_program(call)
        values = [
            arguments.tensors[input_slot]
            if isinstance(input_slot, int)
            else input_slot
            if isinstance(input_slot, Tensor)
            else input_slot.tensor()
            for input_slot in executable.slots
        ]
        sizes = list(executable.sizes(arguments).values())
        return self.read(executable, executable.local([value.detach() for value in values], sizes))

    def read(self, executable: Executable, results: Sequence[Tensor]) -> tuple[LossWeight, ...]:
        """The counts among a program's results: the last ones."""
        adjustments = self._finishes[id(executable.captured)]
        totals = [float(total) for total in results[len(results) - len(adjustments) :]]
        return tuple(
            LossWeight(total, offset, minimum) for total, (offset, minimum) in zip(totals, adjustments, strict=True)
        )

    def _add_weights(self, captured: CapturedJob, arguments: Arguments) -> LogicalProgram:
        """The captured program with its counts, or these alone."""
        rows, dims = find_row_dims(arguments, self._job)

        def capture_with_rows(times: int) -> LogicalProgram:
            return self._capture_rows(arguments, rows, dims, times)

        found = add_loss_normalizers(captured.program, capture_with_rows, dims, line=self._job.line)
        self._finishes[id(captured)] = found.adjustments
        return keep_last_results(found.program, len(found.adjustments)) if self._weights_only else found.program

    def _capture_rows(self, arguments: Arguments, rows: int, dims: dict[int, int], times: int) -> LogicalProgram:
        """The job captured for so many times the rows. A plain argument that is the number of rows grows with them."""
        job = self._job
        shapes = [
            scale_rows(shape, dims[index], times) if index in dims else shape
            for index, shape in enumerate(get_shapes(arguments))
        ]
        plain = tuple(
            times * leaf if isinstance(leaf, int) and not isinstance(leaf, bool) and leaf == rows else leaf
            for leaf in arguments.plain
        )
        source = JobSource(name=job.name, function=job.function, modules=job.modules, trains=True, line=job.line)
        return capture(source, replace(arguments, plain=plain).unflatten, shapes, self._device).program


def find_row_dims(arguments: Arguments, job: JobDefinition) -> tuple[int, dict[int, int]]:
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


def scale_rows(shape: ArgumentShape, dim: int, times: int) -> ArgumentShape:
    """The shape with so many times the rows."""
    sizes = list(shape.shape)
    sizes[dim] *= times
    return replace(shape, shape=tuple(sizes))
