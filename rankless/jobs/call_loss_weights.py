"""Read the loss weights of each call, from the job's program on a mesh or from a program of their own."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from rankless.compiler.analysis.loss_normalizers import add_loss_normalizers, keep_last_results
from rankless.compiler.capture.capture import ArgumentShape, CapturedJob, JobSource, capture
from rankless.compiler.ir.logical_program import LogicalProgram
from rankless.context.world import World
from rankless.data.logical_tensor import LogicalTensor
from rankless.errors import CaptureError
from rankless.jobs.arguments import FlattenedArguments, get_placements, get_shapes
from rankless.jobs.definition import JobDefinition
from rankless.jobs.executable import Executable
from rankless.jobs.gradient_accumulation import LossWeight
from rankless.jobs.program_cache import ProgramCache
from rankless.parallel.tensor_placement import Shard


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
        self.programs = ProgramCache(job, world, transform=self._add_weights)

    def read_call(self, arguments: FlattenedArguments) -> tuple[LossWeight, ...]:
        """Return the loss weights of a call on one device."""
        call = self.programs.look_up(arguments, get_placements(arguments, self._world.mesh))
        executable = call.known or self.programs.capture_program(call)
        values = [
            arguments.tensors[slot] if isinstance(slot, int) else slot if isinstance(slot, Tensor) else slot.tensor()
            for slot in executable.slots
        ]
        sizes = list(executable.sizes(arguments).values())
        return self.read(executable, executable.local([value.detach() for value in values], sizes))

    def read(self, executable: Executable, results: Sequence[Tensor]) -> tuple[LossWeight, ...]:
        """Return the loss weights among a program's results, which are the last ones."""
        adjustments = self._offsets_and_minima[id(executable.captured)]
        totals = [float(total) for total in results[len(results) - len(adjustments) :]]
        return tuple(
            LossWeight(total, offset, minimum) for total, (offset, minimum) in zip(totals, adjustments, strict=True)
        )

    def _add_weights(self, captured: CapturedJob, arguments: FlattenedArguments) -> LogicalProgram:
        """Return the captured program with its loss weights, or only these."""
        rows, dims = find_row_dims(arguments, self._job)

        def capture_with_rows(factor: int) -> LogicalProgram:
            return self._capture_rows(arguments, rows, dims, factor)

        found = add_loss_normalizers(captured.program, capture_with_rows, dims, line=self._job.line)
        self._offsets_and_minima[id(captured)] = found.adjustments
        return keep_last_results(found.program, len(found.adjustments)) if self._weights_only else found.program

    def _capture_rows(
        self, arguments: FlattenedArguments, rows: int, dims: dict[int, int], factor: int
    ) -> LogicalProgram:
        """Capture the job for `times` as many rows.

        A plain argument that equals the number of rows grows with them.
        """
        job = self._job
        shapes = [
            scale_rows(shape, dims[index], factor) if index in dims else shape
            for index, shape in enumerate(get_shapes(arguments))
        ]
        plain = tuple(
            factor * leaf if isinstance(leaf, int) and not isinstance(leaf, bool) and leaf == rows else leaf
            for leaf in arguments.plain
        )
        source = JobSource(name=job.name, function=job.function, modules=job.modules, trains=True, line=job.line)
        return capture(source, replace(arguments, plain=plain).unflatten, shapes, self._device).program


def find_row_dims(arguments: FlattenedArguments, job: JobDefinition) -> tuple[int, dict[int, int]]:
    """Return the number of rows of a call, and which dim of which tensor argument holds them."""
    lengths = {
        index: tensor.placement.dim
        if isinstance(tensor, LogicalTensor) and isinstance(tensor.placement, Shard)
        else dim
        for index, (tensor, dim) in enumerate(zip(arguments.tensors, arguments.batch_dims, strict=True))
        if dim is not None and tensor.dim() > dim
    }
    if not lengths:
        raise CaptureError(
            expected=f"a batch among the arguments of job {job.name!r}, to weight calls by its rows",
            found="no tensor with a dim",
            fix="pass the batch as an argument, or omit accumulate=",
            where=job.line,
        )
    first = next(iter(lengths))
    rows = arguments.tensors[first].shape[lengths[first]]
    return rows, {index: dim for index, dim in lengths.items() if arguments.tensors[index].shape[dim] == rows}


def scale_rows(shape: ArgumentShape, dim: int, factor: int) -> ArgumentShape:
    """Return the shape with `times` as many rows."""
    sizes = list(shape.shape)
    sizes[dim] *= factor
    return replace(shape, shape=tuple(sizes))
