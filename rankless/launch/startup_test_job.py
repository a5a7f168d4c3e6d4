"""The doctor's startup test: a job of two workers on this host, run by the same agent as any other."""

import sys
import tempfile
from collections.abc import Callable

from rankless.config.make_run_config import make_run_config
from rankless.config.run_config import Program, RunRequest
from rankless.launch import agent
from rankless.runtime.fast_exit import FastExit

WORKERS = 2
_SCRIPT = """
import sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
tensor = torch.ones(1024)
dist.all_reduce(tensor)
assert bool((tensor == dist.get_world_size()).all())
if dist.get_rank() == 0:
    print(sys.argv[1] + str(time.time()), flush=True)
dist.destroy_process_group()
"""


def main(fast_exit: FastExit) -> Callable[[], None]:  # noqa: ARG001  # every process of ours starts with it
    """Return a function that runs the job, whose time follows the mark given as the second argument."""
    mark = sys.argv[2]

    def run() -> None:
        # The job deletes its folder itself, also if the doctor is killed.
        with tempfile.TemporaryDirectory(prefix="rankless-doctor-") as folder:
            config = make_run_config(
                Program(kind="code", target=_SCRIPT, arguments=(mark,)),
                RunRequest(worker_count=WORKERS, devices="cpu", threads=1, log_folder=folder, progress=False),
            )
            raise SystemExit(agent.run(config, on_record=lambda _: None, out=sys.stdout, err=sys.stderr))

    return run
