"""The doctor's program on one host: asked through standard input, it answers through standard output, and ends with
either.
"""

import contextlib
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import IO

import msgspec

from rankless.config import environment
from rankless.config.collective_test import MARK, NotReduced, TrialResult
from rankless.launch.doctor import link_test
from rankless.launch.doctor.host_checks import identity, look_around
from rankless.launch.doctor.probe_protocol import (
    Answer,
    Apply,
    Clock,
    Connect,
    Connected,
    Done,
    Failed,
    Listen,
    Listening,
    Look,
    Measure,
    Prepare,
    Question,
    Ready,
    Relay,
    Time,
)
from rankless.runtime.fast_exit import Ending
from rankless.runtime.python_command import python_command


def main(ending: Ending) -> Callable[[], None]:  # noqa: ARG001  # what every process of ours is started with
    """Return what answers until nobody asks any more."""
    return _serve


class Bedside:
    """What this host keeps between questions: its listeners and the trial's process."""

    def __init__(self) -> None:
        self._listening: list[socket.socket] = []
        self._trial: subprocess.Popen[bytes] | None = None
        self._complaints: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the program

    def answer(self, question: Question) -> Answer:
        """What is true here."""
        if isinstance(question, Look):
            return look_around(question)
        if isinstance(question, Apply):
            environment.apply(question.environment)
            return Done()
        if isinstance(question, Clock):
            return Time(seconds=time.time())
        if isinstance(question, Listen):
            return self._listen(question)
        if isinstance(question, Connect):
            return Connected(attempts=link_test.connect_all(question.targets, question.secret))
        if isinstance(question, Measure):
            return link_test.measure(question.target, question.secret)
        if isinstance(question, Prepare):
            self._prepare()
            return Done()
        return self._relayed(question)

    def close(self) -> None:
        """End what was started."""
        for listening in self._listening:
            listening.close()
        if self._trial is not None:
            self._trial.kill()
            self._trial.wait()

    def _listen(self, question: Listen) -> Answer:
        high = link_test.listen(question.place, question.secret)
        own = None
        if question.port is not None:
            own = link_test.listen(question.place, question.secret, question.port, question.address)
        if high is None:
            return Failed(text="no free port")
        self._listening += [high] if own is None else [high, own]
        return Listening(high_port=high.getsockname()[1], has_port=own is not None)

    def _prepare(self) -> None:
        self._trial = subprocess.Popen(
            python_command("rankless.runtime.collective_test"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
        )

    def _relayed(self, question: Relay) -> Answer:
        process = self._trial
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(question.line + b"\n")
            process.stdin.flush()
        deadline = time.monotonic() + question.timeout_seconds
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while selector.select(max(0.0, deadline - time.monotonic())):
                line = process.stdout.readline()
                if not line:
                    return Failed(text=self._last_words(process))
                if line.startswith(MARK):
                    result = msgspec.json.decode(line.removeprefix(MARK), type=TrialResult)
                    return Failed(text=result.text) if isinstance(result, NotReduced) else result
        return Failed(text=f"no answer within {question.timeout_seconds:g} s")

    def _last_words(self, process: subprocess.Popen[bytes]) -> str:
        code = process.wait()
        self._complaints.seek(0)
        lines = self._complaints.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"the process that imports torch ended with {code}"


def _serve() -> None:
    bedside = Bedside()
    _tell(Ready(identity=identity()))
    try:
        for line in sys.stdin.buffer:
            _tell(bedside.answer(msgspec.json.decode(line, type=Question)))
    except BrokenPipeError:
        pass  # who asked is gone
    finally:
        bedside.close()


def _tell(answer: Answer) -> None:
    sys.stdout.buffer.write(MARK + msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()
