"""Which hosts an elastic job has: asked of a command every second, or as they were named at the start."""

import errno
import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from typing import IO

from rankless.errors import ConfigError

ASK_EVERY_SECONDS = 1.0
SLOW_SECONDS = 10.0
"""Who has not answered by then is spoken of."""
LONGEST_SECONDS = 60.0
"""Then it is ended, and asked anew."""
Slots = Mapping[str, int]


class FixedHosts:
    """Hosts that stay."""

    may_change = False

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    def turn(self, now: float) -> Slots | None:  # noqa: ARG002  # as DiscoveredHosts has it
        """The hosts and their slots."""
        return self._slots

    def trouble(self) -> str | None:
        """Never any."""
        return None

    def close(self) -> None:
        """Nothing runs."""


class DiscoveredHosts:
    """What a command prints, asked again and again without waiting for it; what fails changes nothing."""

    may_change = True

    def __init__(self, command: str, *, slots_per_host: int | None) -> None:
        self._words = command_words(command)
        self._slots_per_host = slots_per_host
        self._known: Slots | None = None
        self._asked = float("-inf")
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # `close` does
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # as above
        self._trouble: str | None = None

    def turn(self, now: float) -> Slots | None:
        """The hosts and their slots as far as they are known; None before the first answer."""
        if self._process is not None and self._process.poll() is not None:
            self._take_answer(self._process.returncode)
            self._process = None
        elif self._process is not None and now - self._asked > SLOW_SECONDS:
            self._trouble = f"{shlex.join(self._words)} has not answered for {SLOW_SECONDS:g} s"
            if now - self._asked > LONGEST_SECONDS:
                _kill(self._process)
        if self._process is None and now - self._asked >= ASK_EVERY_SECONDS:
            self._asked = now
            self._ask()
        return self._known

    def trouble(self) -> str | None:
        """What went wrong when the command was last run."""
        return self._trouble

    def close(self) -> None:
        """End the command if it runs."""
        if self._process is not None:
            _kill(self._process)
            self._process.wait()
        self._output.close()
        self._errors.close()

    def _ask(self) -> None:
        for file in (self._output, self._errors):
            file.seek(0)
            file.truncate()
        try:
            self._process = self._started()
        except OSError as error:
            if error.errno == errno.ENOEXEC and self._words[0] != "/bin/sh":
                self._words = ["/bin/sh", *self._words]  # a script without a first line, as shells take it
                return
            self._trouble = f"{shlex.join(self._words)}: {error.strerror}"

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._words,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._errors,
            start_new_session=True,  # so that what a script has started ends with it
        )

    def _take_answer(self, exit_code: int) -> None:
        if exit_code != 0:
            said = _text(self._errors).strip() or _text(self._output).strip()
            self._trouble = f"{shlex.join(self._words)} ended with {exit_code}: {said[-200:]}"
            return
        try:
            self._known = parse_slots(_text(self._output), slots_per_host=self._slots_per_host)
            self._trouble = None
        except ConfigError as error:
            self._trouble = f"{shlex.join(self._words)} printed {error.found}, expected {error.expected}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def command_words(command: str) -> list[str]:
    """The words of a command that may be the path of a file. Raises ConfigError if there is nothing to run."""
    words = [command] if os.path.isfile(command) else shlex.split(command)
    if not words:
        raise ConfigError(expected="a command that prints the hosts", found="nothing", fix="--host-discovery-script X")
    if os.path.isfile(words[0]):
        if not os.access(words[0], os.X_OK):
            raise ConfigError(
                expected=f"to be allowed to run {words[0]}", found="not allowed", fix=f"chmod +x {words[0]}"
            )
        words[0] = os.path.abspath(words[0])
    return words


def parse_slots(text: str, *, slots_per_host: int | None) -> dict[str, int]:
    """The hosts of lines as `host:slots` or `host`. Raises ConfigError for another line."""
    found: dict[str, int] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        name, colon, number = line.partition(":")
        if not name or " " in line or (colon and not number.isdigit()):
            raise ConfigError(
                expected="lines as host:slots or host", found=repr(line), fix="correct the host discovery script"
            )
        slots = int(number) if colon else slots_per_host or 1
        if slots:
            found[name] = slots
    return found


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
