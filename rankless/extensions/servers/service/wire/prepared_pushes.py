"""Pushes of gradients that servers have already: they go to the servers with the end of a transaction."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from rankless.extensions.servers.service.wire.messages import Frame


class PreparedPush(NamedTuple):
    """A push of gradients that all servers have.

    Args:
        numbers: The number of the table on each server.
        settings: Settings of the optimizer as JSON.
        factor: By what the script has multiplied the gradients since they were prepared.
    """

    numbers: Sequence[int]
    settings: bytes
    factor: float


class PreparedPushMessage(msgspec.Struct, frozen=True):
    """A prepared push for one server. `settings` are the optimizer's, as JSON."""

    table: int
    settings: str


def encode_pushes(pushes: Sequence[PreparedPush], server: int) -> tuple[Frame, ...]:
    """Return the payload of the end of a transaction: prepared pushes, as one server knows their tables."""
    if not pushes:
        return ()
    described = [PreparedPushMessage(push.numbers[server], push.settings.decode()) for push in pushes]
    return msgspec.json.encode(described), np.array([push.factor for push in pushes], "<f8")


def renumber_pushes(payload: Sequence[Frame], find_number: Callable[[int], int]) -> Sequence[Frame]:
    """Return the payload of the end of a transaction with other numbers of tables.

    Args:
        payload: What `encode_pushes` has returned.
        find_number: Returns the other number of a table.
    """
    if not payload:
        return payload
    pushes = msgspec.json.decode(payload[0], type=list[PreparedPushMessage])
    renumbered = [PreparedPushMessage(find_number(push.table), push.settings) for push in pushes]
    return msgspec.json.encode(renumbered), *payload[1:]
