"""Run a job on a simulated mesh whose last axis divides parameters, and compare it with plain PyTorch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from simulated_pipelines import capture_job
from simulated_ranks import Outcome, assert_runs_as_plain, divide_evenly, run_program_on_axes
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rankless.compiler.tensor_parallel import DimRequest, TensorDivider
from rankless.parallel.tensor_placement import Placement


class InDoublePrecision(TorchFunctionMode):
    """Within the context, models that compute some values in float32 compute them in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of PyTorch."""
        if func is Tensor.float:
            func = Tensor.double
        given = [torch.float64 if item is torch.float32 else item for item in args]
        named = {name: torch.float64 if item is torch.float32 else item for name, item in (kwargs or {}).items()}
        return func(*given, **named)


def check_tensor_axis(
    function: Callable[..., Any],
    modules: Mapping[str, nn.Module],
    arguments: Sequence[Tensor],
    axis_sizes: Sequence[int],
    requests: Mapping[str, int | None] | None = None,
    **settings: Any,
) -> tuple[Outcome, dict[str, Placement]]:
    """Run a job whose last axis divides parameters; axes before it divide the batch. Return how they are divided.

    Args:
        function: The job.
        modules: Its modules by name.
        arguments: The arguments of a call.
        axis_sizes: The ranks along each axis.
        requests: The dims in which parameters are divided, by name. Default: chosen for all of them.
        settings: Those of `JobSource`.
    """

    def precise(*given: Any) -> Any:
        with InDoublePrecision():
            return function(*given)

    program = capture_job(precise, modules, arguments, True, **settings)
    wanted = {name: DimRequest(dim=dim) for name, dim in (requests or {}).items()}
    states: dict[str, Placement] = dict(TensorDivider(program, axis_sizes[-1], wanted).divide(fills=requests is None))
    outer = len(axis_sizes) - 1
    shardings = [
        divide_evenly(item.shape, axis_sizes, [0 if item.dim() and axis < outer else None for axis in range(outer + 1)])
        for item in arguments
    ]
    outcome = assert_runs_as_plain(
        lambda: run_program_on_axes(program, arguments, modules, axis_sizes, shardings, states),
        precise,
        modules,
        arguments,
    )
    return outcome, states
