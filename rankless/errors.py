"""One tree of errors. Each says what was expected, what was found, and how to mend it.

RanklessError
├── ConfigError          settings that cannot be run; found before any process starts
├── LaunchError        processes that could not be started, or a job whose worker failed
├── JoinError          a process that cannot join its job: an address taken, ranks missing, a rank given twice
├── CaptureError       a job that cannot become one program; carries the line of the user's script
├── ProgramMismatch    ranks that captured different programs
├── RanksDiverged        ranks that come to different calls, or to the same with different inputs
├── CollectiveError    ranks that call different collectives, or one that does not come; see `rankless.collectives`
├── DataError          a data set or a batch that the loader or a job cannot take
├── StepError          a training step that cannot be made, or must not be
└── CheckpointError    a checkpoint that cannot be written or read
"""

from collections.abc import Callable
from typing import Self


class RanklessError(Exception):
    """Base of every error that Rankless raises on purpose.

    `expected`, `found` and `fix` are shown as three lines; `where` (a file and line of the user's script) as a
    fourth where it is known.
    """

    def __init__(self, *, expected: object, found: object, fix: str, where: str | None = None) -> None:
        self.expected = expected
        self.found = found
        self.fix = fix
        self.where = where
        lines = [f"expected: {expected}", f"found:    {found}", f"fix:      {fix}"]
        if where:
            lines.append(f"where:    {where}")
        super().__init__("\n".join(lines))

    def located(self, where: str | None) -> Self:
        """The same error with a line of the user's script, unless it has one."""
        if self.where is not None or where is None:
            return self
        return type(self)(expected=self.expected, found=self.found, fix=self.fix, where=where)

    def __str__(self) -> str:
        return "\n" + str(self.args[0])

    def __reduce__(self) -> tuple[Callable[..., "RanklessError"], tuple[object, ...]]:
        # Errors cross processes (a loader's readers, a test's workers); keyword-only arguments do not pickle.
        return _rebuild, (type(self), str(self.expected), str(self.found), self.fix, self.where)


def _rebuild(kind: type[RanklessError], expected: str, found: str, fix: str, where: str | None) -> RanklessError:
    return kind(expected=expected, found=found, fix=fix, where=where)


class ConfigError(RanklessError):
    """Settings that cannot be run."""


class LaunchError(RanklessError):
    """Processes that could not be started, or a job whose worker failed."""


class JoinError(RanklessError):
    """A process that cannot join its job."""


class CaptureError(RanklessError):
    """A job that cannot become one program."""


class ProgramMismatch(RanklessError):
    """Ranks that captured different programs."""


class RanksDiverged(RanklessError):
    """Ranks that come to different calls, or to the same call with different inputs or models."""


class CollectiveError(RanklessError):
    """Ranks whose calls of a collective do not fit together, or a rank that does not come to one."""


class DataError(RanklessError):
    """A data set or a batch that the loader or a job cannot take."""


class StepError(RanklessError):
    """A training step that cannot be made, or must not be."""


class CheckpointError(RanklessError):
    """A checkpoint that cannot be written or read."""
