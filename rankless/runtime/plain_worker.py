"""A worker that starts as a plain process (`--no-warm`): torch is imported by the script alone."""

import os
import sys
from collections.abc import Callable

import msgspec

from rankless.config.worker_config import HostConfig
from rankless.runtime.fast_exit import FastExit
from rankless.runtime.worker import enter


def main(fast_exit: FastExit) -> Callable[[], None]:
    """Read the plan from standard input, and return what runs the user's program."""
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=HostConfig)
    (launch,) = config.workers
    for descriptor in (config.records_descriptor, launch.config.store_descriptor, launch.config.rounds_descriptor):
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
    worker = enter(launch, config, fast_exit, hide_torch=False)
    return worker.become if config.program.kind == "command" else worker.run
