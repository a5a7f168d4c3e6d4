"""A process of `rankless.spawn`: receives a function, calls it with its rank, and sends the outcome back.

`spawn_server` forks it. Where it cannot, the process is a new interpreter that runs `main`.
"""

import linecache
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence

import cloudpickle  # type: ignore[import-untyped]  # it has no types
import msgspec
import torch

from rankless.config import environment
from rankless.data.random_generators import set_process_states
from rankless.errors import RanklessError
from rankless.runtime.fast_exit import FastExit
from rankless.runtime.fork_and_spawn_server_messages import SpawnedProcess, receive_call, send_call
from rankless.runtime.hooks import import_aliases
from rankless.runtime.hooks.init_process_group import use_fastest_group
from rankless.runtime.linux_process_control import set_parent_death_signal
from rankless.runtime.rendezvous.find_rendezvous import print_notice
from rankless.runtime.user_program import unload_shadowed
from rankless.terminal import process_title
from rankless.user_code import PACKAGE_FOLDER


def main(fast_exit: FastExit) -> Callable[[], None]:
    """Return what runs the function that arrives on the inherited socket."""
    descriptor, parent = map(int, sys.argv[2:4])
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent ended before the line above
    channel = socket.socket(fileno=descriptor)
    return lambda: serve_call(channel, fast_exit)


def serve_call(channel: socket.socket, fast_exit: FastExit) -> None:
    """Receive settings and a function, call it, and send its outcome. Raises SystemExit, so that threads end first."""
    settings, payload = receive_call(channel), receive_call(channel)
    if settings is None or payload is None:
        os._exit(1)  # the caller is gone
    process = msgspec.json.decode(settings, type=SpawnedProcess)
    _set_up(process)
    code: object = 0
    try:
        outcome = _call(process.rank, payload)
        send_call(channel, outcome)
    except SystemExit as exit_request:  # the function's own
        code = exit_request.code
    except Exception as error:  # the function is the script's own; its error goes to the caller of spawn
        send_call(channel, _encode_error(error))
        code = 1
    channel.close()
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    fast_exit.set_exit_code((code or 0) & 0xFF)
    raise SystemExit(code)


def _set_up(process: SpawnedProcess) -> None:
    process_title.show_worker(process.title, process.rank, process.count)
    environment.replace(process.environment)
    if process.cores is not None:
        os.sched_setaffinity(0, process.cores)
    threads = environment.user_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    if torch.distributed.is_available():
        torch.distributed.set_debug_level_from_env()  # type: ignore[attr-defined]  # public, missing in the stubs
        if process.count > 1 and environment.user_backend() in (None, "shared_memory"):
            use_fastest_group(process.rank, process.count, print_notice)
    sys.argv = ["-c"]
    import_aliases.install()


def _call(rank: int, payload: bytes) -> bytes:
    path, sources, states, call = cloudpickle.loads(payload)
    sys.path[:] = path
    if path and not sys.flags.safe_path:
        unload_shadowed(path[0] or os.getcwd())
    for name, lines in sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    function, args = cloudpickle.loads(call)  # may import modules, which may draw
    # All ranks start from the caller's random numbers, as the function would if the caller called it.
    set_process_states(states)
    outcome: bytes = cloudpickle.dumps(("result", function(rank, *args), ""))
    return outcome


def _encode_error(error: Exception) -> bytes:
    trace = format_trace(error)
    without_trace = error.with_traceback(None)
    try:
        data: bytes = cloudpickle.dumps(("error", without_trace, trace))
        cloudpickle.loads(data)
    except Exception:  # the error does not survive pickling
        data = cloudpickle.dumps(("error", RuntimeError(f"{type(error).__name__}: {error}"), trace))
    return data


def format_trace(error: BaseException) -> str:
    """Return an error's traceback without the frames of Rankless, unless the error is a fault of Rankless itself."""
    report: traceback.TracebackException | None = traceback.TracebackException.from_exception(error)
    assert report is not None
    _remove_own_frames(report, set())
    return "".join(report.format())


def _remove_own_frames(report: traceback.TracebackException, done: set[int]) -> None:
    if id(report) in done:
        return
    done.add(id(report))
    is_fault = bool(report.stack) and _is_own(report.stack[-1]) and not _is_rankless_error(report)
    if not is_fault:
        shown: Sequence[traceback.FrameSummary] = [frame for frame in report.stack if not _is_own(frame)]
        report.stack = traceback.StackSummary.from_list(shown)
    for other in (report.__cause__, report.__context__):
        if other is not None:
            _remove_own_frames(other, done)


def _is_own(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith((PACKAGE_FOLDER, "<rankless"))


def _is_rankless_error(report: traceback.TracebackException) -> bool:
    return report.exc_type is not None and issubclass(report.exc_type, RanklessError)
