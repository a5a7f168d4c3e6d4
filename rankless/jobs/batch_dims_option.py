"""The batch dims of a job's arguments, where the script names them with `batch_dims=`.

They decide how a tensor is split, and so the speed of a call. They do not change its result.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch.utils import _pytree as pytree

from rankless.data.logical_tensor import LogicalTensor
from rankless.errors import ConfigError, DataError
from rankless.jobs.arguments import TENSOR, FlattenedArguments, find_leaf_names
from rankless.parallel.tensor_placement import Shard


class BatchDims:
    """The `batch_dims=` of one job: argument name to dim, None for no batch. All others have the batch in dim 0."""

    def __init__(self, function: Callable[..., Any], marks: Mapping[str, int | None]) -> None:
        self._parameters = dict(inspect.signature(function).parameters)
        self._function = function
        self._name = getattr(function, "__name__", "job")
        self._marks = dict(marks)
        self._leaves: dict[tuple[pytree.TreeSpec, tuple[bool, ...]], tuple[int | None, ...]] = {}
        for name, dim in self._marks.items():
            self._require_known(name)
            if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int) or dim < 0):
                raise ConfigError(
                    expected=f"batch_dims= of job {self._name!r} with dims counted from 0, or None for no batch",
                    found=f"{name!r}: {dim!r}",
                    fix="pass the number of the dim that holds the samples",
                )

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy of the job has: the marks, without what the calls of this process have found."""
        return {**self.__dict__, "_leaves": {}}

    def apply(self, arguments: FlattenedArguments) -> FlattenedArguments:
        """Return the call with the batch dim of every tensor.

        Raises `DataError` if a loader split the batch on another dim.
        """
        is_tensor = tuple([leaf is TENSOR for leaf in arguments.plain])
        key = arguments.spec, is_tensor
        if key not in self._leaves:
            names = find_leaf_names(self._function, arguments)
            self._leaves[key] = tuple(
                self._marks.get(name, 0) for name, there in zip(names, is_tensor, strict=True) if there
            )
        dims = self._leaves[key]
        for tensor, dim in zip(arguments.tensors, dims, strict=True):
            if (
                isinstance(tensor, LogicalTensor)
                and isinstance(tensor.placement, Shard)
                and tensor.placement.dim != dim
            ):
                raise DataError(
                    expected=f"batches of a loader in job {self._name!r} in dim {tensor.placement.dim}, where it "
                    "collates the samples",
                    found=f"batch_dims= with {dim} for a tensor of shape {list(tensor.shape)}",
                    fix="omit the argument from batch_dims, or collate samples in dim 0 and transpose in the job",
                )
        return replace(arguments, batch_dims=dims)

    def _require_known(self, name: str) -> None:
        open_ended = any(item.kind is inspect.Parameter.VAR_KEYWORD for item in self._parameters.values())
        if name in self._parameters or open_ended:
            return
        known = ", ".join(self._parameters) or "none"
        raise ConfigError(
            expected=f"batch_dims= to name arguments of job {self._name!r}: {known}",
            found=repr(name),
            fix="use a name of the function's signature",
        )
