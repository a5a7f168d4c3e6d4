"""Commands of Horovod's users, run by `rankless horovodrun` on the CPU of one host, and of two."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hosts import Hosts, two_hosts
from support.jobs import rankless

pytestmark = pytest.mark.slow

SENTENCE = (
    "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be terminated. "
    "The first process to do so was:\nProcess name: {}\nExit code: {}\n"
)
PREFIXED = re.compile(r"^\[(\d+)\]<std(?:out|err)>:(.*)$", re.M)
SIZE = "import horovod.torch as hvd; hvd.init(); print('size', hvd.size(), 'rank', hvd.rank())"
PRINT_VARIABLES = """
import os, sys
for name in sorted(os.environ):
    if name.startswith("HOROVOD_") or name in ("RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "PYTHONUNBUFFERED"):
        print(f"{name}={os.environ[name]}")
print(sys.argv[1:], file=sys.stderr)
sys.stdout.write("no end")
"""
TRAIN = """
import torch, horovod.torch as hvd
from torch.utils.data.distributed import DistributedSampler

hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
data = torch.utils.data.TensorDataset(torch.arange(32.0).reshape(8, 4) / 32, torch.ones(8, 1))
sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, wanted in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), wanted)
        loss.backward()
        optimizer.step()
print(f"weights {model.weight.flatten().tolist()}")
"""


def horovodrun(*words: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run horovodrun; `python` is the interpreter of the tests."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return rankless("horovodrun", *words, folder=folder, **{"PATH": path, **environment})


def by_rank(text: str) -> dict[int, list[str]]:
    """Return the lines that each rank printed."""
    found: dict[int, list[str]] = {}
    for rank, line in PREFIXED.findall(text):
        found.setdefault(int(rank), []).append(line)
    return found


def variables(lines: list[str]) -> dict[str, str]:
    return dict(line.split("=", 1) for line in lines if "=" in line)


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [1, 2])
def test_the_tutorials_check_prints_the_size_on_each_rank(count: int, tmp_path: Path):
    launch = ("--mpi-launch-flag", "env CUDA_VISIBLE_DEVICES=0")
    done = horovodrun("-np", str(count), *launch, "python", "-c", SIZE, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert by_rank(done.stdout) == {rank: [f"size {count} rank {rank}"] for rank in range(count)}


@pytest.mark.exhaustive
def test_code_without_init_gets_the_documented_error_and_does_not_hang(tmp_path: Path):
    code = "import horovod.torch as hvd; print(hvd.size())"
    done = horovodrun("-np", "2", "python", "-c", code, folder=tmp_path)
    assert done.returncode == 1
    text = "ValueError: Horovod has not been initialized; use hvd.init()."
    rank = re.search(rf"^rankless: rank (\d) raised {re.escape(text)}$", done.stderr, re.M)
    assert rank is not None, done.stderr
    assert SENTENCE.format(rank[1], 1) in done.stderr


WAYS = [
    pytest.param(("python", "train.py"), id="script"),
    pytest.param(("python", "-m", "train"), id="module", marks=pytest.mark.exhaustive),
    pytest.param(("env", "A=1", "python", "train.py"), id="command", marks=pytest.mark.exhaustive),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("words", WAYS)
def test_a_script_trains_alike_for_every_way_to_run_python(words: tuple[str, ...], tmp_path: Path):
    (tmp_path / "train.py").write_text(TRAIN)
    done = horovodrun("-np", "2", *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = by_rank(done.stdout)
    assert len(lines[0]) == 1
    assert lines[0] == lines[1]


@pytest.mark.exhaustive
def test_two_names_of_one_machine_count_as_two_hosts(tmp_path: Path):
    places = "hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()"
    code = f"import horovod.torch as hvd; hvd.init(); print({places})"
    done = horovodrun("-np", "3", "-H", "localhost:2,127.0.0.1:1", "python", "-c", code, folder=tmp_path)
    assert by_rank(done.stdout) == {0: ["0 2 0 2"], 1: ["1 2 0 1"], 2: ["0 1 1 2"]}, done.stderr


@pytest.fixture(scope="module")
def configured_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run with some options, a few of which contradict the environment."""
    folder = tmp_path_factory.mktemp("configured")
    (folder / "print_variables.py").write_text(PRINT_VARIABLES)
    (folder / "out/rank.0").mkdir(parents=True)
    (folder / "out/rank.0/stdout").write_text("of a run before\n")
    (folder / "config.yaml").write_text("params:\n    cycle_time_ms: 2\n    cache_capacity: 5\n")
    words = (
        *("-np", "2", "-H", "localhost:1,127.0.0.1:4", "--output-filename", "out", "--config-file", "config.yaml"),
        *("--fusion-threshold-mb", "1", "--cache-capacity", "7", "--disable-cache", "--verbose"),
        *("--mpi-launch-flag", "env CUDA_VISIBLE_DEVICES="),
    )
    given = {"HOROVOD_FUSION_THRESHOLD": "3", "HOROVOD_LOG_LEVEL": "INFO"}
    done = horovodrun(*words, "python", "print_variables.py", "a", "--b", folder=folder, **given)
    assert done.returncode == 0, done.stderr
    return done, folder


def test_workers_get_horovods_variables_and_options_take_precedence(configured_run):
    found = {rank: variables(lines) for rank, lines in by_rank(configured_run[0].stdout).items()}
    for rank, host in enumerate(("localhost", "127.0.0.1")):
        assert found[rank] == {
            "CUDA_VISIBLE_DEVICES": "",
            "HOROVOD_CACHE_CAPACITY": "7",
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_CROSS_RANK": str(rank),
            "HOROVOD_CROSS_SIZE": "2",
            "HOROVOD_CYCLE_TIME": "2.0",
            "HOROVOD_FUSION_THRESHOLD": str(1 << 20),
            "HOROVOD_GLOO_IFACE": "lo",
            "HOROVOD_HOSTNAME": host,
            "HOROVOD_LOCAL_RANK": "0",
            "HOROVOD_LOCAL_SIZE": "1",
            "HOROVOD_LOG_LEVEL": "INFO",
            "HOROVOD_RANK": str(rank),
            "HOROVOD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "PYTHONUNBUFFERED": "1",
            "RANK": str(rank),
        }


def test_both_streams_of_every_rank_are_shown_and_logged(configured_run):
    done, folder = configured_run
    assert by_rank(done.stderr) == {rank: ["['a', '--b']"] for rank in range(2)}
    for rank in range(2):
        assert by_rank(done.stdout)[rank][-1] == "no end"
        own = folder / f"out/rank.{rank}"
        assert (own / "stdout").read_text().splitlines() == by_rank(done.stdout)[rank]
        assert (own / "stderr").read_text() == "['a', '--b']\n"


def test_ignored_options_get_a_notice_and_verbose_prints_the_variables(configured_run):
    messages = [line for line in configured_run[0].stderr.splitlines() if line.startswith("rankless horovodrun: ")]
    assert messages == [
        "rankless horovodrun: --disable-cache: not needed: Rankless caches no checks",
        "rankless horovodrun: slots: localhost:1, 127.0.0.1:1",
        "rankless horovodrun: program: script print_variables.py a --b",
        "rankless horovodrun: variable: HOROVOD_FUSION_THRESHOLD=1048576",
        "rankless horovodrun: variable: HOROVOD_CYCLE_TIME=2.0",
        "rankless horovodrun: variable: HOROVOD_CACHE_CAPACITY=7",
        "rankless horovodrun: variable: CUDA_VISIBLE_DEVICES=",
    ]


def test_each_line_starts_with_the_time_on_request(tmp_path: Path):
    done = horovodrun("-np", "1", "-prefix-timestamp", "echo", "hello", folder=tmp_path)
    assert re.fullmatch(r"\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}\[0\]<stdout>:hello\n", done.stdout)


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("sys.exit(7)", 7, "left with exit code 7"),
        pytest.param(
            "os.kill(os.getpid(), signal.SIGABRT)",
            128 + signal.SIGABRT,
            "was killed by signal 6 (SIGABRT)",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param("raise KeyError('mine')", 1, "raised KeyError: 'mine'", marks=pytest.mark.exhaustive),
    ],
)
def test_the_failing_rank_is_named_and_gives_the_exit_code(how: str, code: int, message: str, tmp_path: Path):
    text = (
        "import horovod.torch as hvd, torch, os, signal, sys\nhvd.init()\nhvd.allreduce(torch.ones(1))\n"
        f"if hvd.rank() == 1:\n    {how}\nwhile True:\n    hvd.allreduce(torch.ones(1), name='on')\n"
    )
    (tmp_path / "fails.py").write_text(text)
    done = horovodrun("-np", "2", "python", "fails.py", folder=tmp_path)
    assert done.returncode == code, done.stderr
    assert f"rankless: rank 1 {message}\n" in done.stderr
    assert done.stderr.endswith(SENTENCE.format(1, code))


def test_a_failing_command_is_named_too(tmp_path: Path):
    done = horovodrun("-np", "2", "sh", "-c", "test $HOROVOD_RANK = 0 || exit 3; sleep 600", folder=tmp_path)
    assert done.returncode == 3
    assert done.stderr.endswith(SENTENCE.format(1, 3))


@pytest.mark.exhaustive
def test_check_build_reports_the_actual_build(tmp_path: Path):
    done = horovodrun("--check-build", folder=tmp_path)
    assert done.returncode == 0
    rows = {name.strip(): mark for mark, name in re.findall(r"^    \[([X ])\] (.*)$", done.stdout, re.M)}
    ask = "import torch.distributed as d; print('X' if d.is_nccl_available() else ' ')"
    nccl = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout.rstrip("\n")
    assert rows == {
        **{"TensorFlow": " ", "PyTorch": "X", "MXNet": " ", "MPI": " ", "Gloo": "X"},
        **{"NCCL": nccl, "DDL": " ", "CCL": " "},
    }
    titles = re.findall(r"^Available .*:$", done.stdout, re.M)
    assert titles == ["Available Frameworks:", "Available Controllers:", "Available Tensor Operations:"]
    assert done.stdout.startswith("Horovod v0.28.1: its API, by Rankless ")
    assert horovodrun("-v", folder=tmp_path).stdout == "0.28.1\n"


@pytest.mark.exhaustive
def test_an_installed_horovod_is_reported(tmp_path: Path):
    (tmp_path / "site/horovod").mkdir(parents=True)
    (tmp_path / "site/horovod/__init__.py").write_text("print('the real one')")
    path = os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])
    words = ("-np", "1", "python", "-c", "import horovod")
    done = horovodrun(*words, folder=tmp_path, PYTHONPATH=path)
    assert "the real one" in done.stdout
    assert f"{tmp_path}/site/horovod/__init__.py; RANKLESS_HOROVOD=1 selects Rankless's" in done.stderr
    done = horovodrun(*words, folder=tmp_path, PYTHONPATH=path, RANKLESS_HOROVOD="1")
    assert (done.stdout, "selects Rankless's" in done.stderr) == ("", False)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("hosts")) as found:
        yield found


def on_two(hosts: Hosts, *words: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rankless", "horovodrun", "-np", "2", *words]
    return hosts.run("a", command, cwd=folder, env=environment)


@pytest.mark.exhaustive
@pytest.mark.parametrize("listed", ["a:1,b:1", pytest.param("localhost:1,b:3", marks=pytest.mark.exhaustive)])
def test_one_command_starts_both_hosts_and_shows_all_output(listed: str, hosts: Hosts, tmp_path: Path):
    code = SIZE + "; import os, sys; print(os.environ['MINE'], end='', file=sys.stderr)"
    done = on_two(hosts, "-H", listed, sys.executable, "-c", code, folder=tmp_path, MINE="carried along")
    assert done.returncode == 0, done.stdout + done.stderr
    assert by_rank(done.stdout) == {rank: [f"size 2 rank {rank}"] for rank in range(2)}
    assert {rank: lines[-1] for rank, lines in by_rank(done.stderr).items()} == dict.fromkeys(range(2), "carried along")


@pytest.mark.exhaustive
def test_a_hostfile_with_an_ssh_port_and_key(hosts: Hosts, tmp_path: Path):
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    (tmp_path / "print_variables.py").write_text(PRINT_VARIABLES)
    words = ("-hostfile", "hosts", "-p", "22", "--output-filename", "out", sys.executable, "print_variables.py")
    done = on_two(hosts, *words, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {rank: variables(lines) for rank, lines in by_rank(done.stdout).items()}
    for rank, name in enumerate("ab"):
        places = [found[rank][f"HOROVOD_{word}"] for word in ("HOSTNAME", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK")]
        assert places == [name, "0", "1", str(rank)]
        assert found[rank]["HOROVOD_GLOO_IFACE"] == "eth0"
        assert "HOROVOD_RANK" in (tmp_path / f"out/rank.{rank}/stdout").read_text()
    refused = on_two(hosts, "-H", "a:1,b:1", "-p", "2299", "true", folder=tmp_path)
    assert refused.returncode == 2
    assert "2299" in refused.stderr
    refused = on_two(hosts, "-H", "a:1,b:1", "-i", str(tmp_path / "no key"), "true", folder=tmp_path)
    assert "no key" in refused.stderr


@pytest.mark.exhaustive
def test_a_failure_on_the_other_host_ends_the_job(hosts: Hosts, tmp_path: Path):
    (tmp_path / "fails.py").write_text(
        "import os, sys, time\nsys.exit(9) if os.environ['RANK'] == '1' else time.sleep(600)"
    )
    done = on_two(hosts, "-H", "a:1,b:1", sys.executable, "fails.py", folder=tmp_path)
    assert done.returncode == 9
    assert done.stderr.endswith(SENTENCE.format(1, 9))
    assert "rankless: rank 1 on b left with exit code 9" in done.stderr
