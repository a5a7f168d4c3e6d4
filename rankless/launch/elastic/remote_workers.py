"""The workers of an elastic job on another host, by an agent there that ssh starts."""

import os
import selectors
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress

from rankless.config.elastic import Elastic
from rankless.launch.elastic.member import ElasticWorker
from rankless.launch.elastic.ssh_protocol import (
    BEAT_SECONDS,
    SILENT_SECONDS,
    Beat,
    End,
    FrameUp,
    Happened,
    Heard,
    Here,
    Kill,
    Order,
    Pipe,
    Say,
    Shown,
    Signal,
    Task,
    Unable,
)
from rankless.launch.rendezvous.host_facts import find_version_differences, installed_versions
from rankless.launch.rendezvous.ssh import SSH_OPTIONS
from rankless.launch.worker_output import Source, Write
from rankless.records.elastic_messages import DriverMessage, WorkerMessage
from rankless.records.events import AnyRecord, Exited, HostLost
from rankless.runtime.python_command import python_command

# Whoever is silent is soon lost: the first of two values for an option is ssh's.
_OPTIONS = ("-o", "ServerAliveInterval=2", "-o", "ServerAliveCountMax=3", *SSH_OPTIONS)
STARTING_SECONDS = 60.0


class RemoteWorkers:
    """As `crew.Crew`, of one other host."""

    def __init__(
        self,
        host: str,
        task: Task,
        elastic: Elastic,
        *,
        selector: selectors.BaseSelector,
        writes: Mapping[Source, Write],
    ) -> None:
        self._host = host
        self._selector = selector
        self._writes = writes
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # `close` does
        command = (
            f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(python_command('rankless.launch.elastic.host_agent'))}"
        )
        port = [] if elastic.ssh_port is None else ["-p", str(elastic.ssh_port)]
        identity = [] if elastic.ssh_identity_file is None else ["-i", elastic.ssh_identity_file]
        self._process = subprocess.Popen(
            ["ssh", *port, *identity, *_OPTIONS, host, "--", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._pipe = Pipe(self._process.stdout.fileno(), self._process.stdin.fileno())
        self._pipe.send(task)
        self._numbers: set[int] = set()
        self._heard = time.monotonic() + STARTING_SECONDS
        self._beaten = 0.0
        self._is_selected = True
        self._refused = ""
        """Why the host cannot take part, once that is known."""
        selector.register(self._pipe, selectors.EVENT_READ)
        self.lost: list[int] = []
        """The workers that went with the host."""
        self.here: Here | None = None
        """Once the agent is there."""

    def start(self, worker: ElasticWorker) -> None:
        """Start a worker."""
        self._numbers.add(worker.number)
        self._pipe.send(Order(number=worker.number, host=worker.host, slot=worker.slot))

    def tell(self, number: int, word: DriverMessage) -> None:
        """Say something to a worker."""
        self._pipe.send(Say(number=number, word=word))

    def turn(self) -> Iterator[tuple[int, WorkerMessage] | AnyRecord]:
        """What is new. Once the host is lost, that all its workers are."""
        now = time.monotonic()
        if now - self._beaten >= BEAT_SECONDS:
            self._beaten = now
            self._pipe.send(Beat())
        for frame in self._pipe.receive(FrameUp):
            self._heard = max(self._heard, now) if self.here is None else now
            if isinstance(frame, Here):
                self.here, self._heard = frame, now
                self._refuse_other_versions(frame)
            elif isinstance(frame, Unable):
                self._refused = frame.why
            elif isinstance(frame, Heard):
                yield frame.number, frame.word
            elif isinstance(frame, Happened):
                if isinstance(frame.record, Exited):
                    self._numbers.discard(frame.record.rank)
                yield frame.record
            elif isinstance(frame, Shown):
                self._writes[frame.source](frame.data)
        if self.has_ended():
            self._leave_selector()
            self.lost += sorted(self._numbers)
            for number in sorted(self._numbers):
                now_ns = time.monotonic_ns()
                yield HostLost(rank=number, time_ns=now_ns, host=self._host, how=f"was lost: {self.why_lost()}")
                yield Exited(rank=number, time_ns=now_ns, exit_code=-signal.SIGKILL)
            self._numbers.clear()

    def why_lost(self) -> str:
        """In words, once it has ended."""
        self._errors.seek(0)
        said = self._refused or self._errors.read().decode(errors="replace").strip()[-300:]
        return said or ("no sign of life" if self._process.poll() is None else f"ssh ended with {self._process.poll()}")

    def end(self, number: int, why: str) -> None:
        """End one worker as soon as it stands still."""
        self._pipe.send(End(number=number, why=why))

    def signal(self, number: int) -> None:
        """Send a signal to all workers, and start no others."""
        if self.here is None:
            self._give_up()
        else:
            self._pipe.send(Signal(number=number))

    def kill(self) -> None:
        """End all workers at once."""
        self._pipe.send(Kill())

    def has_ended(self) -> bool:
        """Whether nothing comes from there any more."""
        return bool(self._refused) or self._pipe.is_over or time.monotonic() - self._heard > SILENT_SECONDS

    def close(self) -> None:
        """Let go of the host: its agent ends what is left there."""
        self._leave_selector()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def _give_up(self) -> None:
        """Without an agent there, there are no workers; one that comes yet finds its connection closed, and ends."""
        self._process.kill()
        self._refused = "it was to end before it was there"

    def _refuse_other_versions(self, here: Here) -> None:
        find_differences = find_version_differences(installed_versions(), here.versions)
        self._refused = "; ".join(
            f"{each.what} is {each.there}, expected {each.here}: {each.fix}" for each in find_differences
        )

    def _leave_selector(self) -> None:
        if self._is_selected:
            self._is_selected = False
            self._selector.unregister(self._pipe)
