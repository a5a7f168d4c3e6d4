"""In every phase of a run, a process that is stuck, killed or stopped is named within `--hang-timeout`.

Each phase of `launch.watchdog.phase_timeouts` is made with a real run, on one host and on two.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hosts import Hosts, two_hosts
from support.jobs import RANKLESS, start_rankless

from rankless.launch.watchdog.phase_timeouts import PHASES

pytestmark = pytest.mark.slow

HOLD = """
import os, signal, socket, sys, time

def hold(phase):
    if phase != sys.argv[1] or os.environ.get("RANK", "1") not in sys.argv[3].split(","):
        return
    if sys.argv[2] == "killed":
        signal.raise_signal(signal.SIGKILL)
    if sys.argv[2] == "stopped":
        signal.raise_signal(signal.SIGSTOP)
    time.sleep(600)
"""
FORK_SERVER = """
import os, signal, socket, sys, time
# The fork server of the last host: it has no arguments and no rank.
fault, host = open("start").read().split()
if host in ("any", socket.gethostname()):
    if fault == "killed":
        signal.raise_signal(signal.SIGKILL)
    if fault == "stopped":
        signal.raise_signal(signal.SIGSTOP)
    time.sleep(600)
"""
IMPORTED = "from held import hold\nhold('import')\n"
SCRIPT = """
import atexit, sys, threading, time
import imported
from held import hold
import torch, torch.distributed as dist, rankless
from rankless.checkpoint import saving

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        hold("data")
        return torch.ones(2)

class State:
    def state_dict(self):
        hold("save")
        return {"a": 1}
    def load_state_dict(self, state):
        pass

def join_another_store():
    if sys.argv[2] != "stuck":
        threading.Timer(0.5, hold, ["joining"]).start()
    dist.TCPStore("127.0.0.1", 0, 9, True)

def main():
    if sys.argv[1] == "joining" and rankless_rank() in sys.argv[3].split(","):
        join_another_store()
    rankless.init()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @rankless.job(model=model, optimizer=optimizer)
    def train(x):
        hold("capture")
        return model(x).square().mean()

    loader = rankless.loader(Data(), batch_size=4, num_workers=1 if sys.argv[1] == "data" else 0)
    for _ in range(2):
        for x in loader:
            train(x)
        hold("script")
    rankless.save("checkpoint", state=State())
    rankless.once(hold, "once")
    if sys.argv[1] == "end":
        saving.WriteTask.run = lambda task: hold("end")
        rankless.save("later", model=model, background=True)
    atexit.register(hold, "teardown")

def rankless_rank():
    import os
    return os.environ["RANK"]

main()
"""
STUCK = {
    "start": r"its process has not started: process \d+, which starts the workers, sleeps",
    "import": r"it is in hold\(\) at \S*held.py:\d+, called from \S*imported.py:2 while it imports a module \(sleeps",
    "joining": r"waits in TCPStore\(\) at script.py:\d+",
    "data": r"while it reads data; its DataLoader worker, process \d+, is in hold\(\) at .*\(sleeps",
    "capture": r"it is in hold\(\) at .* while it captures a job \(sleeps",
    "save": r"it is in hold\(\) at .* while it saves or loads \(sleeps",
    "once": r"it is in hold\(\) at .* while it calls a function once for all ranks \(sleeps",
    "script": r"it is in hold\(\) at .*, called from script.py:\d+ \(sleeps",
    "end": r"it is at the end of its script while it saves or loads \(waits for",
    "teardown": r"its script has ended, but its process still runs at hold\(\) at ",
}
STOPPED = {
    "start": r"which starts the workers, is stopped by a signal \(kill -CONT \d+",
    "data": r"its DataLoader worker, process \d+, is stopped by a signal \(kill -CONT",
    "teardown": r"its script has ended, but its process is stopped by a signal \(kill -CONT",
}
KILLED = {
    "start": r"the process that starts (its|the) workers",
    "data": r"DataLoader worker",
}
FAULTS = ("stuck", "stopped", "killed")
SAMPLE = {
    ("data", "stuck", "all", 1),
    ("start", "stopped", "one", 1),
    ("teardown", "stuck", "one", 2),
}
CASES = [
    pytest.param(
        phase.name,
        fault,
        who,
        hosts,
        id=f"{phase.name}, {who} {fault}, on {hosts}",
        marks=[] if (phase.name, fault, who, hosts) in SAMPLE else [pytest.mark.exhaustive],
    )
    for phase in PHASES
    for fault in FAULTS
    for who in ("one", "all")
    for hosts in (1, 2)
    if who == "one" or fault == "stuck"
]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("two"), sshd=()) as found:
        yield found


def expected(phase: str, fault: str) -> str:
    if fault == "stuck":
        return STUCK[phase]
    if fault == "stopped":
        return STOPPED.get(phase, r"it is stopped by a signal \(kill -CONT")
    return KILLED.get(phase, "was killed by signal 9")


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize(("phase", "fault", "who", "host_count"), CASES)
def test_a_process_is_named_in_every_phase(
    phase: str, fault: str, who: str, host_count: int, tmp_path: Path, request: pytest.FixtureRequest
):
    files = {"held": HOLD, "imported": IMPORTED, "script": SCRIPT, "preloaded": FORK_SERVER}
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "start").write_text(f"{fault} {'any' if who == 'all' or host_count == 1 else 'b'}")
    rank = "0" if phase == "once" else "1"
    words = ["--hang-timeout", "8", "--no-progress", *(["--preload", "preloaded"] if phase == "start" else [])]
    script = ["script.py", phase, fault, "0,1" if who == "all" else rank]
    path = f"{tmp_path}:{Path(__file__).parents[2]}"
    if host_count == 1:
        words += ["--min-workers", "2"]  # or the other worker continues
        jobs = [start_rankless("run", "-n", "2", *words, *script, folder=tmp_path, PYTHONPATH=path)]
    else:
        hosts = request.getfixturevalue("hosts")
        words += ["--hosts", ",".join(f"{address}:1" for address in hosts.addresses), "--no-ssh", "--insecure"]
        line = [*RANKLESS, "run", *words, *script]
        jobs = [hosts.start(name, line, cwd=tmp_path, env={"PYTHONPATH": path}) for name in ("a", "b")]
    reports = [job.communicate(timeout=110)[1] for job in jobs]
    assert all(job.returncode not in (0, None) for job in jobs), reports
    report = reports[0]
    last = "\n".join([line for line in report.splitlines() if line.startswith("rankless: ")][-4:])
    if (phase, fault) == ("start", "killed"):  # no rank has started
        last = report
    else:
        assert re.search(rf"rank {rank}\b" if who == "one" and phase != "start" else r"rank \d", last), report
    assert re.search(expected(phase, fault), last), report
