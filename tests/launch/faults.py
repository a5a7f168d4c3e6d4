"""The fault matrix: what can go wrong in a running job, on one host and on two, and what the report must say."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from support.hosts import Hosts
from support.jobs import is_alive, kill_job, read_process_ids, start_rankless, wait_until

SCRIPT = """
import ctypes, os, resource, signal, subprocess, sys, threading, time
import torch, torch.distributed as dist

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
role = json.loads(sys.argv[1])

def mark(name, number):
    with open(f"{name}.pid", "w") as file:
        file.write(f"{number}\\n")

def failing():
    with open("failed", "w") as file:
        file.write(repr(time.time()))

dist.init_process_group("gloo")
mark(f"rank{rank}", os.getpid())
exec(role["everywhere"])
dist.barrier()
if rank == role["failing_rank"]:
    time.sleep(0.2)
    failing()
    exec(role["action"])
elif role["others"]:
    exec(role["others"])
while True:
    dist.all_reduce(torch.ones(8))
    time.sleep(0.005)
"""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that goes wrong while a job runs."""

    name: str
    action: str = "pass"
    """The code that the failing rank runs. It is the last rank."""
    others: str = ""
    """What the other ranks do meanwhile, beside waiting in a collective."""
    everywhere: str = ""
    outside: Callable[["Job"], None] | None = None
    """What is done to the job from outside."""
    expected: str
    """A pattern that the report must match, with {rank} and {host} ("" if there is one host)."""
    code: int
    hosts: tuple[int, ...] = (1, 2)
    least_workers: int = 1
    limit_seconds: float = 2.0
    """The goal; what is measured is published."""
    hang_timeout_seconds: float | None = None
    """The --hang-timeout of the job, if the watchdog ends it."""


class Job:
    """A job on one host or two, with a process per host."""

    def __init__(self, folder: Path, workers: int, hosts: Hosts | None) -> None:
        self.folder = folder
        self.hosts = hosts
        self.workers = workers
        self.world = workers * (1 if hosts is None else 2)
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, fault: Fault) -> None:
        """Start it, and wait until every worker has joined."""
        (self.folder / "faulty.py").write_text("import json\n" + SCRIPT)
        role = {"failing_rank": self.world - 1 if fault.outside is None else -1}
        role |= {"action": fault.action, "others": fault.others, "everywhere": fault.everywhere}
        words = ["run", "-n", str(self.workers), "--no-progress", "faulty.py", json.dumps(role)]
        if fault.hang_timeout_seconds is not None:
            words[3:3] = ["--hang-timeout", str(fault.hang_timeout_seconds)]
        if self.hosts is None:
            self.processes["a"] = start_rankless(*words, folder=self.folder)
        else:
            words[1:3] = ["--hosts", ",".join(f"{each}:{self.workers}" for each in self.hosts.addresses)]
            words[3:3] = ["--no-ssh", "--insecure"]
            for name in ("a", "b"):
                command = [sys.executable, "-m", "rankless", *words]
                self.processes[name] = self.hosts.start(name, command, cwd=self.folder)
        wait_until(lambda: len(self.pids()) == self.world)

    def pids(self) -> dict[str, int]:
        """The workers' processes."""
        return {name: number for name, number in read_process_ids(self.folder).items() if name.startswith("rank")}

    def find_agent_and_fork_server(self, name: str) -> tuple[psutil.Process, psutil.Process]:
        """The agent and the workers' parent on a host."""
        rank = 0 if name == "a" else self.workers
        parent, agent = psutil.Process(self.pids()[f"rank{rank}"]).parents()[:2]
        return agent, parent

    def mark_failure(self) -> None:
        """From now on the clock runs."""
        (self.folder / "failed").write_text(repr(time.time()))

    def all_process_ids(self) -> list[int]:
        """All processes that must not outlive the job, those that its scripts have marked included."""
        found = set(read_process_ids(self.folder).values())
        for name in self.processes:
            agent, _ = self.find_agent_and_fork_server(name)
            found |= {agent.pid, *(child.pid for child in agent.children(recursive=True))}
        return sorted(found)


@dataclass(frozen=True, kw_only=True)
class FaultResult:
    """How a job with a fault ended."""

    fault: str
    hosts: int
    workers: int
    seconds: float
    """Until nothing of it was alive anywhere."""
    is_right: bool
    """Whether the report names the root cause and the exit code is right."""
    lines: int
    """Of the report."""
    orphans: int
    report: str = ""


def measure_fault(fault: Fault, *, workers: int, folder: Path, hosts: Hosts | None) -> FaultResult:
    """Start a job, let the fault happen, and see how it ends."""
    job = Job(folder, workers, hosts)
    try:
        job.start(fault)
        all_process_ids = job.all_process_ids()
        if fault.outside is not None:
            job.mark_failure()
            fault.outside(job)
        wait_until(lambda: (folder / "failed").exists())
        codes, report = _ended(job)
        left = _seconds_until_gone(all_process_ids, limit=15.0)
        began = float((folder / "failed").read_text())
        expected = fault.expected.format(rank=job.world - 1, **_names(job))
        return FaultResult(
            fault=fault.name,
            hosts=len(job.processes),
            workers=workers,
            seconds=round((left or time.time()) - began, 2),
            is_right=re.search(expected, report) is not None
            and codes[-1 if fault.name.startswith("host 0") else 0] == fault.code,
            lines=len(report.splitlines()),
            orphans=sum(is_alive(number) for number in all_process_ids),
            report=f"{codes}\n{report}",
        )
    finally:
        for process in job.processes.values():
            kill_job(process)


def _ended(job: Job) -> tuple[list[int], str]:
    """The exit codes of all hosts, and what was reported: by host 0, or, if that is gone, by the other."""
    codes, reports = [], []
    for process in job.processes.values():
        _, err = process.communicate(timeout=60)
        codes.append(process.returncode)
        reports.append(_report_in(err))
    return codes, next(filter(None, reports), "")


def _report_in(err: str) -> str:
    """From the first line that tells of the end on."""
    found = re.search(
        r"^rankless: (rank \d+|host |ended by|the job|the process)|^rankless run: \w+Error", err, re.MULTILINE
    )
    return "" if found is None else err[found.start() :]


def _seconds_until_gone(pids: list[int], *, limit: float) -> float | None:
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if not any(is_alive(number) for number in pids):
            return time.time()
        time.sleep(0.005)
    return None


def _names(job: Job) -> dict[str, str]:
    if job.hosts is None:
        return {"host": "", "a": "", "b": ""}
    a, b = map(re.escape, job.hosts.addresses)
    return {"host": f" on {b}", "a": a, "b": b}


@contextmanager
def restore_link(hosts: Hosts | None) -> Iterator[None]:
    """Afterwards the network is whole again."""
    try:
        yield
    finally:
        if hosts is not None:
            hosts.link("b", up=True)


def make_row(found: FaultResult) -> dict[str, object]:
    """For the published table."""
    return {name: value for name, value in asdict(found).items() if name != "report"}
