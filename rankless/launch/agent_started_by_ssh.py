"""The agent of a host that ssh has started. It reads its task from standard input."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable

import msgspec

from rankless.config import environment
from rankless.config.make_run_config import make_run_config
from rankless.errors import RanklessError
from rankless.launch import agent
from rankless.launch.rendezvous.ssh import RemoteTask
from rankless.runtime.fast_exit import FastExit


def main(fast_exit: FastExit) -> Callable[[], None]:  # noqa: ARG001  # every process of ours starts with it
    """Read the task and return a function that runs it."""
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=RemoteTask)
    environment.apply(task.environment)
    joined = threading.Event()
    threading.Thread(target=_watch_input, args=(joined,), name="stdin until joined", daemon=True).start()

    def run() -> None:
        try:
            if task.script is not None:
                _replace_script(task.program.target, task.script)
            code = agent.run(
                make_run_config(task.program, task.request),
                on_record=lambda _: None,
                out=sys.stdout,
                err=sys.stderr,
                context=agent.AgentContext(token=task.token, on_joined=joined.set),
            )
        except RanklessError as error:
            print(f"rankless: {type(error).__name__}{error}", file=sys.stderr, flush=True)
            code = 2
        raise SystemExit(code)

    return run


def _replace_script(path: str, text: bytes) -> None:
    """Write host 0's script to `path` unless it is there already."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        if file.read() == text:
            return
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "wb") as file:
        file.write(text)
    print(f"rankless: {path} is now host 0's", file=sys.stderr, flush=True)


def _watch_input(joined: threading.Event) -> None:
    """End this process if host 0's agent ends before this host has joined the job."""
    with contextlib.suppress(OSError):
        while os.read(0, 1024):  # not sys.stdin: a lock held here would be a fatal error at the interpreter's exit
            pass
    if not joined.is_set():
        os.kill(os.getpid(), signal.SIGTERM)
