"""Imports the modules of `--preload` in the fork server, so that no worker spends the time again.

Note [what cannot be shared by a fork]: threads exist in the process that started them only, CUDA refuses to work after
a fork, and forked processes would share sockets and child processes. A module that makes any of these while it is
imported is named, and the run's workers start as plain processes.
"""

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rankless.config.environment import without_cuda_initialization
from rankless.config.run_config import Program
from rankless.runtime.linux_process_control import descendants, thread_count

_GPU_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")


@dataclass(frozen=True, kw_only=True)
class PreloadOutcome:
    """What the imports have left behind."""

    messages: Sequence[str]
    """A line for each module that the workers must import themselves, or that prevents a fork."""
    may_fork: bool
    """Whether this process may fork workers."""


def preload(names: Sequence[str], program: Program) -> PreloadOutcome:
    """Import the modules in order. Stops at the first one that makes a fork unsafe."""
    messages = []
    before = _State.read()
    with _import_path_of(program), without_cuda_initialization():
        for name in names:
            error = _import(name)
            if error is not None:
                messages.append(
                    f"--preload {name}: expected a module that can be imported; found {error}; fix: correct it, or "
                    "omit it from --preload. Each worker imports it itself"
                )
            after = _State.read()
            if (found := after.describe_changes(before)) is not None:
                messages.append(
                    f"--preload {name}: expected a module whose import leaves a process that can be forked; found "
                    f"{found}; fix: omit it from --preload. The workers start as plain processes"
                )
                return PreloadOutcome(messages=messages, may_fork=False)
    return PreloadOutcome(messages=messages, may_fork=True)


@dataclass(frozen=True)
class _State:
    """What of this process a fork does not copy, or shares between the processes."""

    threads: int
    children: frozenset[int]
    files: dict[str, str]
    """What the descriptors stand for, by number."""
    has_cuda: bool

    @classmethod
    def read(cls) -> "_State":
        cuda = sys.modules.get("torch.cuda")
        return cls(thread_count(), frozenset(descendants()), _open_files(), cuda is not None and cuda.is_initialized())

    def describe_changes(self, before: "_State") -> str | None:
        """Return what prevents a fork now and did not before, or None."""
        new_files = [target for number, target in self.files.items() if before.files.get(number) != target]
        if self.has_cuda or any(target.startswith(_GPU_FILES) for target in new_files):
            return "that it initializes a GPU"
        if self.threads > before.threads:
            started = self.threads - before.threads
            return "that it starts a thread" if started == 1 else f"that it starts {started} threads"
        if self.children - before.children:
            return "that it starts a process"
        if any(target.startswith("socket:") for target in new_files):
            return "that it opens a socket"
        return None


def _import(name: str) -> str | None:
    """Import a module and return the error on one line, or None."""
    try:
        importlib.import_module(name)
    except SystemExit as error:
        return f"that it exits with {error.code!r}"
    except Exception as error:  # a module is foreign code; its error must not end the run
        traceback.print_exc()  # into the fork server's log
        return " ".join(f"{type(error).__name__}: {error}".split())
    return None


def _open_files() -> dict[str, str]:
    found = {}
    with contextlib.suppress(OSError):
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found[number] = os.readlink(f"/proc/self/fd/{number}")
    return found


@contextlib.contextmanager
def _import_path_of(program: Program) -> Iterator[None]:
    """Let imports find the modules beside the program, as its own imports will."""
    folder = os.path.dirname(os.path.realpath(program.target)) if program.kind == "script" else os.getcwd()
    if sys.flags.safe_path:
        yield
        return
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)
