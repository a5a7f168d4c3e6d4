"""Runs `rankless` as the foreground process group of a terminal, as a shell does."""

import contextlib
import fcntl
import os
import pty
import subprocess
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

from support.jobs import RANKLESS, job_environment, kill_job, restore_interrupts


class Terminal:
    """A command on a terminal of its own, and all that the terminal shows."""

    def __init__(self, *arguments: str, folder: Path, **environment: str) -> None:
        self._descriptor, other = pty.openpty()

        def take_terminal() -> None:
            restore_interrupts()
            os.setsid()
            fcntl.ioctl(other, termios.TIOCSCTTY, 0)

        self.job = subprocess.Popen(
            [*RANKLESS, *arguments],
            cwd=folder,
            env=job_environment(environment),
            stdin=other,
            stdout=other,
            stderr=other,
            preexec_fn=take_terminal,
        )
        os.close(other)
        self._pieces: list[bytes] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        """What the terminal has shown."""
        return b"".join(self._pieces).decode(errors="replace").replace("\r\n", "\n")

    def type(self, text: str) -> None:
        """Type some keys; "\x03" is Ctrl-C."""
        os.write(self._descriptor, text.encode())

    def wait(self) -> str:
        """Wait for the end of the command, and return all that the terminal has shown."""
        self.job.wait(timeout=120)
        self._reader.join(timeout=10)
        return self.text

    def close(self) -> None:
        """End the command, and close the terminal."""
        kill_job(self.job)
        os.close(self._descriptor)

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the last process of the terminal has closed it
            while data := os.read(self._descriptor, 4096):
                self._pieces.append(data)


@contextlib.contextmanager
def on_terminal(*arguments: str, folder: Path, **environment: str) -> Iterator[Terminal]:
    """Run a `rankless` command on a terminal while the context lasts."""
    terminal = Terminal(*arguments, folder=folder, **environment)
    try:
        yield terminal
    finally:
        terminal.close()
