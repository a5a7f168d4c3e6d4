"""What `import rankless` offers a script. Each function hands the process's world to the views."""

import atexit
import sys
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import msgspec

from rankless import checkpoint
from rankless.collectives.messages import broadcast_bytes
from rankless.errors import RanklessError
from rankless.observe.progress import ProgressDisplay
from rankless.records.events import AnyRecord, Progress, Said
from rankless.runtime.current import current
from rankless.runtime.joined import Observer, Runtime
from rankless.views.definition import Stepping
from rankless.views.job import Job, Models, Optimizers, make_job
from rankless.views.loader import Loader, LoaderOptions, Reading
from rankless.views.world import World

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class _Answer(msgspec.Struct, frozen=True):
    """What `once` sends to the other ranks."""

    value: msgspec.Raw
    error: str = ""


def rank() -> int:
    """This process's number in the job, from 0."""
    return _current().world.mesh.rank


def world_size() -> int:
    """How many processes train together; 1 without a launcher."""
    return _current().world.mesh.size


def local_rank() -> int:
    """This process's number on its host, from 0."""
    return _current().local_rank


def once(function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
    """What `function` returns on rank 0, the only one that calls it, on every rank.

    The result must be plain data (numbers, text, bytes, lists, dicts, None). If `function` raises, every rank
    raises: rank 0 what it was, the others a `RanklessError` that names it.
    """
    mesh = _current().world.mesh
    failure: Exception | None = None
    answer = _Answer(msgspec.Raw(b"\xc0"))
    if mesh.rank == 0:
        try:
            answer = _Answer(msgspec.Raw(_encode(function(*args, **kwargs), function)))
        except Exception as error:  # it is raised below, after the others have been told
            failure = error
            answer = _Answer(msgspec.Raw(b"\xc0"), f"{type(error).__name__}: {error}")
    data = broadcast_bytes(msgspec.msgpack.encode(answer), mesh=mesh)
    if failure is not None:
        raise failure
    received = msgspec.msgpack.decode(data, type=_Answer)
    if received.error:
        raise RanklessError(
            expected=f"rankless.once({_name(function)}) to succeed on rank 0",
            found=f"rank 0 raised {received.error}",
            fix="mend what rank 0 reports",
        )
    result: Result = msgspec.msgpack.decode(received.value)
    return result


def job(
    *,
    model: Models,
    optimizer: Optimizers | None = None,
    accumulate: int = 1,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    gradient_norm: bool = False,
    check_finite: bool = False,
    view: str = "consistent",
) -> Callable[[Callable[Arguments, Result]], Job[Arguments, Result]]:
    """A decorator that makes a function on whole batches a job: written for one device, run on all of them.

    `model` is a module, or a list or dict of modules: all that the function uses. With an `optimizer` (or a list of
    them, stepped in turn) it is a train job: it returns its loss (alone, first in a tuple, or as "loss" in a dict; a
    loss per sample means its mean), and each call makes zero_grad, backward and step. Without one it predicts, without
    gradients. Calls return the whole batch's results, the same on every rank.

    `accumulate=k` makes one step of k calls: that of one call on all their rows. The end of a pass over a loader, or
    `flush()` of the job, makes the step of a shorter last group; `stepped` tells whether a call made one.
    `clip_norm` and `clip_value` limit the whole gradient before each step, over all parameters of the optimizers;
    with `gradient_norm=True` (or `clip_norm`) the job's `gradient_norm` is the norm before clipping.
    `check_finite=True` raises `StepError` instead of stepping on a loss or gradient that is not finite.

    Raises `PlanError` for what cannot be right, `CaptureError` at a call on several workers that cannot be one program.
    """
    stepping = Stepping(
        accumulate=accumulate,
        clip_norm=clip_norm,
        clip_value=clip_value,
        gradient_norm=gradient_norm,
        check_finite=check_finite,
    )

    def decorate(function: Callable[Arguments, Result]) -> Job[Arguments, Result]:
        return make_job(function, model=model, optimizer=optimizer, view=view, world=_world, stepping=stepping)

    return decorate


def loader(
    dataset: Any,
    *,
    batch_size: int,
    shuffle: bool = False,
    seed: int | None = None,
    drop_last: bool = False,
    sampler: Iterable[Any] | None = None,
    num_workers: int = 0,
    collate_fn: Callable[[Any], Any] | None = None,
    reading: Reading = "split",
) -> Loader:
    """An iterable of whole batches, in exactly the order of a one-process DataLoader; `batch_size` is the
    whole's.

    `reading` is "split" (each rank reads its own samples only) or "replicated" (each reads all, with the
    random numbers of a plain DataLoader).
    """
    options = LoaderOptions(
        batch_size=batch_size,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
        sampler=sampler,
        num_workers=num_workers,
        collate_fn=collate_fn,
        reading=reading,
    )
    return Loader(dataset, options=options, world=_world)


def save(path: str, **objects: Any) -> None:
    """Write the state of `objects` (anything with a `state_dict`) to the folder `path`; rank 0 writes."""
    checkpoint.save(path, objects, mesh=_world().mesh)


def load(path: str, **objects: Any) -> None:
    """Give `objects` the state that was saved in the folder `path` under their names."""
    checkpoint.load(path, objects, mesh=_world().mesh)


def _world() -> World:
    return _current().world


def _current() -> Runtime:
    return current(observer=_watch_alone)


def _watch_alone() -> Observer:
    """Progress and notices of a script that runs without an agent."""
    display = ProgressDisplay()
    atexit.register(display.close)

    def take(record: AnyRecord) -> None:
        if isinstance(record, Progress):
            display.show(record)
        elif isinstance(record, Said):
            with display.hidden():
                print(f"rankless: {record.text}", file=sys.stderr)

    return take


def _encode(value: object, function: Callable[..., object]) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except TypeError as error:
        raise RanklessError(
            expected=f"numbers, text, bytes, lists, dicts or None from rankless.once({_name(function)})",
            found=str(error),
            fix="return plain data, or do the work on every rank",
        ) from error


def _name(function: Callable[..., object]) -> str:
    return getattr(function, "__qualname__", repr(function))
