"""Measure the memory that the programs of jobs take."""

from typing import Any

from rankless.jobs.memory_meter import PeakMemoryMode


class MeteredCalls:
    """Runs a job's programs as `World.programs`, and measures the peak memory of each call."""

    def __init__(self) -> None:
        self.peaks: list[int] = []
        """The most bytes in use at any time in each call."""
        self.collectives: list[tuple[str, str, bool]] = []
        """The kind and value of the collectives of the last program, and whether they are in its backward pass."""

    def record(self, _job: Any, local: Any) -> None:
        self.collectives = [(move.kind, move.value, move.backward) for move in local.collectives]

    def run(self, _job: Any, bound: Any, values: Any, sizes: Any) -> Any:
        with PeakMemoryMode(values) as meter:
            outputs = bound.local(values, sizes)
        self.peaks.append(meter.peak_bytes)
        return outputs

    def finish(self, _known: Any) -> None:
        pass
