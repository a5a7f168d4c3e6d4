"""Plain numbers among a job's arguments: each value is part of a program, so one that changes costs captures."""

from collections.abc import Callable, Hashable
from typing import Any

from rankless.jobs.arguments import Arguments, find_leaf_names
from rankless.jobs.definition import JobDefinition

DISTINCT = 3
"""After so many values of one argument the user is told."""


class VaryingNumbers:
    """Tells the user, once, of an argument whose numbers make the job be captured again and again."""

    def __init__(self, job: JobDefinition, notify: Callable[[str], None]) -> None:
        self._job = job
        self._notify = notify
        self._values: dict[Hashable, list[set[Any]]] = {}

    def note(self, arguments: Arguments) -> None:
        """Note the numbers of a call that is the first with them."""
        values = self._values.setdefault(arguments.spec, [set() for _ in arguments.plain])
        for place, (known, value) in enumerate(zip(values, arguments.plain, strict=True)):
            if not is_number(value) or value in known or len(known) == DISTINCT:
                continue
            known.add(value)
            if len(known) == DISTINCT:
                name = find_leaf_names(self._job.function, arguments)[place]
                self._notify(
                    f"{self._job.line}: job {self._job.name!r} is captured anew for each number that {name!r} is, "
                    f"{value!r} now (right, but slow); if it changes often pass a tensor: torch.tensor({value!r})"
                )


def is_number(leaf: Any) -> bool:
    """Whether a leaf is a number whose values are many, as those of a truth value are not."""
    return isinstance(leaf, int | float | complex) and not isinstance(leaf, bool)
