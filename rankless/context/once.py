"""What rank 0 does for all: `rankless.once`, and the refusal of what would wait there for the others."""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from rankless.collectives.byte_messages import broadcast_bytes
from rankless.collectives.typed_values import decode_value, encode_value
from rankless.context.world import World
from rankless.errors import CaptureError, RanklessError

Result = TypeVar("Result")


class _Answer(msgspec.Struct, frozen=True):
    """What rank 0 sends to the others."""

    value: bytes = b""
    error: str = ""


def call_once(function: Callable[[], Result], *, name: str, world: World) -> Result:
    """What `function` returns on rank 0, on every rank; see `rankless.once`."""
    if get_proxy_mode() is not None or detect_fake_mode() is not None:
        raise CaptureError(
            expected="a job that computes on tensors",
            found=f"rankless.once({name}) inside it, which would run at capture and never again",
            fix="call it before the job, and pass its result as an argument",
        )
    if world.once.doing is not None:
        return function()
    world.mesh.check_sync_point(f"rankless.once({name})")
    if world.mesh.rank != 0:
        received: Result = _answer_of(broadcast_bytes(b"", mesh=world.mesh), name)
        return received
    answer = _Answer(error="it was interrupted")
    world.once.doing = f"rankless.once({name})"
    try:
        result = function()
        answer = _Answer(value=_encoded(result, name))
    except Exception as error:  # the script's own; the others hear of it before it goes on here
        text = error.found if isinstance(error, RanklessError) else error
        answer = _Answer(error=f"{type(error).__name__}: {text}")
        raise
    finally:
        world.once.doing = None
        data = msgspec.msgpack.encode(answer)
        broadcast_bytes(data, mesh=world.mesh)
    # As the others have it, copied, also on one worker: a script that runs there runs on many.
    own: Result = _answer_of(data, name)
    return own


def require_not_in_once(world: World, doing: str) -> None:
    """Return unless rank 0 is alone inside `rankless.once`; then raise RanklessError."""
    if world.once.doing is not None and world.mesh.size > 1:
        raise RanklessError(
            expected=f"inside {world.once.doing} only what rank 0 can do alone",
            found=f"{doing}, for which all ranks must come together",
            fix="do it before, outside of once, and pass the result",
        )


def _answer_of(data: bytes, name: str) -> Any:
    received = msgspec.msgpack.decode(data, type=_Answer)
    if received.error:
        raise RanklessError(
            expected=f"rankless.once({name}) to succeed on rank 0",
            found=f"rank 0 failed: {received.error}",
            fix="mend what rank 0 reports",
        )
    return decode_value(received.value)


def _encoded(value: object, name: str) -> bytes:
    try:
        return encode_value(value)
    except TypeError as error:
        raise RanklessError(
            expected=f"tensors, arrays, paths, dataclasses or plain data from rankless.once({name})",
            found=str(error),
            fix="return plain data, or do the work on every rank",
        ) from error
