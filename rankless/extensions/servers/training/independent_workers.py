"""Workers that train on batches of their own: what they count, and where they meet.

Note [where workers meet]: between two of their own batches workers do not wait for each other. They meet at the end of
a pass over a loader, before a job that predicts, and before a save or a load, if they have trained since they last met.
All run the same script, so all come there. Then they compare which calls they have made, and read from the servers what
all of them have trained.
"""

import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rankless.collectives.byte_messages import all_gather_bytes
from rankless.collectives.mesh_collectives import all_reduce, broadcast
from rankless.errors import ConfigError, RanksDiverged
from rankless.extensions.servers.training.own_steps import OwnSteps, SharedParameters
from rankless.ownership.state_owner import StateOwner
from rankless.parallel.mesh import Mesh

StepOnServers = Callable[[Optimizer], AbstractContextManager[None]]
"""Returns a context in which the servers make an optimizer's step."""
_SAMPLED_ELEMENTS = 64
"""Of each end of a tensor, for the digest of a batch."""


class IndependentWorkers:
    """The workers of a run in which each trains on batches of its own.

    Args:
        workers: The mesh of all of them.
        find_steps: Returns the steps of this worker, once a job has shared tables.
        staleness: By how many of its steps a worker may be ahead of the slowest one. None: there is no bound.
    """

    def __init__(self, workers: Mesh, find_steps: Callable[[], OwnSteps], staleness: int | None = None) -> None:
        self.workers = workers
        self._staleness = staleness
        self._jobs: set[str] = set()
        self._find_steps = find_steps
        self._calls = 0
        self._digest = 0
        self._has_trained = False
        self._modules: list[nn.Module] = []

    @property
    def parameters(self) -> SharedParameters:
        """The dense parameters on the servers."""
        return self._find_steps().parameters

    @property
    def is_current(self) -> bool:
        """Whether the workers have not trained since they last met: all have the same parameters."""
        return not self._has_trained

    def count_call(self, job: str, tensors: Sequence[Tensor], modules: Iterable[nn.Module]) -> None:
        """Note a call of a train job, which one of the workers makes.

        Args:
            job: The job's name and line.
            tensors: Its arguments, of which a part is compared when the workers meet.
            modules: The job's models.

        Raises:
            ConfigError: There are more train jobs than the staleness allows. A worker may have made one more call of
                each job than another one. At the last call before a meeting the two would wait for each other.
        """
        self._jobs.add(job)
        if self._staleness is not None and len(self._jobs) > self._staleness + 1:
            raise ConfigError(
                expected=f"at most {self._staleness + 1} train jobs with --staleness {self._staleness}",
                found=f"{len(self._jobs)}: {', '.join(sorted(self._jobs))}",
                fix=f"give --staleness {len(self._jobs) - 1} or more",
            )
        self._calls += 1
        self._has_trained = True
        self._modules += [module for module in modules if module not in self._modules]
        self._digest = zlib.crc32(job.encode(), self._digest)
        for tensor in tensors:
            self._digest = zlib.crc32(_sample(tensor), self._digest)

    def begin_step(self) -> None:
        """Begin a step of this worker alone."""
        self._find_steps().begin_step()

    def step_on_servers(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Return a context in which the servers make an optimizer's step."""
        return self.parameters.step_on_servers(optimizer)

    def meet(self, operation: str) -> None:
        """Wait for the other workers if they have trained since they last met, and read what all have trained.

        Args:
            operation: What follows, for errors.

        Raises:
            RanksDiverged: The workers have made different calls.
        """
        if not self._has_trained:
            return
        self._has_trained = False
        self.workers.check_sync_point(f"{operation}, after {self._calls} training calls")
        self._find_steps().send()
        self._require_same_calls(operation)  # all have sent what they have trained
        self._find_steps().read_all()
        self._average_buffers()
        all_gather_bytes(b"", mesh=self.workers)  # nobody trains on while another one still reads

    def _require_same_calls(self, operation: str) -> None:
        gathered = all_gather_bytes(struct.pack("<qI", self._calls, self._digest), mesh=self.workers)
        calls = [struct.unpack("<qI", each) for each in gathered]
        other = next((worker for worker, each in enumerate(calls) if each != calls[0]), None)
        if other is None:
            return
        counts = calls[0][0], calls[other][0]
        found = (
            f"{counts[0]} on worker 0, {counts[1]} on worker {other}"
            if counts[0] != counts[1]
            else f"other batches, or jobs in another order, on worker {other} than on worker 0"
        )
        raise RanksDiverged(
            expected=f"the same training calls with the same batches on all workers before {operation}",
            found=found,
            fix="let all workers run the same script on the same whole batches, in one order",
        )

    def _average_buffers(self) -> None:
        """Give all workers the mean of their buffers of floating point, and the first worker's other ones."""
        buffers = {id(each): each for module in self._modules for each in module.buffers()}.values()
        for buffer in buffers if self.workers.size > 1 else ():
            if buffer.is_floating_point():
                mean = all_reduce(buffer.detach().clone(), among=self.workers) / self.workers.size
                with torch.no_grad():
                    buffer.copy_(mean)
            else:
                broadcast(buffer, among=self.workers)


def _sample(tensor: Tensor) -> bytes:
    """Return the shape of a tensor, and some of its elements if they are on a CPU."""
    described = f"{tensor.dtype}{list(tensor.shape)}".encode()
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return described
    flat = tensor.detach().reshape(-1)
    ends = torch.cat([flat[:_SAMPLED_ELEMENTS], flat[-_SAMPLED_ELEMENTS:]]).contiguous()
    return described + ends.view(torch.uint8).numpy().tobytes() if ends.numel() else described


class ServedOwner(StateOwner):
    """Owns the states of jobs whose parameters servers hold: workers have copies of everything, and servers step."""

    def __init__(self, step_on_servers: StepOnServers) -> None:
        self._step_on_servers = step_on_servers

    def step(self, optimizer: Optimizer) -> None:
        """Send the gradients to the servers, which make the step."""
        with self._step_on_servers(optimizer):
            optimizer.step()
