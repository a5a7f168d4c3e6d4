"""Every error that a user of Rankless may catch, in one tree.

RanklessError            base of all errors below
├── ConfigError          settings or arguments that cannot work
│   └── CallError        arguments that a process group cannot take
├── LaunchError          a worker that did not start, failed or died
├── JoinError            a process that cannot join its job
├── CaptureError         a job that cannot become one program
├── ProgramMismatch      ranks that captured different programs for one job
├── RanksDiverged        ranks that make different calls, or the same call with different values
├── CollectiveError      ranks whose calls of a collective do not match
├── DataError            a data set, a batch or an argument that a loader or a job cannot take
├── DeferredError        a use of a model that was built in `rankless.deferred()` and has no values yet
├── StepError            a training step that cannot be made, or must not be made
├── TableError           a table of rows by ids that cannot be used so
├── ServerError          a server of tables that cannot be reached or used
├── LostWorkerError      a worker that was lost, and without which this one cannot continue
└── CheckpointError      a checkpoint that cannot be written or read

StepsDone (SystemExit)   the normal end of a run that was limited to a number of steps

Every error in the tree says what Rankless expected, what it found, and how to fix it.
"""

from collections.abc import Callable
from typing import Self


class RanklessError(Exception):
    """Base class of every error that Rankless raises on purpose.

    Rankless raises this class itself if `rankless.once` cannot return its result, or if a script calls a function for
    all ranks inside `rankless.once`.

    Attributes:
        expected (object): What Rankless expected.
        found (object): What it found instead.
        fix (str): What to change.
        where (str | None): File and line of the user's script; None if the line is not known.

    Example:
        >>> try:
        ...     rankless.loader([1, 2, 3], batch_size=0)
        ... except rankless.RanklessError as error:
        ...     print(type(error).__name__, "found", error.found)
        DataError found 0
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

    def add_location(self, where: str | None) -> Self:
        """Return the same error with a line of the user's script, unless the error has one already."""
        if self.where is not None or where is None:
            return self
        return type(self)(expected=self.expected, found=self.found, fix=self.fix, where=where)

    def __str__(self) -> str:
        return "\n" + str(self.args[0])

    def __reduce__(self) -> tuple[Callable[..., "RanklessError"], tuple[object, ...]]:
        # Errors cross processes (data loading workers, spawned workers); keyword-only arguments do not pickle.
        return _rebuild, (type(self), str(self.expected), str(self.found), self.fix, self.where)


def _rebuild(kind: type[RanklessError], expected: str, found: str, fix: str, where: str | None) -> RanklessError:
    return kind(expected=expected, found=found, fix=fix, where=where)


class ConfigError(RanklessError):
    """Raised for settings or arguments that cannot work.

    A launcher raises it before it starts any process. A function raises it before it does anything else.
    It has the attributes of `RanklessError`.
    """


class CallError(ConfigError, RuntimeError):
    """Raised for tensors or options that a process group of Rankless cannot take.

    It is a `RuntimeError` too, like the errors of PyTorch's own process groups, so scripts that try what a group takes
    need not know which group they have. It has the attributes of `RanklessError`.
    """


class LaunchError(RanklessError):
    """Raised if a worker cannot start, fails or dies.

    `rankless.spawn` raises it if a worker ends without a result, for example after a signal. An exception in the
    spawned function is not a `LaunchError`: `rankless.spawn` raises that exception itself, with a note that names the
    rank. It has the attributes of `RanklessError`.
    """


class JoinError(RanklessError):
    """Raised if a process cannot join its job.

    Examples: the address is in use, ranks are missing at the timeout, two processes have one rank.
    It has the attributes of `RanklessError`.
    """


class CaptureError(RanklessError):
    """Raised if Rankless cannot capture a job as one program.

    `where` is the line of the user's script that cannot be captured. It has the attributes of `RanklessError`.
    """


class ProgramMismatch(RanklessError):
    """Raised on every rank if the ranks captured different programs for one call of a job.

    It has the attributes of `RanklessError`.
    """


class RanksDiverged(RanklessError):
    """Raised if ranks make different calls, or make the same call with different values.

    Jobs, loaders, `save`, `load`, `once`, `check_synchronized`, `check_shards` and `broadcast_parameters` raise it.
    It has the attributes of `RanklessError`.
    """


class CollectiveError(RanklessError, RuntimeError):
    """Raised if the ranks' calls of a collective do not match, or if a rank does not take part in it.

    It has the attributes of `RanklessError`. It is a `RuntimeError` too, like the errors of PyTorch's own process
    groups, so scripts that handle those also handle this one.
    """


class DataError(RanklessError):
    """Raised for a data set, a batch or an argument that a loader or a job cannot take.

    The exception of a data set in a data loading worker is the error's `__cause__`.
    It has the attributes of `RanklessError`.
    """


class DeferredError(RanklessError):
    """Raised if a script needs values of a model that was built in `rankless.deferred()`, before it has any.

    It has the attributes of `RanklessError`.
    """


class StepError(RanklessError):
    """Raised instead of making a training step that would be wrong.

    Examples: with `check_finite=True`, a loss or a gradient that is not finite; with `accumulate=k`, loss terms that
    cannot be combined exactly. It has the attributes of `RanklessError`.
    """


class TableError(RanklessError):
    """Raised if a table of rows by ids cannot use settings, ids or an optimizer, or has no memory for more rows.

    It has the attributes of `RanklessError`.

    Example:
        >>> rankless.parameter_server.Embedding(16, max_rows=0)
        Traceback (most recent call last):
        rankless.errors.TableError:
        expected: max_rows of at least 1
        found:    0
        fix:      change the settings of the table
    """


class ServerError(RanklessError):
    """Raised if a server of tables cannot be reached, has died, or does not belong to this run.

    The error names the server and its address. It has the attributes of `RanklessError`.
    """


class LostWorkerError(RanklessError):
    """Raised if a worker was killed in a run that goes on without others, and this one cannot continue without it.

    The run ends, and names the worker that was killed. The error has the attributes of `RanklessError`.
    """


class CheckpointError(RanklessError):
    """Raised if a checkpoint cannot be written or read, on every rank.

    The previous checkpoint at the path stays as it was. It has the attributes of `RanklessError`.
    """


class StepsDone(SystemExit):
    """Raised in the script after the last step of a run that is limited to a number of steps, as `rankless verify` is.

    It ends the script as `sys.exit(0)` does: `finally` blocks run, and `except Exception` does not catch it.

    Attributes:
        code (int): The exit code, 0.
    """
