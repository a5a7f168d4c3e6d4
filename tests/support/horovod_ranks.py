"""Runs functions of Horovod scripts on the reused worker processes of `processes`."""

from collections.abc import Callable
from typing import Any

from support.processes import on_mesh

from rankless.parallel.mesh import Mesh


def on_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return the results of `function(hvd, *arguments)` on `size` processes, between init and shutdown."""
    return on_mesh(size, _call_initialized, function, *arguments)


def error_of(call: Callable[[], Any]) -> tuple[str, str] | None:
    """Return type and text of the error that a call raises, for a comparison between ranks. None without one."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def _call_initialized(_: Mesh, function: Callable[..., Any], *arguments: Any) -> Any:
    import rankless.extensions.horovod.torch as hvd  # noqa: PLC0415  # most tests' workers never need it

    hvd.init()
    try:
        return function(hvd, *arguments)
    finally:
        hvd.shutdown()
