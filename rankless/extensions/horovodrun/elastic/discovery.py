"""Finds the hosts of an elastic job: with a command every second, or from the list given at the start."""

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

DISCOVERY_INTERVAL_SECONDS = 1.0
SLOW_SECONDS = 10.0
"""A command that runs longer gives a warning."""
DISCOVERY_TIMEOUT_SECONDS = 60.0
"""A command that runs longer is killed and started again."""
SlotsByHost = Mapping[str, int]


class FixedHosts:
    """Hosts that never change."""

    may_change = False

    def __init__(self, slots: SlotsByHost) -> None:
        self._slots = slots

    def poll(self, now: float) -> SlotsByHost | None:  # noqa: ARG002  # the signature of DiscoveredHosts
        """Return the hosts and their slots."""
        return self._slots

    @property
    def warning(self) -> str | None:
        """Always None."""
        return None

    def close(self) -> None:
        """Do nothing."""


class DiscoveredHosts:
    """The hosts that a command prints. The command runs repeatedly in the background; a failed run changes nothing."""

    may_change = True

    def __init__(self, command: str, *, slots_per_host: int | None) -> None:
        self._command = split_command(command)
        self._slots_per_host = slots_per_host
        self._slots: SlotsByHost | None = None
        self._started_at = float("-inf")
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # `close` closes it
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # as above
        self.warning: str | None = None
        """What went wrong in the last run of the command."""

    def poll(self, now: float) -> SlotsByHost | None:
        """Return the hosts and their slots of the last good run, or None before the first."""
        if self._process is not None and self._process.poll() is not None:
            self._read_output(self._process.returncode)
            self._process = None
        elif self._process is not None and now - self._started_at > SLOW_SECONDS:
            self.warning = f"{shlex.join(self._command)} has not answered for {SLOW_SECONDS:g} s"
            if now - self._started_at > DISCOVERY_TIMEOUT_SECONDS:
                _kill(self._process)
        if self._process is None and now - self._started_at >= DISCOVERY_INTERVAL_SECONDS:
            self._started_at = now
            self._start()
        return self._slots

    def close(self) -> None:
        """Kill the command if it runs."""
        if self._process is not None:
            _kill(self._process)
            self._process.wait()
        self._output.close()
        self._errors.close()

    def _start(self) -> None:
        for file in (self._output, self._errors):
            file.seek(0)
            file.truncate()
        try:
            self._process = self._start_process()
        except OSError as error:
            if error.errno == errno.ENOEXEC and self._command[0] != "/bin/sh":
                self._command = ["/bin/sh", *self._command]  # shells run a script without a #! line like this
                return
            self.warning = f"{shlex.join(self._command)}: {error.strerror}"

    def _start_process(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._errors,
            start_new_session=True,  # so that the script's own children can be killed with it
        )

    def _read_output(self, exit_code: int) -> None:
        if exit_code != 0:
            output = _read_text(self._errors).strip() or _read_text(self._output).strip()
            self.warning = f"{shlex.join(self._command)} ended with {exit_code}: {output[-200:]}"
            return
        try:
            self._slots = parse_slots(_read_text(self._output), slots_per_host=self._slots_per_host)
            self.warning = None
        except ConfigError as error:
            self.warning = f"{shlex.join(self._command)} printed {error.found}, expected {error.expected}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def split_command(command: str) -> list[str]:
    """Return the arguments of a command, which may be the path of a file. Raises `ConfigError` if there is none."""
    arguments = [command] if os.path.isfile(command) else shlex.split(command)
    if not arguments:
        raise ConfigError(
            expected="a command that prints the hosts", found="nothing", fix="--host-discovery-script COMMAND"
        )
    if os.path.isfile(arguments[0]):
        if not os.access(arguments[0], os.X_OK):
            raise ConfigError(
                expected=f"permission to run {arguments[0]}", found="none", fix=f"chmod +x {arguments[0]}"
            )
        arguments[0] = os.path.abspath(arguments[0])
    return arguments


def parse_slots(text: str, *, slots_per_host: int | None) -> dict[str, int]:
    """Return the slots by host of lines like `host:slots` or `host`. Raises `ConfigError` for any other line."""
    slots_by_host: dict[str, int] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        name, colon, number = line.partition(":")
        if not name or " " in line or (colon and not number.isdigit()):
            raise ConfigError(
                expected="lines like host:slots or host", found=repr(line), fix="correct the host discovery script"
            )
        slots = int(number) if colon else slots_per_host or 1
        if slots:
            slots_by_host[name] = slots
    return slots_by_host


def _read_text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
