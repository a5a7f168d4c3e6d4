"""Scripts written for torchrun, run by `rankless torchrun`."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.jobs import kill_job, start_rankless, wait_until
from support.jobs import rankless as started_rankless
from support.warm_runs import rankless

from rankless.errors import ConfigError
from rankless.launch.ports import require_own_address, reserve_master_port

pytestmark = pytest.mark.slow

TWO = ("--nproc-per-node", "2")


def torchrun(script: str, *options: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script)
    return rankless("torchrun", *options, "script.py", folder=folder, **environment)


ENVIRONMENT = """
import json, os, sys
os.write(1, (json.dumps({"rank": os.environ["RANK"], **os.environ, "argv": sys.argv}) + "\\n").encode())
"""


def environments(text: str) -> dict[str, dict[str, str]]:
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return {each["rank"]: each for each in found}


OPTIONS = ["--nnodes=1", "--node_rank=0", "--nproc_per_node", "2", "--rdzv_id", "job-7", "--role", "trainer"]


def test_the_environment_has_torchruns_names_and_values(tmp_path: Path):
    port = str(free_port())
    words = [*OPTIONS, "--master_addr", "localhost", "--master_port", port]
    (tmp_path / "script.py").write_text(ENVIRONMENT)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_NUM_THREADS", "GLOO_"))}
    theirs = environments(
        subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *words, "script.py", "a", "${local_rank}"],
            cwd=tmp_path,
            env=variables,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
    )
    job = started_rankless("torchrun", *words, "script.py", "a", "${local_rank}", folder=tmp_path)
    ours = environments(job.stdout)
    assert set(ours) == set(theirs) == {"0", "1"}, job.stderr
    own = {"RANKLESS_WORKER_PLAN", "GLOO_SOCKET_IFNAME"}
    different = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE"}
    for rank in ours:
        assert set(ours[rank]) - own == set(theirs[rank])
        same = set(theirs[rank]) - different
        assert {name: ours[rank][name] for name in same} == {name: theirs[rank][name] for name in same}
    assert ours["1"]["TORCHELASTIC_RUN_ID"] == "job-7"
    assert ours["1"]["argv"] == ["script.py", "a", "1"]


LOUD = """
import os, sys
rank = os.environ["RANK"]
for i in range(300):
    print("out", i, "of", rank)
print("err of", rank, file=sys.stderr)
print("apple of", rank)
sys.stdout.write("half")
"""


@pytest.fixture(scope="module")
def run_with_output(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    folder = tmp_path_factory.mktemp("output")
    return torchrun(LOUD, *TWO, "--log_dir", "logs", "--rdzv-id", "job/7", folder=folder), folder


def test_the_output_of_all_ranks_goes_unchanged_to_the_same_streams(run_with_output):
    job, _ = run_with_output
    lines = job.stdout.replace("half", "\n").split("\n")
    for rank in "01":
        assert [line for line in lines if line.startswith("out") and line.endswith(rank)] == [
            f"out {i} of {rank}" for i in range(300)
        ]
    assert job.stdout.count("half") == 2
    assert "err of" not in job.stdout
    assert sorted(line for line in job.stderr.splitlines() if line.startswith("err")) == ["err of 0", "err of 1"]


def test_log_files_have_torchruns_layout(run_with_output):
    _, folder = run_with_output
    (run,) = (folder / "logs").glob("job_7-*")
    assert os.readlink(folder / "logs" / "latest") == run.name
    found = sorted(path.relative_to(run).as_posix() for path in run.rglob("*.log"))
    assert found == [f"attempt_0/{rank}/std{stream}.log" for rank in "01" for stream in ("err", "out")]
    assert (run / "attempt_0/1/stderr.log").read_text() == "err of 1\n"


def test_the_start_prints_only_one_short_table(run_with_output):
    job, _ = run_with_output
    lines = [line for line in job.stderr.splitlines() if not line.startswith("err of")]
    assert re.fullmatch(r"rankless: 2 workers, 1 thread each, logs in logs/job_7-\S+", lines[0])
    assert [line.split()[0:3:2] for line in lines[1:]] == [["rank", "device"], ["0", "cpu"], ["1", "cpu"]]


def test_tee_redirects_filters_and_copies(tmp_path: Path):
    options = ["-t", "0:1,1:3", "-r", "0:2", "--role", "dog", "--duplicate-stdout-filters", "apple,9 of"]
    job = torchrun(LOUD, *TWO, *options, folder=tmp_path)
    assert {line.partition(":")[0] for line in job.stdout.splitlines()} == {"[dog0]", "[dog1]"}
    assert "[dog0]:half\n" in job.stdout
    assert "err of 0" not in job.stderr
    assert "[dog1]:err of 1\n" in job.stderr
    copied = (tmp_path / "log/latest/attempt_0/filtered_stdout.log").read_text().splitlines()
    assert "[dog0]:apple of 0" in copied
    assert all("apple" in line or "9 of" in line for line in copied)
    assert len(copied) == 2 * 31
    only = torchrun(LOUD, *TWO, "--local-ranks-filter=1", "--log-dir", os.devnull, folder=tmp_path)
    assert "of 1" in only.stdout
    assert "of 0" not in only.stdout + only.stderr


SEEDS = "import random, numpy, torch\nprint(random.random(), numpy.random.rand(), torch.rand(1).item())\n"


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("start", [(), ("--start-method", "spawn")], ids=["forked", "plain"])
def test_ranks_draw_different_random_numbers(start: tuple[str, ...], tmp_path: Path):
    job = torchrun(SEEDS, *TWO, *start, folder=tmp_path)
    drawn = job.stdout.split()
    assert len(drawn) == len(set(drawn)) == 6, job.stderr
    assert "seed" not in job.stderr
    assert ("plain processes" in job.stderr) == bool(start)


TRAIN = """
import importlib
package = importlib.import_module(NAME)
import random, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
@package.job(model=model, optimizer=optimizer)
def train(x):
    return model(x).square().mean()
loss = train(torch.ones(4, 2)).item()
print(loss, random.random(), torch.rand(1).item())
"""


def test_a_script_with_jobs_trains_the_same_on_all_ranks(tmp_path: Path):
    job = torchrun(TRAIN.replace("NAME", "'rankless'"), *TWO, folder=tmp_path)
    first, second = job.stdout.splitlines()
    assert first == second
    assert ", seed " in job.stderr
    assert "different seeds" not in job.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["out of sight", "in a command's child"])
def test_ranks_with_different_seeds_continue_from_rank_0s_at_the_first_job(how: str, tmp_path: Path):
    name, options = "'rank' 'less'", [*TWO]
    if how == "in a command's child":
        name, options = "'rankless'", [*TWO, "--no-python", sys.executable]
    job = torchrun(TRAIN.replace("NAME", name), *options, folder=tmp_path)
    first, second = job.stdout.splitlines()
    assert first == second, job.stderr
    assert job.stderr.count("started from different seeds") == 1


def test_the_first_failing_worker_is_named_and_gives_the_exit_code(tmp_path: Path):
    script = """
import os, sys, time
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    if os.environ["RANK"] == "1":
        if sys.argv[1:]:
            sys.exit(7)
        raise ValueError("rank 1 is tired")
    time.sleep(600)
main()
"""
    job = torchrun(script, *TWO, "--max-restarts", "3", "--monitor-interval", "2", folder=tmp_path)
    assert job.returncode == 1
    assert "rank 1 raised ValueError: rank 1 is tired" in job.stderr
    notes = [line for line in job.stderr.splitlines() if line.startswith("rankless torchrun: ")]
    assert len(notes) == 1
    assert "--max-restarts 3: Rankless restarts nothing" in notes[0]
    assert "--monitor-interval" in notes[0]
    assert "rank 1 is tired" in (tmp_path / "log/latest/attempt_0/1/error.json").read_text()
    job = rankless("torchrun", *TWO, "script.py", "now", folder=tmp_path)
    assert job.returncode == 7
    assert "attempt_0/1/stderr.log" in job.stderr


def test_a_module_and_any_command_run_and_macros_are_replaced(tmp_path: Path):
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text("import sys\nprint(__name__, __package__, sys.argv[1:])\n")
    job = rankless("torchrun", *TWO, "-m", "pack.part", "-m", "${local_rank}", folder=tmp_path)
    assert sorted(job.stdout.splitlines()) == [f"__main__ pack ['-m', '{rank}']" for rank in range(2)]
    echo = 'echo "$RANK of $WORLD_SIZE, $1, $RANKLESS_WORKER_PLAN"'
    words = f"{echo}; touch started$RANK; while [ ! -e started0 ]; do sleep 0.02; done; exit $((RANK * 3))"
    job = rankless("torchrun", *TWO, "--no_python", "sh", "-c", words, "sh", "${local_rank}", folder=tmp_path)
    assert sorted(job.stdout.splitlines()) == ["0 of 2, 0, ", "1 of 2, 1, "]
    assert job.returncode == 3
    assert "rank 1 ended with exit code 3" in job.stderr


def test_the_users_interpreter_and_virtual_local_ranks(tmp_path: Path):
    python = tmp_path / "my python"
    python.write_text(f'#!/bin/sh\nMINE=1 exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    script = "import os\nprint(*[os.environ[name] for name in ('MINE', 'LOCAL_RANK', 'CUDA_VISIBLE_DEVICES')])"
    own = {"PYTHON_EXEC": str(python), "CUDA_VISIBLE_DEVICES": "5,3"}
    job = torchrun(script, *TWO, "--virtual-local-rank", folder=tmp_path, **own)
    assert sorted(job.stdout.splitlines()) == ["1 0 3", "1 0 5"], job.stderr


GROUP = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="env://")
x = torch.ones(1)
dist.all_reduce(x)
print(x.item())
dist.destroy_process_group()
"""


@pytest.mark.exhaustive
def test_a_process_group_uses_the_requested_port_twice_in_a_row(tmp_path: Path):
    port = str(free_port())
    for _ in range(2):
        job = torchrun(GROUP, *TWO, "--master-addr", "localhost", "--master-port", port, folder=tmp_path)
        assert (job.stdout, job.returncode) == ("2.0\n2.0\n", 0), job.stderr


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def test_a_taken_port_is_rejected_and_its_owner_named(tmp_path: Path):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        job = torchrun("", "--master-port", str(port), folder=tmp_path)
    assert job.returncode == 2
    assert f"taken by process {os.getpid()}: " in job.stderr
    assert f"port {port}" in job.stderr
    assert not (tmp_path / "log").exists()


def test_a_port_reserved_by_another_run_is_rejected_one_in_time_wait_is_not():
    with reserve_master_port() as other, pytest.raises(ConfigError, match="without listening"):
        reserve_master_port(other.getsockname()[1])
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            ours, _ = server.accept()
            ours.close()  # the side that closes first keeps its port in TIME_WAIT
    reserve_master_port(port).close()


@pytest.mark.parametrize("address", ["192.0.2.1", "no-such-host.invalid"])
def test_a_master_address_of_another_host_is_rejected(address: str):
    with pytest.raises(ConfigError, match=address):
        require_own_address(address)
    require_own_address("localhost")


HANDLER = """
import os, signal, sys, time
def save(number, frame):
    time.sleep(1.5)
    open(f"saved{os.environ['RANK']}", "w").write(signal.Signals(number).name)
    sys.exit(0)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, save)
open(f"ready{os.environ['RANK']}", "w").close()
while True:
    time.sleep(0.05)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_are_forwarded_and_workers_have_time_to_save(number: signal.Signals, tmp_path: Path):
    (tmp_path / "script.py").write_text(HANDLER)
    job = start_rankless(
        "torchrun", *TWO, "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1", "script.py", folder=tmp_path
    )
    try:
        wait_until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)))
        job.send_signal(number)
        assert job.wait(timeout=20) == 128 + number
    finally:
        kill_job(job)
    assert [(tmp_path / f"saved{rank}").read_text() for rank in range(2)] == [number.name] * 2


@pytest.mark.exhaustive
def test_workers_that_do_not_end_in_time_are_killed(tmp_path: Path):
    script = HANDLER.replace("time.sleep(1.5)", "time.sleep(600)")
    (tmp_path / "script.py").write_text(script)
    job = start_rankless("torchrun", *TWO, "--shutdown-timeout", "1", "script.py", folder=tmp_path)
    try:
        wait_until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)))
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=10) == 128 + signal.SIGTERM
    finally:
        kill_job(job)
    assert not (tmp_path / "saved0").exists()
