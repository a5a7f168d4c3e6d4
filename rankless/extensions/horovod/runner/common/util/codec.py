"""Objects as text, for environment variables and command lines. cloudpickle serializes them."""

import base64
from typing import Any

import cloudpickle  # type: ignore[import-untyped]  # it has no types


def dumps_base64(obj: Any, to_ascii: bool = True) -> str | bytes:
    """Return the object in base64.

    Args:
        obj: The object.
        to_ascii: Whether to return str instead of bytes. Default True.
    """
    encoded = base64.b64encode(cloudpickle.dumps(obj))
    return encoded.decode("ascii") if to_ascii else encoded


def loads_base64(encoded: str | bytes) -> Any:
    """Return the object from its base64."""
    return cloudpickle.loads(base64.b64decode(encoded))
