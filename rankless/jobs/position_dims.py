"""The dims of positions of a job's arguments, which the axis `sequence` divides.

They decide how a tensor is split, and so the speed of a call. They do not change its result.
"""

from collections.abc import Hashable, Mapping
from dataclasses import replace

from rankless.errors import ConfigError
from rankless.jobs.arguments import TENSOR, FlattenedArguments, find_leaf_names, find_position_dim, name_argument
from rankless.jobs.definition import JobDefinition


class PositionDims:
    """The dims of positions of one job's arguments: those of a plan, those that the script names, or found ones.

    Args:
        job: The job.
        planned: The dims in the plan of the run, by argument; None if it has no plan.
    """

    def __init__(self, job: JobDefinition, planned: Mapping[str, int | None] | None) -> None:
        self._job = job
        self._planned = planned
        self._known: dict[Hashable, tuple[int | None, ...]] = {}

    def apply(self, arguments: FlattenedArguments) -> FlattenedArguments:
        """Return a call with the dim of positions of every tensor. Raises `ConfigError` for a name of no argument."""
        key = arguments.spec, arguments.plain, tuple([tensor.dim() for tensor in arguments.tensors])
        if key not in self._known:
            self._known[key] = self._find(arguments)
        return replace(arguments, position_dims=self._known[key])

    def _find(self, arguments: FlattenedArguments) -> tuple[int | None, ...]:
        function, count = self._job.function, len(arguments.tensors)
        if self._planned is not None:
            names = [name_argument(function, arguments, place) for place in range(count)]
            return tuple(self._planned.get(name) for name in names)
        found = [find_position_dim(arguments, place) for place in range(count)]
        marks = "auto" if self._job.plan is None else self._job.plan.sequence
        if marks == "auto":
            return tuple(found)
        leaves = zip(find_leaf_names(function, arguments), arguments.plain, strict=True)
        owners = [name for name, leaf in leaves if leaf is TENSOR]
        for name, dim in marks.items():
            sizes = [tensor.dim() for owner, tensor in zip(owners, arguments.tensors, strict=True) if owner == name]
            if not sizes or (dim is not None and max(sizes) <= dim):
                raise ConfigError(
                    expected=f"in sequence= tensor arguments of job {self._job.name!r}, with dims that they have: "
                    f"{', '.join(dict.fromkeys(owners)) or 'none'}",
                    found=f"{name!r}: {dim!r}" + (f" for {sizes[0]} dims" if sizes else ""),
                    fix="use the name of an argument, and a dim counted from 0, or None",
                    where=self._job.line,
                )
        return tuple(marks.get(owner, dim) for owner, dim in zip(owners, found, strict=True))
