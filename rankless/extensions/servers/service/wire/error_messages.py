"""Errors that travel from a server to its workers, as JSON."""

import msgspec

from rankless.errors import RanklessError, ServerError, TableError
from rankless.extensions.servers.service.wire.messages import MessageRefusedError, decode_json
from rankless.records.encoding import encode_json


class CarriedError(msgspec.Struct, frozen=True, kw_only=True):
    """An error on its way to a worker."""

    about_table: bool
    expected: str
    found: str
    fix: str


def encode_error(error: RanklessError) -> bytes:
    """Return an error as JSON."""
    carried = CarriedError(
        about_table=isinstance(error, TableError),
        expected=str(error.expected),
        found=str(error.found),
        fix=error.fix,
    )
    return encode_json(carried)


def decode_error(payload: memoryview, server: str) -> RanklessError:
    """Return the error that the server of this name has sent. What happened on the server is in its text."""
    try:
        carried = decode_json(payload, CarriedError)
    except MessageRefusedError as error:
        return ServerError(
            expected=f"an answer of {server}", found=str(error), fix="use one version of Rankless everywhere"
        )
    kind = TableError if carried.about_table else ServerError
    found = carried.found if carried.about_table else f"{carried.found} ({server})"
    return kind(expected=carried.expected, found=found, fix=carried.fix)
