"""The doctor's programs on the hosts: started by ssh, here directly, and asked all at once."""

import contextlib
import os
import selectors
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

import msgspec

from rankless.config.collective_test import MARK
from rankless.config.hosts import Host
from rankless.launch.doctor.probe_protocol import Answer, Clock, Failed, Question, Ready, Time
from rankless.launch.rendezvous.ssh import OPTIONS
from rankless.launch.rendezvous.ssh_failures import SshCause, ssh_cause
from rankless.records.check_results import Row, failed
from rankless.runtime.python_command import python_command

CONNECT_SECONDS = 5
OPEN_SECONDS = 8.0
ANSWER_SECONDS = 12.0
CLOCK_QUESTIONS = 3
_PROGRAM = "rankless.launch.doctor.probe_server"
_SILENCE = "no word from its program"
_NO_FOLDER, _NO_PYTHON = 90, 91

Result = TypeVar("Result")


class Visit:
    """The program on one host."""

    def __init__(self, host: Host, *, is_here: bool) -> None:
        self.host = host
        self._is_here = is_here
        self._target = host.address if host.user is None else f"{host.user}@{host.address}"
        self._read = b""
        self._lost: Failed | None = None
        self.opening_seconds = 0.0
        self.identity = ""
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the visit
        command = python_command(_PROGRAM)
        if not is_here:
            ssh = ["ssh", "-o", f"ConnectTimeout={CONNECT_SECONDS}", *OPTIONS]
            command = [*ssh, self._target, "--", _remote(command)]
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(FileNotFoundError):
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._complaints, start_new_session=True
            )

    def opened(self) -> Row | None:
        """None once the program answers; else why it does not."""
        if self._process is None:
            return failed("ssh", "there is no ssh here", "install OpenSSH's client; or start the job by hand, --no-ssh")
        start = time.monotonic()
        first = self._answer(OPEN_SECONDS)
        if isinstance(first, Ready):
            self.opening_seconds = time.monotonic() - start
            self.identity = first.identity
            return None
        if self._process.poll() is None and not self._ended():
            return failed(
                "ssh",
                f"no answer within {OPEN_SECONDS:.0f} s",
                f"see what holds it up: ssh {self._target} true; a slow login script, or names looked up slowly",
            )
        cause = self._cause()
        return failed("program" if self._is_here else "ssh", cause.seen, cause.fix)

    def ask(self, question: Question, timeout_seconds: float = ANSWER_SECONDS) -> Answer:
        """The program's answer; `Failed` where there is none, and after that to all it is asked."""
        if self._lost is not None:
            return self._lost
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(question) + b"\n")
            self._process.stdin.flush()
        answer = self._answer(timeout_seconds)
        # A late answer would be taken for the next question's.
        self._lost = answer if isinstance(answer, Failed) and answer.text.startswith(_SILENCE) else None
        return answer

    def clock(self) -> tuple[float, float] | None:
        """How many seconds its clock is ahead of this host's, and how far that may be wrong: by the middle of the
        shortest of a few questions.
        """
        best: tuple[float, float] | None = None
        for _ in range(CLOCK_QUESTIONS):
            start = time.time()
            answer = self.ask(Clock())
            end = time.time()
            if isinstance(answer, Time) and (best is None or (end - start) / 2 < best[1]):
                best = answer.seconds - (start + end) / 2, (end - start) / 2
        return best

    def close(self) -> None:
        """End the program: it ends when its standard input does."""
        if self._process is None:
            return
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._complaints.close()

    def _answer(self, timeout_seconds: float) -> Answer:
        """The next line that is ours: a login may greet before it."""
        assert self._process is not None
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while True:
                line, found, rest = self._read.partition(b"\n")
                if found:
                    self._read = rest
                    if line.startswith(MARK):
                        answer: Answer = msgspec.json.decode(line.removeprefix(MARK), type=Answer)
                        return answer
                    continue
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return Failed(text=f"{_SILENCE} within {timeout_seconds:g} s")
                data = os.read(self._process.stdout.fileno(), 1 << 16)
                if not data:
                    return Failed(text=self._cause().seen)
                self._read += data

    def _ended(self) -> bool:
        assert self._process is not None
        try:
            self._process.wait(0.5)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _cause(self) -> SshCause:
        assert self._process is not None
        self._ended()
        code = self._process.poll()
        if code == _NO_FOLDER:
            return SshCause(f"the folder {os.getcwd()} is not there", "bring it there, or share it")
        if code == _NO_PYTHON:
            return SshCause(
                f"the interpreter {sys.executable} is not there", "bring it there, or share it, at the same place"
            )
        self._complaints.seek(0)
        lines = self._complaints.read().decode(errors="replace").strip().splitlines()
        cause = ssh_cause(" / ".join(lines), self._target)
        if cause is not None:
            return SshCause(f"{cause.seen} ({lines[-1].strip()})", cause.fix)
        ended = f"it ended with exit code {code}" if code is not None else "it went silent"
        said = f"{ended}: {' / '.join(line.strip() for line in lines[-4:])}" if lines else ended
        return SshCause(said, f"try it by hand: ssh {self._target} true")


class Visits:
    """The programs on all hosts that could be reached, by their places in the list."""

    def __init__(self, hosts: Sequence[Host], *, here: int | None, skipped: Sequence[int] = ()) -> None:
        places = [place for place in range(len(hosts)) if place not in skipped]
        self._all = {place: Visit(hosts[place], is_here=place == here) for place in places}
        self.open: dict[int, Visit] = {}

    def __enter__(self) -> "Visits":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _at_once(self._all, lambda _, visit: visit.close())

    def opened(self) -> dict[int, Row]:
        """Why those that do not answer do not; the others are `open` from now on."""
        found = _at_once(self._all, lambda _, visit: visit.opened())
        self.open = {place: self._all[place] for place, row in found.items() if row is None}
        return {place: row for place, row in found.items() if row is not None}

    def clocks(self, places: Sequence[int]) -> dict[int, tuple[float, float] | None]:
        """How far these hosts' clocks are from this one's; see `Visit.clock`."""
        return _at_once({place: self.open[place] for place in places}, lambda _, visit: visit.clock())

    def ask(self, questions: Mapping[int, Question], timeout_seconds: float = ANSWER_SECONDS) -> dict[int, Answer]:
        """Each host's answer to its question, asked all at once."""
        asked = {place: self.open[place] for place in questions if place in self.open}
        return _at_once(asked, lambda place, visit: visit.ask(questions[place], timeout_seconds))


def _at_once(visits: Mapping[int, Visit], call: Callable[[int, Visit], Result]) -> dict[int, Result]:
    with ThreadPoolExecutor(max(1, len(visits))) as pool:
        return dict(zip(visits, pool.map(call, visits.keys(), visits.values()), strict=True))


def _remote(command: Sequence[str]) -> str:
    """What the login's shell is to do; exit codes of ours tell what is missing there."""
    folder, python = shlex.quote(os.getcwd()), shlex.quote(sys.executable)
    here = f"cd {folder} || exit {_NO_FOLDER}; test -x {python} || exit {_NO_PYTHON}"
    return f"{here}; exec {shlex.join(command)}"
