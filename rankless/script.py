"""What `import rankless` offers a script. Each function hands the process's world to the views."""

import atexit
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

import msgspec
from torch.optim import Optimizer

from rankless import checkpoint
from rankless.collectives.messages import broadcast_bytes
from rankless.errors import RanklessError
from rankless.observe.progress import ProgressDisplay
from rankless.records.events import AnyRecord, Progress, Said
from rankless.runtime.current import current
from rankless.runtime.joined import Observer, Runtime
from rankless.views.job import Job, Models, make_job
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
    mesh.come(f"rankless.once({_name(function)})")
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
    optimizer: Optimizer | None = None,
    view: str = "consistent",
    check_every: int | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
) -> Callable[[Callable[Arguments, Result]], Job[Arguments, Result]]:
    """A decorator that makes a function on whole batches a job: written for one device, run on all of them.

    `model` is a module, or a list or dict of modules: all that the function uses. With an `optimizer` it is a
    train job: it returns its loss (alone, first in a tuple, or as "loss" in a dict; a loss per sample means
    its mean), and each call makes zero_grad, backward and step. Without one it predicts, without gradients.
    Calls return the whole batch's results, the same on every rank. Tensors hold the batch in dim 0, unless
    `batch_dims` names another for an argument, or None for one that is not batch: this decides what a call costs,
    not its result. Models are compared between ranks at the first call, when they were changed outside jobs, and
    before every `check_every`-th call. Raises `PlanError` for what cannot be right; on several workers `CaptureError`
    at a call that cannot be one program, `RanksParted` where ranks differ.
    """

    def decorate(function: Callable[Arguments, Result]) -> Job[Arguments, Result]:
        made = make_job(function, model=model, optimizer=optimizer, view=view, world=_world, check_every=check_every)
        if batch_dims is not None:
            made.mark(batch_dims)
        return made

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
