"""Behaviour of whole jobs: no launcher, a stall warning on standard error, a rank that ends early."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.jobs import rankless

from rankless.config.environment import python_path_at_start

pytestmark = pytest.mark.slow

CONFORMANCE = Path(__file__).parent / "conformance"
SHUT_DOWN = (
    "Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to allreduce, "
    "allgather or broadcast a tensor after one of the ranks finished execution. If the shutdown was caused by an "
    "exception, you should see the exception in the log before the first shutdown message."
)
STALLING = """
import horovod.torch as hvd
import torch
hvd.init()
try:
    if hvd.rank() == 0:
        hvd.grouped_allreduce([torch.ones(2)], name="x")
    else:
        handle = hvd.allreduce_async(torch.ones(2), name="x")
        while not hvd.poll(handle):  # it might submit the other operation yet
            pass
        hvd.synchronize(handle)
except hvd.HorovodInternalError as error:
    print(f"error: {error}")
"""
ENDING = """
import horovod.torch as hvd
import torch
hvd.init()
if hvd.rank() == 0:
    try:
        hvd.allreduce(torch.ones(2), name="x")
    except hvd.HorovodInternalError as error:
        print(f"error: {error}")
"""


@pytest.mark.exhaustive
def test_all_operations_work_in_one_process_without_a_launcher(tmp_path: Path):
    path = os.pathsep.join([python_path_at_start(), str(CONFORMANCE)])
    outside = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [sys.executable, "-c", "import leaving, horovod.torch as hvd; hvd.init(); leaving.alone(); print('done')"],
        cwd=tmp_path,
        env={**outside, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@pytest.mark.exhaustive
def test_rank_0_warns_about_a_stall_and_ends_the_job_if_configured(tmp_path: Path):
    (tmp_path / "script.py").write_text(STALLING)
    options = ("--stall-check-warning-time-seconds", "1", "--stall-check-shutdown-time-seconds", "2")
    done = rankless("horovodrun", "-np", "2", *options, sys.executable, "script.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    warnings = [
        line.removeprefix("[0]<stderr>:") for line in done.stderr.splitlines() if line.startswith("[0]<stderr>:")
    ]
    start = next(index for index, line in enumerate(warnings) if line.startswith("One or more tensors"))
    assert warnings[start : start + 4] == [
        "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are waiting "
        "for remainder of ranks for more than 1 seconds. This may indicate that different ranks are trying to submit "
        "different tensors or that only subset of ranks is submitting tensors, which will cause deadlock. ",
        "Missing ranks:",
        "0: [allreduce.x]",
        "1: [grouped_allreduce.x_1of1]",
    ]
    assert "[1]<stderr>:One or more tensors" not in done.stderr
    for rank in (0, 1):
        assert f"[{rank}]<stdout>:error: {SHUT_DOWN}" in done.stdout


@pytest.mark.exhaustive
def test_a_rank_that_ends_counts_as_shut_down(tmp_path: Path):
    (tmp_path / "script.py").write_text(ENDING)
    done = rankless("horovodrun", "-np", "2", sys.executable, "script.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"[0]<stdout>:error: {SHUT_DOWN}\n" in done.stdout


SPAWNING = """
import multiprocessing, sys
import horovod.torch as hvd

def child():
    try:
        hvd.init()
    except Exception as error:
        print(type(error).__name__, error, flush=True)
        sys.exit(3)

if __name__ == "__main__":
    hvd.init()
    for method in ("spawn", "fork"):
        process = multiprocessing.get_context(method).Process(target=child)
        process.start()
        process.join()
        assert process.exitcode == 3, (method, process.exitcode)
    hvd.barrier()
"""


@pytest.mark.exhaustive  # `conformance/leaving.py` has a forked child
def test_init_in_a_child_of_a_worker_raises_an_error(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(SPAWNING)
    done = rankless("run", "-n", "2", "--show", "all", str(script), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("JoinError") == 4
    assert done.stdout.count("a child of a worker: it would train alone, as rank 0 of 1") == 4
