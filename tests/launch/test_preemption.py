"""A run that is asked to stop ends by itself with exit code 75, in each view and on each host."""

import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.hosts import Hosts, two_hosts
from support.jobs import RANKLESS, kill_job, read_process_ids, start_script, wait_until
from support.preempted_jobs import PLAIN, TRAINING
from support.slurm import Slurm, requires_slurm, started_slurm

from rankless.records.run_json_format import decode_run_summary

pytestmark = pytest.mark.slow
OPTIONS = ("--devices", "cpu")

STARTED = """
with open(f"worker{os.environ.get('RANK', '0')}.pid", "w") as file:
    print(os.getpid(), file=file)
"""


def make_loop(setup: str = "", step: str = "") -> str:
    """Return a script that trains until it is asked to stop. The third step writes the number of its process."""
    return f"""
import os, sys, time
import torch, rankless
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{setup}
steps = 0
while not rankless.stopping():
    steps += 1
    time.sleep(0.02)
    {textwrap.indent(step.strip(), "    ").strip()}
    if steps == 3:
        {textwrap.indent(STARTED.strip(), "        ").strip()}
print("stopped after", steps, flush=True)
"""


STEP = """
optimizer.zero_grad()
model(inputs).square().mean().backward()
optimizer.step()
"""
LOGICAL = """
from torch.utils.data import DataLoader, TensorDataset
batches = iter(DataLoader(TensorDataset(torch.randn(8000, 4)), batch_size=4))
"""
MIRRORED = """
@rankless.job(model=model, optimizer=optimizer, view="mirrored")
def train(inputs):
    return model(inputs).square().mean()
"""
DDP = """
import torch.distributed as dist
if not dist.is_initialized():
    dist.init_process_group("gloo")
model, inputs = torch.nn.parallel.DistributedDataParallel(model), torch.ones(4, 4)
"""
VIEWS = {
    "alone": (make_loop(), ("-n", "1")),
    "copies": (make_loop(), ("-n", "3")),
    "logical": (make_loop(LOGICAL, "(inputs,) = next(batches)" + STEP), ("-n", "3", "--logical")),
    "mirrored": (make_loop(MIRRORED, "train([torch.ones(4, 4)] * rankless.world_size())"), ("-n", "2")),
    "DistributedDataParallel": (make_loop(DDP, STEP), ("-n", "2")),
}


def ask(job: subprocess.Popen[str], folder: Path, workers: int, number: int) -> tuple[str, str]:
    """Send the agent a signal when all workers are in their loop, and return what the run has printed."""
    try:
        wait_until(lambda: len(read_process_ids(folder)) == workers)
        job.send_signal(number)
        return job.communicate(timeout=60)
    finally:
        kill_job(job)


@pytest.mark.ci_sample(2)
@pytest.mark.parametrize("view", VIEWS)
def test_all_ranks_stop_at_the_same_step(view: str, tmp_path: Path):
    text, options = VIEWS[view]
    job = start_script(text, *options, *OPTIONS, "--show", "all", folder=tmp_path)
    started = 1 if view == "logical" else int(options[1])  # its effects happen once
    out, err = ask(job, tmp_path, started, signal.SIGTERM)
    assert job.returncode == 75, err
    steps = [line.rpartition("stopped after ")[2] for line in out.splitlines() if "stopped after" in line]
    assert len(steps) == int(options[1])
    assert len(set(steps)) == 1
    assert "rankless: preempted (exit code 75) after " in err
    summary = decode_run_summary((tmp_path / "log" / "latest" / "run.json").read_bytes())
    assert (summary.outcome, summary.exit_code) == ("preempted", 75)
    assert [rank.exit_code for rank in summary.ranks] == [75] * int(options[1])


def test_in_plain_python_the_script_has_its_own_exit_code(tmp_path: Path):
    (tmp_path / "script.py").write_text(make_loop())
    job = subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    out, _ = ask(job, tmp_path, 1, signal.SIGTERM)
    assert (job.returncode, out[:13]) == (0, "stopped after")


def test_a_request_that_the_script_never_hears_leaves_a_complete_run(tmp_path: Path):
    text = f"import os, time, rankless\nrankless.stopping()\n{STARTED}\ntime.sleep(1)\n"
    job = start_script(text, "-n", "2", *OPTIONS, folder=tmp_path)
    _, err = ask(job, tmp_path, 2, signal.SIGTERM)
    assert job.returncode == 0, err
    summary = decode_run_summary((tmp_path / "log" / "latest" / "run.json").read_bytes())
    assert (summary.outcome, summary.exit_code) == ("succeeded", 0)


@pytest.mark.parametrize(
    ("end", "code"),
    [("raise OSError('full')", 1), pytest.param("sys.exit(3)", 3, marks=pytest.mark.exhaustive)],
)
def test_a_script_that_fails_after_the_request_is_not_preempted(tmp_path: Path, end: str, code: int):
    job = start_script(f"{make_loop()}\n{end}\n", "-n", "2", *OPTIONS, folder=tmp_path)
    _, err = ask(job, tmp_path, 2, signal.SIGTERM)
    assert job.returncode == 143, err
    assert "preempted" not in err
    summary = decode_run_summary((tmp_path / "log" / "latest" / "run.json").read_bytes())
    assert [rank.exit_code for rank in summary.ranks] == [code, code]


@pytest.mark.exhaustive
def test_a_rank_that_does_not_ask_is_cut_off_after_the_grace(tmp_path: Path):
    text = make_loop(step="if steps == 5 and os.environ['RANK'] == '1':\n    time.sleep(100)")
    job = start_script(text, "-n", "2", *OPTIONS, "--grace-seconds", "2", folder=tmp_path)
    _, err = ask(job, tmp_path, 2, signal.SIGTERM)
    assert job.returncode == 143
    assert re.search(r"rankless: rank 1 had not ended 2\.\d s after the signal, and was killed in script.py:12", err), (
        err
    )


@pytest.mark.exhaustive
def test_processes_that_the_script_forks_end_by_the_signal(tmp_path: Path):
    text = make_loop("""
read, written = os.pipe()
child = os.fork()
if not child:
    os.write(written, b".")
    time.sleep(100)
    os._exit(0)
os.read(read, 1)  # a signal that arrives within fork() is lost, as in any Python
os.kill(child, 15)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -15
""")
    job = start_script(text, "-n", "2", *OPTIONS, folder=tmp_path)
    _, err = ask(job, tmp_path, 2, signal.SIGTERM)
    assert job.returncode == 75, err


@pytest.mark.exhaustive
def test_the_first_question_is_for_the_main_thread(tmp_path: Path):
    text = """
import threading, rankless
found = []
def ask():
    try:
        rankless.stopping()
    except rankless.RanklessError as error:
        found.append(str(error))
thread = threading.Thread(target=ask, name="side")
thread.start()
thread.join()
assert "in the thread side" in found[0]
"""
    (tmp_path / "script.py").write_text(text)
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, check=True)


HANDLES_TERM = (
    """
import os, signal, sys, time
def save(*_):
    time.sleep(1)
    open(f"saved{os.environ['RANK']}.txt", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
"""
    + STARTED
    + """
while True:
    time.sleep(0.01)
"""
)


@pytest.mark.parametrize("number", [signal.SIGUSR1, pytest.param(signal.SIGUSR2, marks=pytest.mark.exhaustive)])
def test_in_slurm_a_warning_is_a_request_to_stop(number: int, tmp_path: Path):
    job = start_script(make_loop(), "-n", "2", *OPTIONS, folder=tmp_path, SLURM_JOB_ID="7")
    _, err = ask(job, tmp_path, 2, number)
    assert job.returncode == 75, err


def test_in_slurm_a_warning_begins_the_grace_of_a_script_without_a_handler_for_it(tmp_path: Path):
    job = start_script(HANDLES_TERM, "-n", "2", *OPTIONS, folder=tmp_path, SLURM_JOB_ID="7")
    try:
        wait_until(lambda: len(read_process_ids(tmp_path)) == 2)
        job.send_signal(signal.SIGUSR1)
        wait_until(lambda: (tmp_path / "log").exists())
        job.send_signal(signal.SIGTERM)  # the end that the warning has announced does not cut the save
        _, err = job.communicate(timeout=60)
    finally:
        kill_job(job)
    assert {path.name for path in tmp_path.glob("saved*")} == {"saved0.txt", "saved1.txt"}, err
    assert job.returncode in (128 + signal.SIGUSR1, 128 + signal.SIGTERM)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("two"), sshd=()) as found:
        yield found


@pytest.mark.exhaustive
@pytest.mark.parametrize("asked", ["a", "b"])
def test_workers_of_two_hosts_stop_at_the_same_step(asked: str, hosts: Hosts, tmp_path: Path):
    (tmp_path / "script.py").write_text(make_loop())
    listed = ",".join(f"{address}:2" for address in hosts.addresses)
    line = [*RANKLESS, "run", "--hosts", listed, "--no-ssh", "--insecure", "--show", "all", *OPTIONS, "script.py"]
    jobs = {name: hosts.start(name, line, cwd=tmp_path) for name in ("a", "b")}
    wait_until(lambda: len(read_process_ids(tmp_path)) == 4)
    jobs[asked].send_signal(signal.SIGTERM)
    ends = [job.communicate(timeout=60) for job in jobs.values()]
    assert [job.returncode for job in jobs.values()] == [75, 75], ends
    steps = [line.rpartition(" ")[2] for out, _ in ends for line in out.splitlines() if "stopped after" in line]
    assert len(set(steps)) == 1
    assert steps


BATCH = """#!/bin/sh
srun rankless-command
code=$?
echo "$SLURM_RESTART_COUNT: $code" >> codes.txt
if [ $code = 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
"""


def run_plain(folder: Path) -> dict:
    (folder / "plain.py").write_text(PLAIN.replace("EVERY", "1").replace("READERS", "{}"))
    subprocess.run([sys.executable, "plain.py"], cwd=folder, check=True)
    return torch.load(folder / "results.pt")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with started_slurm(tmp_path_factory.mktemp("cluster")) as found:
        yield found


def submit(slurm: Slurm, folder: Path, name: str, *options: str) -> None:
    """Submit a job of two nodes with two workers each, whose steps take half a second and leave files."""
    text = TRAINING.replace(
        "count_call()\n    s", "count_call()\n        open(f'step{step}.txt', 'w').close()\n    s", 1
    )
    (folder / "script.py").write_text(f"import os\nos.environ['PAUSE'] = '0.5'\n{text}")
    command = " ".join([*RANKLESS, "run", "-n", "2", *OPTIONS, "script.py"])
    (folder / "job.sh").write_text(BATCH.replace("rankless-command", command))
    slurm.run("sbatch", "-J", name, "-N2", "--ntasks-per-node=1", "--requeue", *options, "job.sh", cwd=folder)


@requires_slurm
@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["requeued", "preempted", "USR1", "TERM"])
def test_a_job_of_slurm_that_is_requeued_continues_to_the_bit(way: str, slurm: Slurm, tmp_path: Path):
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    for folder in (undisturbed, disturbed):
        folder.mkdir()
    submit(slurm, undisturbed, "undisturbed")
    wait_until(lambda: (undisturbed / "codes.txt").exists(), seconds=120)
    submit(slurm, disturbed, "disturbed")
    wait_until(lambda: (disturbed / "step11.txt").exists(), seconds=60)
    number = slurm.job_number("disturbed")
    if way == "requeued":
        slurm.run("scontrol", "requeue", number)
    elif way == "preempted":  # by a job of a partition of higher priority, which takes both nodes
        slurm.run("sbatch", "-p", "high", "-N2", "--exclusive", "--wrap", "sleep 3", cwd=tmp_path)
    else:
        slurm.run("scancel", "-s", way, number)
    wait_until(lambda: (disturbed / "results.pt").exists(), seconds=180)
    wait_until(lambda: not slurm.job_number("disturbed"), seconds=60)
    steps = sorted(int(path.name[5:]) for path in (disturbed / "kept").iterdir())
    assert 11 <= steps[-1] < 36
    found, expected = (torch.load(folder / "results.pt") for folder in (disturbed, undisturbed))
    for name, tensor in expected["model"].items():
        assert torch.equal(found["model"][name], tensor), name
    plain = run_plain(tmp_path)
    torch.testing.assert_close(found["model"], plain["model"], rtol=1e-10, atol=1e-13)
