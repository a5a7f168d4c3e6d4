"""This host's workers as the hang watch sees them: how long each has stood still, and where it is."""

import os
import time
from collections.abc import Collection, Sequence
from contextlib import suppress

from rankless.config.worker_config import WorkerConfig
from rankless.launch.watchdog.process_stats import Pulse, Vitals, descendants_of, vitals_of, waits_for
from rankless.launch.watchdog.stack_classifier import Place, place_of, reader_place
from rankless.launch.watchdog.stacks import Question, main_stack
from rankless.records.events import RankState, RankStatus
from rankless.records.worker_status import Steps, read_page

MOST_READERS = 8
REST_SECONDS = 1.5
"""Longer than the time between two looks."""


class Worker:
    """One of this host's workers."""

    def __init__(self, config: WorkerConfig, process_id: int, descriptor: int, now: float) -> None:
        self.config = config
        self.pulse = Pulse(process_id, now)
        self.question: Question | None = None
        self._descriptor = descriptor
        self._has_asked_readers = False
        self._logs = [path for path in (config.log_file, config.error_log_file) if path is not None]
        self._written = 0
        self._written_at = now

    @property
    def page(self) -> Steps:
        """What it has counted."""
        return read_page(self._descriptor)

    @property
    def lives(self) -> bool:
        """Whether its process is there, as far as this process knows."""
        vitals = vitals_of(self.pulse.process_id)
        return vitals is not None and vitals.state not in "ZX"

    def feel(self, now: float) -> None:
        """Look at it from outside."""
        self.pulse.feel(now)
        written = 0
        for path in self._logs:
            with suppress(OSError):
                written += os.stat(path).st_size
        if written != self._written:
            self._written, self._written_at = written, now

    def ask(self, now: float) -> None:
        """Ask for its stacks."""
        self.question = Question(self.pulse.process_id, self._descriptor, now)
        self._has_asked_readers = False

    def is_answered(self, now: float) -> bool:
        """Whether its stacks are there, and those of its DataLoader's workers if it waits for them."""
        if self.question is None:
            return True
        if not self.question.is_answered(now):
            return False
        if not self._has_asked_readers and self._place().reads:
            self._has_asked_readers = True
            self.question.ask(list(descendants_of(self.pulse.process_id))[:MOST_READERS], now)
        return self.question.is_answered(now)

    def where(self, now: float, *, limit: float, gpu_waits: bool) -> RankStatus:
        """Where it is. `limit`: what is unusual for the job. `gpu_waits`: whether a rank that asks its GPU for a result
        is taken to wait for others.
        """
        pulse, place, vitals = self.pulse, self._place(), self.pulse.vitals
        state, doing, text, line = self._state(vitals, place, now, limit), "", place.text, place.line
        if state == "computes" and self.config.device != "cpu" and place.on_gpu and gpu_waits:
            state, doing = "waits", place.on_gpu  # the CPU turns round and round while the GPU waits for other ranks
        elif state == "waits":
            doing = place.waits_in
        elif state == "stopped":
            doing = f"kill -CONT {pulse.process_id} lets it go on"
        elif vitals is not None and vitals.state == "D":
            doing = "waits for a disk"
        elif state == "blocked":
            doing = waits_for(pulse.process_id)
        elif state == "computes" and now - pulse.still_since > limit / 2:
            doing = "waits for processes of its own that run"
        elif state == "computes" and now - pulse.tree_still_since > REST_SECONDS:
            doing = waits_for(pulse.process_id)  # not for long enough to be sure that it goes on doing nothing
        reader = self._reader() if place.reads else None
        if reader is not None:
            process_id, inside = reader
            doing, line = (waits_for(process_id) if state == "blocked" else doing), inside.line
            text += f"; its DataLoader's worker, process {process_id}, is in {inside.text}"
        return RankStatus(
            rank=self.config.rank,
            time_ns=time.monotonic_ns(),
            state=state,
            still_seconds=now - pulse.still_since,
            quiet_seconds=now - self._written_at,
            cpu_percent=pulse.cpu_percent,
            doing=doing,
            line=line,
            text=text,
            stack=place.stack,
        )

    def _state(self, vitals: Vitals | None, place: Place, now: float, limit: float) -> RankState:
        if vitals is None or vitals.state in "ZX":
            return "ended"
        if vitals.tracer or vitals.state == "t" or place.is_debugged:
            return "debugged"
        if vitals.state == "T":
            return "stopped"
        if place.waits_in:
            return "waits"
        stands_still = now - self.pulse.tree_still_since >= limit / 2
        return "blocked" if stands_still and vitals.state != "D" else "computes"

    def _place(self) -> Place:
        answers = {} if self.question is None else self.question.answers
        text = answers.get(self.pulse.process_id)
        return Place() if text is None else place_of(main_stack(text, self.page.main_thread))

    def _reader(self) -> tuple[int, Place] | None:
        """The first of its DataLoader's workers that is in the script's own code."""
        answers = {} if self.question is None else self.question.answers
        for process_id, text in answers.items():
            place = reader_place(main_stack(text, self.page.main_thread))
            if process_id != self.pulse.process_id and place is not None:
                return process_id, place
        return None


def write_stacks(path: str, workers: Sequence[Worker], elsewhere: Collection[RankStatus] = ()) -> str:
    """Append all that the workers have answered to a file, and of ranks elsewhere what was told of them; returns its
    name as a user would write it.
    """
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(time.strftime("== %Y-%m-%d %H:%M:%S\n"))
            for worker in workers:
                answers = {} if worker.question is None else worker.question.answers
                for process_id, text in answers.items():
                    file.write(f"-- rank {worker.config.rank}, process {process_id}\n{text}\n")
            for where in elsewhere:
                frames = "".join(f"  {frame}\n" for frame in where.stack)
                file.write(f"-- rank {where.rank}, on another host: {where.text}\n{frames}\n")
    except OSError:
        return ""
    return os.path.relpath(path)
