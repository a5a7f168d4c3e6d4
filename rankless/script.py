"""What `import rankless` offers a script. Each function finds the process's world, and hands it to the views."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import msgspec

from rankless import checkpoint
from rankless.collectives.messages import broadcast_bytes
from rankless.errors import RanklessError
from rankless.runtime.current import current
from rankless.views.world import World

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class _Answer(msgspec.Struct, frozen=True):
    """What `once` sends to the other ranks."""

    value: msgspec.Raw
    error: str = ""


def rank() -> int:
    """This process's number in the job, from 0."""
    return current().world.mesh.rank


def world_size() -> int:
    """How many processes train together; 1 without a launcher."""
    return current().world.mesh.size


def local_rank() -> int:
    """This process's number on its host, from 0."""
    return current().local_rank


def once(function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
    """What `function` returns on rank 0, the only one that calls it, on every rank.

    The result must be plain data (numbers, text, bytes, lists, dicts, None). If `function` raises, every rank
    raises: rank 0 what it was, the others a `RanklessError` that names it.
    """
    mesh = current().world.mesh
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


def save(path: str, **objects: Any) -> None:
    """Write the state of `objects` (anything with a `state_dict`) to the folder `path`; rank 0 writes."""
    checkpoint.save(path, objects, mesh=_world().mesh)


def load(path: str, **objects: Any) -> None:
    """Give `objects` the state that was saved in the folder `path` under their names."""
    checkpoint.load(path, objects, mesh=_world().mesh)


def _world() -> World:
    return current().world


def _encode(value: object, function: Callable[..., object]) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except TypeError as error:
        raise RanklessError(
            expected=f"plain data (numbers, text, bytes, lists, dicts, None) from rankless.once({_name(function)})",
            found=str(error),
            fix="return plain data, or do the work on every rank",
        ) from error


def _name(function: Callable[..., object]) -> str:
    return getattr(function, "__qualname__", repr(function))
