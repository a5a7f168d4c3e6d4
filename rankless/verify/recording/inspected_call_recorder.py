"""The file of values of one job call: every value of its program, each in a few numbers."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from rankless.compiler.sharding.redistribute import Redistribution
from rankless.config.run_config import InspectedCall
from rankless.parallel.mesh import Mesh
from rankless.parallel.tensor_placement import Replicate, Sharding, compute_local_shape
from rankless.records.recorded_calls import ComputedValue, Role, encode_result, values_file
from rankless.verify.recording.tensor_sketch import Sketcher


class InspectedCallRecorder:
    """One rank's file of values of the inspected call."""

    def __init__(self, folder: str, rank: int, inspected: InspectedCall) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._stream = values_file(folder, rank).open("wb")
        self._inspected = inspected
        self._calls = 0
        self._sketches = Sketcher()

    def count_call(self, job: str) -> bool:
        """Count a call of a job, and return whether it is the one to inspect."""
        self._calls += job == self._inspected.job
        return job == self._inspected.job and self._calls == self._inspected.call

    def record(
        self, role: Role, name: str, tensor: Tensor, *, operator: str, line: str, inputs: tuple[str, ...]
    ) -> None:
        """Record a whole value."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        value = ComputedValue(
            role, name, operator, line, dtype, tuple(tensor.shape), self._sketches.sketch(tensor), inputs
        )
        self._stream.write(encode_result(value))
        self._stream.flush()


def gather_whole(local: Tensor, shape: Sequence[int], sharding: Sharding, mesh: Mesh) -> Tensor:
    """Return a value of this shape gathered from all ranks' pieces; a replicated value stays as this rank has it."""
    ranks = [axis.rank for axis in mesh.axes]
    for number, (axis, placement) in reversed(list(enumerate(zip(mesh.axes, sharding, strict=True)))):
        if not isinstance(placement, Replicate) and axis.size > 1:
            together = compute_local_shape(shape, sharding[:number], ranks[:number])
            gather = Redistribution(axis, placement, Replicate())
            # Not every backend gathers booleans.
            sent = local.to(torch.uint8) if local.dtype == torch.bool else local
            local = gather(sent, *gather.list_lengths(together)).to(local.dtype)
    return local
