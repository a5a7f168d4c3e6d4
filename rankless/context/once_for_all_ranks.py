"""`rankless.once`: rank 0 calls a function for all ranks, and nothing in it may wait for other ranks."""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from rankless.collectives.byte_messages import broadcast_bytes
from rankless.collectives.value_encoding import decode_value, encode_value
from rankless.context.world import World
from rankless.errors import CaptureError, RanklessError
from rankless.records.encoding import encode_msgpack

Result = TypeVar("Result")


class _Outcome(msgspec.Struct, frozen=True):
    """What rank 0 broadcasts: the encoded result, or the text of an error."""

    value: bytes = b""
    error: str = ""


def call_once(function: Callable[[], Result], *, name: str, world: World) -> Result:
    """Return on every rank what `function` returns on rank 0. See `rankless.once`."""
    require_no_capture(f"rankless.once({name})")
    if world.script.once.call is not None:
        return function()
    returned: list[bytes] = []
    """What the function has returned here, so that it is not called again if another rank is lost meanwhile."""

    return world.run_for_all(lambda now: _call_and_share(function, returned, name, now))


def require_no_capture(call: str) -> None:
    """Raise `CaptureError` for a call in a job that is being captured."""
    if get_proxy_mode() is not None or detect_fake_mode() is not None:
        raise CaptureError(
            expected="a job that computes on tensors",
            found=f"{call} inside it, which would run at capture and never again",
            fix="call it before the job, and pass its result as an argument",
        )


def call_in_one_process(function: Callable[[], Result], *, name: str) -> Result:
    """Return what `rankless.once` returns in a script that sees one process: a copy, as on several ranks."""
    found: Result = decode_value(_encode_result(function(), name))
    return found


def _call_and_share(function: Callable[[], Result], returned: list[bytes], name: str, world: World) -> Result:
    world.workers.check_sync_point(f"rankless.once({name})")
    if world.workers.rank != 0:
        received: Result = _decode_outcome(broadcast_bytes(b"", mesh=world.workers), name)
        return received
    outcome = _Outcome(error="it was interrupted")
    world.script.once.call = f"rankless.once({name})"
    try:
        if not returned:
            returned.append(_encode_result(function(), name))
        outcome = _Outcome(value=returned[0])
    except Exception as error:  # the script's own; the other ranks receive it before it propagates here
        text = error.found if isinstance(error, RanklessError) else error
        outcome = _Outcome(error=f"{type(error).__name__}: {text}")
        raise
    finally:
        world.script.once.call = None
        data = encode_msgpack(outcome)
        broadcast_bytes(data, mesh=world.workers)
    # A copy, as on the other ranks, also with one worker: a script that runs there runs on many.
    own: Result = _decode_outcome(data, name)
    return own


def _decode_outcome(data: bytes, name: str) -> Any:
    received = msgspec.msgpack.decode(data, type=_Outcome)
    if received.error:
        raise RanklessError(
            expected=f"rankless.once({name}) to succeed on rank 0",
            found=f"rank 0 failed: {received.error}",
            fix="fix the error that rank 0 reports",
        )
    return decode_value(received.value)


def _encode_result(value: object, name: str) -> bytes:
    try:
        return encode_value(value)
    except TypeError as error:
        raise RanklessError(
            expected=f"tensors, arrays, paths, dataclasses or plain data from rankless.once({name})",
            found=str(error),
            fix=f"call it on every rank, without once; or let {name} return plain data",
        ) from None
