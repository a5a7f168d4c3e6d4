"""A worker that starts as a plain process (`--no-warm`): the script itself imports torch."""

import os
import sys
from collections.abc import Callable

import msgspec

from rankless.config.worker_config import HostConfig
from rankless.runtime.fast_exit import FastExit
from rankless.runtime.worker import make_worker


def main(fast_exit: FastExit) -> Callable[[], None]:
    """Read the config from standard input, and return the function that runs the user's program."""
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=HostConfig)
    (launch,) = config.workers
    worker = launch.config
    inherited = (worker.rounds_descriptor, worker.recovery_descriptor, *worker.inherited)
    for descriptor in (config.records_descriptor, *inherited):
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
    process = make_worker(launch, config, fast_exit, hide_torch=False)
    return process.exec if config.program.kind == "command" else process.run
