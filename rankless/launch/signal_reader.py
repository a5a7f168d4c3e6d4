"""Ctrl-C, SIGTERM and other signals, read from a descriptor instead of interrupting the code."""

import contextlib
import signal
import socket
import threading
from collections.abc import Collection
from types import FrameType

DEFAULT_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that mean something to the script alone. Cluster managers send them to warn a job, and only to the agent."""

REQUESTED = 0
"""Stands for a signal: the run itself asks its workers to stop, as SIGTERM does."""


class RendezvousInterrupted(Exception):
    """A signal arrived before all hosts had joined."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Interrupts:
    """Collects signals while it is entered in the main thread: `fileno` becomes readable when one arrives.

    Args:
        more_signals: Signals that end the run besides SIGINT, SIGTERM and SIGHUP.
    """

    def __init__(self, more_signals: Collection[int] = ()) -> None:
        self._ending = {*DEFAULT_SIGNALS, *more_signals}
        self._numbers = {*self._ending, *PASSED_SIGNALS}
        self._passed: list[int] = []
        self.have_arrived = False
        """Whether a signal that ends the run has arrived."""
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._before: dict[int, object] = {}
        self._wakeup_before = -1

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                # An ignored signal stays ignored: nohup and background jobs of a shell rely on it.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, _ignore)
            self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *_error: object) -> None:
        if self._before:
            signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # signal.signal returned it
        self._reader.close()
        self._writer.close()

    def request(self) -> None:
        """Have `read` return REQUESTED. May be called from another thread, and after the end of this context."""
        with contextlib.suppress(OSError):
            self._writer.send(bytes([REQUESTED]))

    def fileno(self) -> int:
        """Return the descriptor to select on."""
        return self._reader.fileno()

    def read(self) -> list[int]:
        """Return the numbers of the signals that arrived since the last call, and end the run."""
        try:
            arrived = [number for number in self._reader.recv(64) if number in self._before or number == REQUESTED]
        except BlockingIOError:
            return []
        ending = [number for number in arrived if number in self._ending]
        self.have_arrived = self.have_arrived or bool(ending)
        self._passed += [number for number in arrived if number not in self._ending and number != REQUESTED]
        return ending or [number for number in arrived if number == REQUESTED]

    def take_passed(self) -> list[int]:
        """Return the numbers of the signals for the script that `read` has found since the last call."""
        taken, self._passed = self._passed, []
        return taken


def name_signal(number: int) -> str:
    """Return a signal's name, such as "SIGKILL"."""
    return signal.Signals(number).name if number in signal.valid_signals() else "unknown"


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: Python writes the number to the wakeup descriptor."""
