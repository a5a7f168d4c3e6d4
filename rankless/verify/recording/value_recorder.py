"""What `rankless verify` writes down of one job call: every value of its program, whole, in a few numbers each."""

from pathlib import Path

import torch
from torch import Tensor

from rankless.compiler.sharding.redistribute import Redistribution
from rankless.config.run_config import InspectedCall
from rankless.parallel.mesh import Mesh
from rankless.parallel.placement import Placement, Replicate
from rankless.records.job_results import encode_result
from rankless.records.job_values import ComputedValue, Role, values_file
from rankless.verify.recording.tensor_sketch import Sketcher


class ValueRecorder:
    """One rank's file of values, for the one call that is wanted."""

    def __init__(self, folder: str, rank: int, wanted: InspectedCall) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._stream = values_file(folder, rank).open("wb")
        self._wanted = wanted
        self._calls = 0
        self._sketches = Sketcher()

    def count_call(self, job: str) -> bool:
        """Count a call of a job; whether it is the one wanted."""
        self._calls += job == self._wanted.job
        return job == self._wanted.job and self._calls == self._wanted.call

    def record(
        self, role: Role, name: str, tensor: Tensor, *, operator: str, line: str, inputs: tuple[str, ...]
    ) -> None:
        """Write down a whole value."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        value = ComputedValue(role, name, operator, line, dtype, tuple(tensor.shape), self._sketches.of(tensor), inputs)
        self._stream.write(encode_result(value))
        self._stream.flush()


def whole(local: Tensor, placement: Placement, mesh: Mesh) -> Tensor:
    """A value from all ranks' pieces, on every rank; a copy that each rank has stays its own."""
    if isinstance(placement, Replicate) or mesh.size == 1:
        return local
    gather = Redistribution(mesh, placement, Replicate())
    # Not every backend gathers truth values.
    sent = local.to(torch.uint8) if local.dtype == torch.bool else local
    return gather(sent, *gather.lengths).to(local.dtype)
