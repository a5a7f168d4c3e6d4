"""Real hung jobs: the watchdog names the missing rank and its line, and leaves slow but healthy jobs alone."""

import re

import pytest
from support.warm_runs import rankless, run_script

pytestmark = pytest.mark.slow

TIMEOUT = "3"

TRAINING = """
import ctypes, os, signal, socket, subprocess, sys, threading, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
odd = rank == dist.get_world_size() - 1
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

{fault}

for step in range(9):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    if step == 6 and odd:
        stuck()
    dist.all_reduce(torch.ones(3))  # here
print("done")
"""

FAULTS = {
    "sleeps": ("def stuck():\n    time.sleep(600)  # there", "sleeps"),
    "loops": ("def stuck():\n    while True: pass  # there", "computes"),
    "waits for a lock": (
        "def stuck():\n    lock = threading.Lock(); lock.acquire()\n    lock.acquire()  # there",
        "lock",
    ),
    "waits for an event": ("def stuck():\n    threading.Event().wait()  # there", "lock"),
    "waits for the network": (
        "def stuck():\n    ends = socket.socketpair()\n    ends[0].recv(1)  # there",
        "waits for data",
    ),
    "waits for a process": ("def stuck():\n    subprocess.run(['sleep', '600'])  # there", "waits for a process"),
    "holds the interpreter": (
        "def stuck():\n    pipe, end = os.pipe()\n"
        "    ctypes.PyDLL(None).read(pipe, ctypes.create_string_buffer(1), 1)  # there",
        "waits for data",
    ),
    "is in another collective": (
        "def stuck():\n    dist.barrier()  # there",
        "it waits in barrier",
    ),
    "waits for an asynchronous message": (
        "def stuck():\n    work = dist.irecv(torch.ones(3), src=0, tag=7)\n    work.wait()  # there",
        "it waits in wait()",
    ),
}


def line_number(script, mark):
    return next(number for number, line in enumerate(script.splitlines(), 1) if f"# {mark}" in line)


def find_verdict(done):
    """Return the final line, on the rank that ended the job."""
    assert done.returncode == 1, done.stderr
    return next(line for line in done.stderr.splitlines()[::-1] if re.match(r"rankless: rank \d", line))


SAMPLE = {("sleeps", 3), ("loops", 2), ("holds the interpreter", 2), ("is in another collective", 3)}


def make_cases():
    for name in FAULTS:
        for workers in (2, 3):
            marks = [] if (name, workers) in SAMPLE else [pytest.mark.exhaustive]
            yield pytest.param(name, workers, marks=marks, id=f"{name}, {workers} workers")


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize(("name", "workers"), list(make_cases()))
def test_the_missing_rank_and_its_line_are_named(name, workers, tmp_path):
    fault, sign = FAULTS[name]
    script = TRAINING.replace("{fault}", fault)
    done = run_script(script, "-n", str(workers), "--hang-timeout", TIMEOUT, folder=tmp_path)
    verdict = find_verdict(done)
    assert f"rank {workers - 1} did not arrive" in verdict
    assert f"at script.py:{line_number(script, 'there')}" in verdict.partition(";")[0]
    assert sign in verdict
    waiting = "rank 0 waits" if workers == 2 else "ranks 0, 1 wait"
    assert f"{waiting} in all_reduce at script.py:{line_number(script, 'here')}" in verdict
    report = done.stderr[done.stderr.index("no progress for") :]
    assert len(report[: report.index("rankless: rank")].splitlines()) <= 15
    assert "in stuck" in report


JOINING = """
import os, sys, torch.distributed as dist

def stuck():
    while True: pass  # there

if os.environ["RANK"] == sys.argv[1]:
    stuck()
{join}  # here
"""
JOINS = {
    "init_process_group": 'dist.init_process_group("gloo")',
    "TCPStore()": 'dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 3, os.environ["RANK"] == "0")',
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("missing", ["0", "2"])
@pytest.mark.parametrize("name", JOINS)
def test_a_rank_missing_from_a_rendezvous_is_named(name, missing, tmp_path):
    script = JOINING.replace("{join}", JOINS[name])
    (tmp_path / "script.py").write_text(script)
    done = rankless("run", "-n", "3", "--hang-timeout", "5", "script.py", missing, folder=tmp_path)
    verdict = find_verdict(done)
    assert f"rank {missing} did not arrive: it is in stuck() at script.py:{line_number(script, 'there')}" in verdict
    assert re.search(rf"waits? in {re.escape(name)} at script.py:{line_number(script, 'here')}", verdict)


@pytest.mark.exhaustive
def test_a_stopped_worker_is_named(tmp_path):
    script = TRAINING.replace("{fault}", "def stuck():\n    os.kill(os.getpid(), signal.SIGSTOP)")
    verdict = find_verdict(run_script(script, "-n", "2", "--hang-timeout", TIMEOUT, folder=tmp_path))
    assert "rank 1 did not arrive: it is stopped by a signal (kill -CONT" in verdict


@pytest.mark.exhaustive
def test_a_rank_whose_process_outlives_its_script_is_named(tmp_path):
    fault = "def stuck():\n    threading.Thread(target=time.sleep, args=(600,)).start()\n    sys.exit()"
    verdict = find_verdict(
        run_script(TRAINING.replace("{fault}", fault), "-n", "2", "--hang-timeout", TIMEOUT, folder=tmp_path)
    )
    assert "rank 1 did not arrive: its script has ended, but its process still runs" in verdict


DATA_LOADER = """
import os, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, index):
        if index == 9 and dist.get_rank() == 1:
            time.sleep(600)  # there
        return torch.ones(2)
model = DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=2):
    model(batch).sum().backward()  # here
    optimizer.step()
"""


@pytest.mark.exhaustive
def test_a_hung_data_loader_worker_is_named_while_ddp_waits(tmp_path):
    verdict = find_verdict(run_script(DATA_LOADER, "-n", "2", "--hang-timeout", TIMEOUT, folder=tmp_path))
    assert "rank 1 did not arrive" in verdict
    assert re.search(
        rf"worker, process \d+, is in __getitem__\(\) at script.py:{line_number(DATA_LOADER, 'there')}", verdict
    )
    assert f"rank 0 waits in backward() at script.py:{line_number(DATA_LOADER, 'here')}" in verdict


JOB = """
import time, torch, rankless
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
@rankless.job(model=model, optimizer=optimizer)
def train(x):
    return model(x).square().mean()
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 48
    def __getitem__(self, index):
        if index == SLOW:
            time.sleep(600)  # read
        return torch.ones(2)
for step, x in enumerate(rankless.loader(Data(), batch_size=4)):
    if step == 6 and rankless.rank() == SLEEPER:
        time.sleep(600)  # there
    train(x)  # here
"""


def test_a_rank_missing_from_a_job_call_is_named(tmp_path):
    script = JOB.replace("SLEEPER", "1").replace("SLOW", "-1")
    verdict = find_verdict(run_script(script, "-n", "3", "--hang-timeout", TIMEOUT, folder=tmp_path))
    assert f"rank 1 did not arrive: it is at script.py:{line_number(script, 'there')} (sleeps" in verdict
    assert f"ranks 0, 2 wait in a job's call at script.py:{line_number(script, 'here')}" in verdict


@pytest.mark.exhaustive
def test_a_rank_missing_while_it_reads_its_batch_is_named(tmp_path):
    script = JOB.replace("SLEEPER", "-1").replace("SLOW", "27")  # in batch 6 the last worker's
    verdict = find_verdict(run_script(script, "-n", "2", "--hang-timeout", TIMEOUT, folder=tmp_path))
    assert f"rank 1 did not arrive: it is in __getitem__() at script.py:{line_number(script, 'read')}" in verdict
    assert "rank 0 waits in" in verdict


@pytest.mark.exhaustive
def test_a_rank_missing_from_a_checked_collective_is_named(tmp_path):
    script = """
import time, torch, rankless
from rankless.collectives import all_reduce, barrier
rankless.init()
for step in range(9):
    if step == 5 and rankless.rank() == 0:
        time.sleep(600)  # there
    all_reduce(torch.ones(3))  # here
"""
    verdict = find_verdict(run_script(script, "-n", "3", "--hang-timeout", TIMEOUT, folder=tmp_path))
    assert f"rank 0 did not arrive: it is at script.py:{line_number(script, 'there')} (sleeps" in verdict
    assert f"ranks 1, 2 wait in rankless.collectives.all_reduce at script.py:{line_number(script, 'here')}" in verdict


TIMED_OUT = """
import datetime, time, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=3))
dist.barrier()
if dist.get_rank() == 1:
    time.sleep(600)  # there
dist.all_reduce(torch.ones(3))  # here
"""


@pytest.mark.exhaustive
def test_the_missing_rank_is_named_if_the_scripts_own_timeout_expires_first(tmp_path):
    done = run_script(TIMED_OUT, "-n", "3", folder=tmp_path)
    verdict = find_verdict(done)
    assert f"rank 1 did not arrive: it is at script.py:{line_number(TIMED_OUT, 'there')} (sleeps" in verdict
    assert f"wait in all_reduce at script.py:{line_number(TIMED_OUT, 'here')} for 3.0 s" in verdict
    assert "PyTorch's timeout expired" in verdict
    assert "RuntimeError" not in verdict


@pytest.mark.exhaustive
def test_without_the_watchdog_a_timeout_still_names_the_waiting_ranks(tmp_path):
    done = run_script(TIMED_OUT, "-n", "2", folder=tmp_path, RANKLESS_HANG_TIMEOUT="0")
    verdict = find_verdict(done)
    here = f"script.py:{line_number(TIMED_OUT, 'here')}"
    assert (
        f"rank 0 waited in all_reduce at {here} until its timeout of 3 s; did not report waiting there: rank 1"
        in verdict
    )


FOR_5_SECONDS = "import time; end = time.monotonic() + 5\nwhile time.monotonic() < end: pass"
HEALTHY = {
    "one long step of all ranks": "time.sleep(5)",
    "a step in which all compute": "[sum(range(10**6)) for _ in range(150)]",
    "one slow rank": "time.sleep(2.5 * odd)",
    "children that compute": f"subprocess.run([sys.executable, '-c', {FOR_5_SECONDS!r}]) if odd else None",
}


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("name", HEALTHY)
def test_pauses_of_a_healthy_job_are_not_reported(name, tmp_path):
    fault = f"def pause():\n    if step == 6:\n        {HEALTHY[name]}\n    return False"
    script = TRAINING.replace("{fault}", fault).replace("step == 6 and odd", "pause()")
    done = run_script(script, "-n", "2", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "done" in done.stdout
    assert "no progress" not in done.stderr


@pytest.mark.exhaustive
def test_a_long_save_is_reported_and_the_job_continues(tmp_path):
    script = TRAINING.replace("{fault}", "def stuck():\n    torch.save(model, 'm'); time.sleep(7)  # there")
    # The job continues for longer than the interval between two checks.
    script = script.replace('print("done")', 'for _ in range(60): optimizer.step(); time.sleep(0.05)\nprint("done")')
    done = run_script(script, "-n", "2", "--hang-timeout", "10", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"rank 1 did not arrive: it is in stuck() at script.py:{line_number(script, 'there')}" in done.stderr
    assert "rankless: the job continues after a pause of" in done.stderr
    assert "done" in done.stdout


@pytest.mark.exhaustive
def test_a_rank_at_a_breakpoint_is_reported_but_never_ended(tmp_path):
    fault = """
def stuck():
    import pdb
    pipe, end = os.pipe()
    threading.Timer(7, lambda: os.write(end, b"continue\\n")).start()
    pdb.Pdb(stdin=os.fdopen(pipe), stdout=open(os.devnull, "w"), nosigint=True).set_trace()
"""
    done = run_script(TRAINING.replace("{fault}", fault), "-n", "2", "--hang-timeout", TIMEOUT, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "rank 1 did not arrive: it is in a debugger" in done.stderr


@pytest.mark.exhaustive
def test_output_of_the_missing_rank_delays_the_end(tmp_path):
    fault = """
def stuck():
    end = time.monotonic() + 6
    while time.monotonic() < end:
        print(".", flush=True)
        sum(range(1_000_000))
"""
    done = run_script(TRAINING.replace("{fault}", fault), "-n", "2", "--hang-timeout", TIMEOUT, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "rank 1 did not arrive: it is in stuck() at script.py" in done.stderr


@pytest.mark.exhaustive
def test_a_timeout_of_zero_turns_the_watchdog_off(tmp_path):
    script = TRAINING.replace("{fault}", "def stuck():\n    time.sleep(4)").replace(
        "import ctypes", "import ctypes, gc"
    )
    done = run_script(script, "-n", "2", folder=tmp_path, RANKLESS_HANG_TIMEOUT="0")
    assert done.returncode == 0
    assert "no progress" not in done.stderr


@pytest.mark.exhaustive
def test_plain_processes_are_watched_too(tmp_path):
    script = TRAINING.replace("{fault}", FAULTS["sleeps"][0])
    done = run_script(script, "-n", "2", "--no-warm", "--hang-timeout", "5", folder=tmp_path)
    assert "rank 1 did not arrive: it is in stuck() at script.py" in find_verdict(done)


@pytest.mark.parametrize("given", ["-1", "nan", "inf"])
def test_an_invalid_timeout_is_rejected(given, tmp_path):
    done = run_script("", "-n", "1", f"--hang-timeout={given}", folder=tmp_path)
    assert done.returncode != 0
    assert "seconds without progress after which a job is ended" in done.stderr
