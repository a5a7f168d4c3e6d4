"""A worker that starts as a plain process (`--no-warm`): torch is imported by the script alone."""

import os
import sys
from collections.abc import Callable

import msgspec

from rankless.plan.run_plan import HostPlan
from rankless.runtime.ending import Ending
from rankless.runtime.worker import enter


def main(ending: Ending) -> Callable[[], None]:
    """Read the plan from standard input, and return what runs the user's program."""
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=HostPlan)
    (launch,) = plan.workers
    for descriptor in (plan.records_descriptor, launch.plan.store_descriptor, launch.plan.rounds_descriptor):
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
    worker = enter(launch, plan, ending, hide_torch=False)
    return worker.become if plan.program.kind == "command" else worker.run
