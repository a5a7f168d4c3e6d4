"""Adasum of what each rank's step changes: every rank steps alone, then the changes are combined."""

from collections.abc import Callable, Mapping

import torch

from rankless.compat.horovod import context
from rankless.compat.horovod.engine.requests import Kind, Reduction, Submission
from rankless.compat.horovod.torch.backward_passes import BackwardPasses
from rankless.compat.horovod.torch.compression import Compressor
from rankless.compat.horovod.torch.operations.checks import sendable


class DeltaReduction:
    """Combines the changes that a step makes to some parameters."""

    def __init__(self, names: Mapping[torch.Tensor, str], passes: int, compression: type[Compressor]) -> None:
        self.passes = BackwardPasses(names, passes, lambda _: None)
        self._names = names
        self._compression = compression

    def restart(self) -> None:
        """Count backward passes anew."""
        self.passes.restart()

    @torch.no_grad()
    def step(self, step: Callable[[], object]) -> None:
        """Let `step` change the parameters, and replace its changes by the Adasum of all ranks'."""
        starts = {parameter: parameter.detach().clone() for parameter in self._names}
        step()
        negotiator = context.current().negotiator
        handle = negotiator.new_handle()
        submissions, contexts = [], []
        for parameter, start in starts.items():
            small, compression_context = self._compression.compress((parameter.detach() - start).contiguous())
            row = sendable(small)
            name = self._names[parameter]
            submissions.append(
                Submission(kind=Kind.ALLREDUCE, name=name, tensor=row, output=row, reduction=Reduction.ADASUM)
            )
            contexts.append(compression_context)
        negotiator.submit(handle, submissions)
        results = negotiator.synchronize(handle)
        for (parameter, start), result, compression_context in zip(starts.items(), results, contexts, strict=True):
            parameter.copy_(start + self._compression.decompress(result, compression_context))
        self.restart()
