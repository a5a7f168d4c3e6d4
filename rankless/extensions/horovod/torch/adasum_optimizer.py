"""Adasum of the changes of each rank's step: every rank steps alone, then the ranks combine the changes."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rankless.extensions.horovod import context
from rankless.extensions.horovod.engine.requests import EngineRequest, OperationKind, ReduceOpCode
from rankless.extensions.horovod.torch.backward_passes import BackwardPasses
from rankless.extensions.horovod.torch.compression import Compressor
from rankless.extensions.horovod.torch.operations.checks import validate_tensor


class AdasumReduction:
    """Combines the changes that a step makes to the parameters."""

    def __init__(self, names: Mapping[torch.Tensor, str], passes: int, compression: type[Compressor]) -> None:
        self.passes = BackwardPasses(names, passes, lambda _: None)
        self._names = names
        self._compression = compression

    def restart(self) -> None:
        """Restart the count of backward passes."""
        self.passes.restart()

    def get_handles(self) -> dict[torch.Tensor, tuple[int | None, Any]]:
        """Return no handles: nothing is submitted before the step."""
        return {}

    @torch.no_grad()
    def step(self, step: Callable[[], object]) -> None:
        """Call `step`, and replace its changes to the parameters by the Adasum of all ranks' changes."""
        initial_values = {parameter: parameter.detach().clone() for parameter in self._names}
        step()
        scheduler = context.current().scheduler
        handle = scheduler.new_handle()
        requests, contexts = [], []
        for parameter, initial_value in initial_values.items():
            compressed, compression_context = self._compression.compress(
                (parameter.detach() - initial_value).contiguous()
            )
            buffer = validate_tensor(compressed)
            name = self._names[parameter]
            requests.append(
                EngineRequest(
                    kind=OperationKind.ALLREDUCE, name=name, tensor=buffer, output=buffer, reduction=ReduceOpCode.ADASUM
                )
            )
            contexts.append(compression_context)
        scheduler.submit(handle, requests)
        results = scheduler.synchronize(handle)
        for (parameter, initial_value), result, compression_context in zip(
            initial_values.items(), results, contexts, strict=True
        ):
            parameter.copy_(initial_value + self._compression.decompress(result, compression_context))
        self.restart()
