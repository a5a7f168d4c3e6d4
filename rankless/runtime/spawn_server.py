"""The server of `rankless.spawn`: imports torch once, and forks the processes of all calls in one script or notebook.

Note [spawn server]: the server never computes and runs no code of the user (see Note [one thread, no computing]), so
each process that it forks is as good as a new interpreter that has imported torch. It lives in a session of its own:
an interrupt from the keyboard, or from a notebook's stop button, reaches the caller only, and the caller ends its
processes. The server watches the caller through a descriptor of its process. The parent-death signal would not do: it
comes when the calling thread ends.
"""

import gc
import io
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from typing import TextIO

from rankless.runtime.fast_exit import FastExit
from rankless.runtime.fork_and_spawn_server_messages import READY, receive_process_request, send_number
from rankless.runtime.fork_server import preload_modules, prepare_process
from rankless.runtime.linux_process_control import adopt_orphans, end_descendants, set_parent_death_signal
from rankless.runtime.spawned_function import serve_call
from rankless.terminal import process_title

END_SECONDS = 30.0


def main(fast_exit: FastExit) -> Callable[[], None] | None:
    """Fork processes for as long as the caller asks. In a forked one, return the function that it runs."""
    descriptor, caller = map(int, sys.argv[2:4])
    # Before any change of the environment: setproctitle finds the memory of the command line beside it.
    process_title.show_spawn_server()
    prepare_process()
    set_parent_death_signal(0)
    control = socket.socket(fileno=descriptor)
    watched = os.pidfd_open(caller)
    if os.getppid() != caller or not preload_modules(with_jobs=True):
        return None
    adopt_orphans()
    gc.freeze()
    gc.enable()
    control.sendall(READY)
    channel = SpawnServer(control, watched).serve()
    fast_exit.arm()
    return None if channel is None else lambda: serve_call(channel, fast_exit)


class SpawnServer:
    """The processes that are alive, the socket with requests, and the descriptor of the caller's process."""

    def __init__(self, control: socket.socket, watched: int) -> None:
        self._control = control
        self._watched = watched
        self._statuses: dict[int, socket.socket] = {}
        self._wakeup, self._wakeup_end = socket.socketpair()
        for end in (self._wakeup, self._wakeup_end):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._wakeup_end.fileno(), warn_on_full_buffer=False)

    def serve(self) -> socket.socket | None:
        """Fork and reap, until the caller is gone, or asks no more and no process is left.

        In a forked process, return its channel to the caller at once.
        """
        with selectors.DefaultSelector() as selector:
            for readable in (self._control, self._watched, self._wakeup):
                selector.register(readable, selectors.EVENT_READ)
            is_asked = True
            while is_asked or self._statuses:
                ready = {key.fileobj for key, _ in selector.select()}
                if self._watched in ready:
                    break
                if self._wakeup in ready:
                    self._wakeup.recv(4096)
                    self._reap()
                if self._control in ready:
                    descriptors = receive_process_request(self._control)
                    if descriptors is None:
                        is_asked = False
                        selector.unregister(self._control)
                    elif (channel := self._fork(descriptors)) is not None:
                        return channel
        end_descendants(deadline_seconds=END_SECONDS)
        return None

    def _fork(self, descriptors: list[int]) -> socket.socket | None:
        """Fork a process. Return its channel in the new process, and None in the server."""
        server = os.getpid()
        process_id = os.fork()
        if process_id == 0:
            set_parent_death_signal(signal.SIGKILL)
            if os.getppid() != server:
                os._exit(1)  # the server ended before the line above
            return self._become_process(descriptors)
        channel, status, folder, output, errors = descriptors
        for descriptor in (channel, folder, output, errors):
            os.close(descriptor)
        self._statuses[process_id] = socket.socket(fileno=status)
        send_number(self._statuses[process_id], process_id)
        return None

    def _become_process(self, descriptors: list[int]) -> socket.socket:
        """Set up a forked process as if the caller had started it: signals, folder, output, no input."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for end in (self._control, self._wakeup, self._wakeup_end, *self._statuses.values()):
            end.close()
        channel, status, folder, output, errors = descriptors
        os.fchdir(folder)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (output, 1), (errors, 2)):
            os.dup2(source, target)
        for descriptor in (self._watched, status, folder, output, errors, nothing):
            if descriptor > 2:
                os.close(descriptor)
        sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.FileIO(0, closefd=False))  # type: ignore[misc]  # the interpreter itself does so at its start
        sys.stdout = sys.__stdout__ = _open_stream(1, sys.stdout)  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = _open_stream(2, sys.stderr)  # type: ignore[misc]
        return socket.socket(fileno=channel)

    def _reap(self) -> None:
        while True:
            try:
                process_id, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if process_id == 0:
                return
            if process_id in self._statuses:
                with self._statuses.pop(process_id) as end:
                    send_number(end, status)


def _open_stream(descriptor: int, old: TextIO) -> io.TextIOWrapper:
    # Line by line: a notebook shows each line as soon as it is written.
    binary = io.BufferedWriter(io.FileIO(descriptor, "w", closefd=False))
    return io.TextIOWrapper(binary, encoding=old.encoding, errors=old.errors, line_buffering=True)
