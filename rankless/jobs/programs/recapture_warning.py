"""Warn of plain numbers among a job's arguments that change: each value is part of a program and costs a capture."""

from collections.abc import Callable, Hashable
from typing import Any

from rankless.jobs.arguments import FlattenedArguments, find_leaf_names
from rankless.jobs.definition import JobDefinition

WARN_AFTER_VALUES = 3
"""Number of values of one argument after which the user is warned."""


class RecaptureWarner:
    """Warns once of an argument whose changing numbers cause repeated captures."""

    def __init__(self, job: JobDefinition, notify: Callable[[str], None]) -> None:
        self._job = job
        self._notify = notify
        self._values: dict[Hashable, list[set[Any]]] = {}

    def record(self, arguments: FlattenedArguments) -> None:
        """Record the numbers of a call that needs a new cache entry."""
        values = self._values.setdefault(arguments.spec, [set() for _ in arguments.plain])
        for index, (seen, value) in enumerate(zip(values, arguments.plain, strict=True)):
            if not is_number(value) or value in seen or len(seen) == WARN_AFTER_VALUES:
                continue
            seen.add(value)
            if len(seen) == WARN_AFTER_VALUES:
                name = find_leaf_names(self._job.function, arguments)[index]
                self._notify(
                    f"{self._job.line}: job {self._job.name!r} is captured again for each value of {name!r}, "
                    f"{value!r} now (correct, but slow); if it changes often pass a tensor: torch.tensor({value!r})"
                )


def is_number(leaf: Any) -> bool:
    """Whether a leaf is a number other than a boolean."""
    return isinstance(leaf, int | float | complex) and not isinstance(leaf, bool)
