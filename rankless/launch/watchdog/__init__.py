"""Detect hung jobs and slow ranks, and name the rank that the others wait for.

`watchdog` combines the parts. The supervisor calls it on every tick and passes it every record. Each module adds one
kind of evidence:

- `phase_timeouts`: the table of the phases of a run, with the limits of each, and the usual time of a step;
- `process_activity`: CPU time and context switches of each worker, from `/proc`;
- `stacks` and `stack_classifier`: the Python stacks of stalled workers, and whether they wait in a collective;
- `worker_idleness_and_location`: the `RankStatus` of each local rank;
- `processes_beside_workers`: the state of the processes beside the workers;
- `hang_verdict`: which ranks are missing, also when a collective has timed out, and when to end the job;
- `report`: the text for the terminal;
- `slow_ranks`: which ranks take longer than others for their part of each step.

Outputs are `Notice`, `RankStatus`, `HangDetected`, `StepTimes` and `SlowRankChanged` records. The watchdog works on
Linux only.
"""

import importlib
from types import ModuleType


def load_part(name: str) -> ModuleType:
    """Return a module of this package that no start of a run needs, such as `report`."""
    return importlib.import_module(f"rankless.launch.watchdog.{name}")
