"""Functions of Horovod scripts on the reused worker processes of `processes`."""

from collections.abc import Callable
from typing import Any

from support.processes import on_mesh

from rankless.parallel.mesh import Mesh


def on_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The results of `function(hvd, *arguments)` on `size` processes between `hvd.init()` and `hvd.shutdown()`."""
    return on_mesh(size, _joined, function, *arguments)


def error_of(call: Callable[[], Any]) -> tuple[str, str] | None:
    """Type and text of what a call raises, as they are compared between ranks."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def _joined(_: Mesh, function: Callable[..., Any], *arguments: Any) -> Any:
    import rankless.compat.horovod.torch as hvd  # noqa: PLC0415  # most tests' workers never need it

    hvd.init()
    try:
        return function(hvd, *arguments)
    finally:
        hvd.shutdown()
