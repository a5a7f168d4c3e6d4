"""Scripts of Paddle's users, ported to torch, run by `rankless fleetrun` on the CPU of one host, and of two."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hosts import Hosts, two_hosts
from support.servers import SERVE, SERVER, install_server
from support.warm_runs import rankless

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[3] / "examples" / "foreign" / "fleet_digits.py"
PRINT_VARIABLES = """
import json, os, sys
import torch, torch.distributed as dist

rank, size = (int(os.environ[name]) for name in ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM"))
where = os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")[0]
dist.init_process_group("gloo", init_method=f"tcp://{where}", rank=rank, world_size=size)
total = torch.ones(1)
dist.all_reduce(total)
os.write(1, (json.dumps({**os.environ, "total": total.item(), "argv": sys.argv}) + "\\n").encode())
print("a complaint", file=sys.stderr)
dist.destroy_process_group()
if sys.argv[1:] == ["fail"]:
    if rank == 1:
        sys.exit(7)
    import time
    time.sleep(600)
"""


def printed_variables(text: str) -> dict[str, str]:
    (line,) = (line for line in text.splitlines() if line.startswith("{"))
    found: dict[str, str] = json.loads(line)
    return found


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run two processes on the CPU."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "print_variables.py").write_text(PRINT_VARIABLES)
    words = [
        "--nproc_per_node=2",
        "--job_id",
        "job/7",
        "--max-restart=3",
        "--log_level",
        "INFO",
        "print_variables.py",
        "a",
        "--b",
    ]
    done = rankless("fleetrun", *words, folder=folder)
    assert done.returncode == 0, done.stderr
    return done, folder


def test_a_process_gets_paddles_and_torchruns_variables(two_processes):
    _, folder = two_processes
    found = [printed_variables((folder / f"log/workerlog.{rank}").read_text()) for rank in range(2)]
    for rank, each in enumerate(found):
        for name in ("PADDLE_TRAINER_ID", "PADDLE_GLOBAL_RANK", "PADDLE_LOCAL_RANK", "PADDLE_RANK_IN_NODE", "RANK"):
            assert each[name] == str(rank)
        for name in ("PADDLE_TRAINERS_NUM", "PADDLE_GLOBAL_SIZE", "PADDLE_LOCAL_SIZE", "WORLD_SIZE"):
            assert each[name] == "2"
        endpoints = each["PADDLE_TRAINER_ENDPOINTS"].split(",")
        assert endpoints == found[0]["PADDLE_TRAINER_ENDPOINTS"].split(",")
        assert each["PADDLE_CURRENT_ENDPOINT"] == endpoints[rank] == f"{each['POD_IP']}:{each['PADDLE_PORT']}"
        assert each["PADDLE_MASTER"] == f"{each['MASTER_ADDR']}:{each['MASTER_PORT']}"
        assert (each["PADDLE_NNODES"], each["PADDLE_JOB_ID"]) == ("1", "job/7")
        assert "FLAGS_selected_gpus" not in each
        assert (each["total"], each["argv"]) == (2, ["print_variables.py", "a", "--b"])
    assert len(set(endpoints)) == 2


def test_the_start_prints_two_tables_and_a_notice_on_ignored_options(two_processes):
    done, _ = two_processes
    lines = done.stderr.splitlines()
    assert re.fullmatch("-+ Configuration Arguments -+", lines[0])
    for row in (
        "gpus: None",
        "ips: 127.0.0.1",
        "log_dir: log",
        "training_script: print_variables.py",
        "nproc_per_node: 2",
    ):
        assert row in lines
    assert "training_script_args: ['a', '--b']" in lines
    notes = [line for line in lines if line.startswith("rankless fleetrun: ")]
    assert [note.split(": ")[1] for note in notes] == ["--log_level", "--max_restart"]
    start = lines.index("Local start 2 processes. First process distributed environment info:")
    first = printed_variables(done.stdout)
    rows = [line.strip(" |").split() for line in lines[start:]]
    assert ["PADDLE_CURRENT_ENDPOINT", first["PADDLE_CURRENT_ENDPOINT"]] in rows
    assert ["PADDLE_TRAINERS_NUM", "2"] in rows
    assert ["PADDLE_TRAINER_ID", "0"] in rows
    assert re.match(r"rankless: on the CPU; .* logs: log/workerlog.0 to workerlog.1 \(in log/job_7-\w+,", lines[-1])


def test_only_the_first_process_is_shown_and_each_has_a_log_file(two_processes):
    done, folder = two_processes
    assert printed_variables(done.stdout)["RANK"] == "0"
    assert done.stdout.count("a complaint") == 1
    for rank in range(2):
        path = folder / f"log/workerlog.{rank}"
        assert path.resolve().parent.name.startswith("job_7-")
        assert "a complaint" in path.read_text()


def test_the_failing_process_gives_the_exit_code_and_its_log_is_named(two_processes):
    _, folder = two_processes
    done = rankless("fleetrun", "--nproc_per_node", "2", "print_variables.py", "fail", folder=folder)
    assert done.returncode == 7
    assert re.search(r"^rankless: rank 1 .*exit code 7$", done.stderr, re.M)
    assert re.search(r"log file is log/\S+/workerlog.1;", done.stderr)


def test_the_default_is_one_cpu_process_and_stale_log_links_are_removed(two_processes):
    _, folder = two_processes
    done = rankless("fleetrun", "print_variables.py", folder=folder, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert printed_variables(done.stdout)["PADDLE_TRAINERS_NUM"] == "1"
    assert "Local start 1 process. " in done.stderr
    assert os.path.lexists(folder / "log/workerlog.0")
    assert not os.path.lexists(folder / "log/workerlog.1")


def results(text: str) -> list[float]:
    assert re.search(
        r"^epoch 0, step 10, train_loss: \S+, acc: \S+, total time cost: \S+ s, speed: \S+ samples/s$", text, re.M
    )
    return [float(found) for found in re.findall(r"test_loss: (\S+),", text)]


@pytest.mark.exhaustive
def test_a_ported_script_is_the_same_on_one_device_and_on_many(tmp_path: Path):
    words = (str(EXAMPLE), "--epochs", "2", "--batch_size")
    environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    plain = subprocess.run(
        [sys.executable, *words, "64"],
        cwd=tmp_path,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    done = rankless("fleetrun", "--nproc_per_node=2", *words, "32", folder=tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    assert results(done.stdout) == pytest.approx(results(plain.stdout), rel=1e-4)
    assert len(results(done.stdout)) == 2


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("hosts")) as found:
        yield found


WAYS = [
    pytest.param("--ips={0},{1}", id="listed, the token comes by ssh"),
    pytest.param("--nnodes=2 --master={0}:9944 --insecure", id="numbered"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", WAYS)
def test_the_same_command_on_two_hosts_is_one_training(way: str, hosts: Hosts, tmp_path: Path):
    options = way.format(*hosts.addresses).split()
    line = [sys.executable, "-m", "rankless", "fleetrun", *options, "--nproc_per_node=2", "print_variables.py"]
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "print_variables.py").write_text(PRINT_VARIABLES)
    started = [hosts.start(name, line, cwd=tmp_path / name) for name in "ab"]
    first, second = (job.communicate(timeout=60) for job in started)
    assert [job.returncode for job in started] == [0, 0], (first, second)
    lead = printed_variables(first[0])
    endpoints = [f"{address}:{port}" for address in hosts.addresses for port in (6070, 6071)]
    assert lead["PADDLE_TRAINER_ENDPOINTS"].split(",") == endpoints
    assert (lead["PADDLE_NNODES"], lead["PADDLE_TRAINERS_NUM"], lead["total"]) == ("2", "4", 4)
    assert second[0] == ""
    other = printed_variables((tmp_path / "b/log/workerlog.2").read_text())
    assert (other["PADDLE_TRAINER_ID"], other["PADDLE_LOCAL_RANK"], other["POD_IP"]) == ("2", "0", hosts.addresses[1])
    assert f"{endpoints[2]} " in second[1]
    assert f"host 2 of 2; {hosts.addresses[0]} shows the training" in second[1]


def test_servers_have_logs_beside_those_of_workers_and_paddles_variables(tmp_path: Path):
    server = SERVER + "print(json.dumps(dict(os.environ)), flush=True)\n" + SERVE.removeprefix(SERVER)
    (tmp_path / "print_variables.py").write_text(PRINT_VARIABLES)
    words = ("--server_num=2", "--worker_num=2", "print_variables.py")
    done = rankless("fleetrun", *words, folder=tmp_path, **install_server(tmp_path, server))
    assert done.returncode == 0
    assert "server_num: 2\n" in done.stderr
    assert "worker_num: 2\n" in done.stderr
    assert re.search(
        r"rankless: 2 servers on the CPU at (127\.0\.0\.1:\d+(, )?){2}; logs: log/serverlog\.0 to", done.stderr
    )
    roles = {"server": "PSERVER", "worker": "TRAINER"}
    found = {
        f"{role}{index}": printed_variables((tmp_path / f"log/{role}log.{index}").read_text())
        for role in roles
        for index in range(2)
    }
    for name, variables in found.items():
        assert variables["TRAINING_ROLE"] == roles[name[:-1]]
        assert variables["PADDLE_TRAINERS_NUM"] == "2"
    assert len({variables["PADDLE_PSERVERS_IP_PORT_LIST"] for variables in found.values()}) == 1
    assert len({variables["PADDLE_PORT"] for variables in found.values()}) == 4
    assert [found[f"server{index}"]["CUDA_VISIBLE_DEVICES"] for index in range(2)] == ["", ""]
    assert rankless("fleetrun", "print_variables.py", folder=tmp_path).returncode == 0
    assert not list((tmp_path / "log").glob("serverlog.*"))
