"""One training on two hosts (network namespaces), started in all three ways.

It is the same training as on one host, host 0 shows its progress, and a failure on one host ends it on both.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.hosts import Hosts, two_hosts
from support.jobs import is_alive, read_process_ids, wait_until

pytestmark = pytest.mark.slow

TRAIN = """
import torch, rankless

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

@rankless.job(model=model, optimizer=optimizer)
def train(inputs):
    return model(inputs).square().mean()

if __name__ == "__main__":
    SETTINGS
    for step in range(5):
        loss = train(torch.arange(21.0).reshape(7, 3) / 21)
    print(f"loss {loss.item():.6f} on {rankless.world_size()}", flush=True)
"""
FAULTY = """
import os, signal, sys, time
import torch, torch.distributed as dist

rank = int(os.environ["RANK"])
dist.init_process_group()
with open(f"rank{rank}.pid", "w") as file:
    print(os.getpid(), file=file)
dist.barrier()
if rank == int(sys.argv[1]):
    time.sleep(0.3)
    exec(sys.argv[2])
while True:
    dist.all_reduce(torch.ones(4))
    time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("two")) as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN.replace("SETTINGS", "pass"))
    (tmp_path / "faulty.py").write_text(FAULTY)
    (tmp_path / "token").write_text("0123456789abcdef" * 2)
    return tmp_path


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "rankless", *words]


def listed(hosts: Hosts, workers: int = 2) -> str:
    return ",".join(f"{address}:{workers}" for address in hosts.addresses)


def wanted_loss(folder: Path) -> str:
    """Return the output of the run on one device."""
    done = subprocess.run([sys.executable, "train.py"], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.replace("on 1", "on 4")


def ended(process: subprocess.Popen[str], seconds: float = 120) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


@pytest.mark.exhaustive
def test_one_command_starts_the_other_host_by_ssh(hosts: Hosts, folder: Path):
    done = hosts.run("a", command("run", "--hosts", listed(hosts), "train.py"), cwd=folder)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, wanted_loss(folder).splitlines()), done.stderr
    assert "4 workers on 2 hosts" in done.stderr
    assert re.findall(r"^ +\d  (\S+) +(?:\d+|-)  cpu ", done.stderr, re.MULTILINE) == [
        *hosts.addresses[:1] * 2,
        *hosts.addresses[1:] * 2,
    ]
    assert len(list((folder / "log" / "latest").glob("rank*.log"))) == 4


@pytest.mark.exhaustive
def test_only_chosen_variables_reach_the_other_host(hosts: Hosts, folder: Path):
    (folder / "show.py").write_text(
        "import os\n"
        "names = ('COLOUR', 'SHAPE', 'OTHER')\n"
        "with open(f'seen{os.environ[\"RANK\"]}', 'w') as file:\n"
        "    print(*[os.environ.get(name) for name in names], file=file)\n"
    )
    words = command("run", "--hosts", listed(hosts, 1), "--env", "COLOUR", "--env", "SHAPE=a=b c", "show.py")
    done = hosts.run("a", words, cwd=folder, env={"COLOUR": "light blue", "SHAPE": "round", "OTHER": "here"})
    assert done.returncode == 0, done.stderr
    assert (folder / "seen0").read_text() == "light blue a=b c here\n"
    assert (folder / "seen1").read_text() == "light blue a=b c None\n"


@pytest.mark.exhaustive
def test_a_hostfile_names_hosts_and_a_token_file_suffices_for_manual_starts(hosts: Hosts, folder: Path):
    (folder / "hostfile").write_text("a slots=2\nb slots=2\n")
    words = command("run", "--hostfile", "hostfile", "--no-ssh", "train.py")
    token = {"RANKLESS_TOKEN_FILE": str(folder / "token")}
    other = hosts.start("b", words, cwd=folder, env=token)
    code, out, err = ended(hosts.start("a", words, cwd=folder, env=token))
    assert (code, out.splitlines()[-1:]) == (0, wanted_loss(folder).splitlines()), err
    code, out, err = ended(other)
    assert (code, out) == (0, "")
    assert err.count("\n") == 1
    assert "host 2 of 2, ranks 2 to 3" in err


@pytest.mark.exhaustive
def test_host_ranks_can_be_set_by_hand(hosts: Hosts, folder: Path):
    ranked = ["--master", f"{hosts.addresses[0]}:9911", "--host-count", "2", "--insecure", "-n"]
    other = hosts.start("b", command("run", "--host-rank", "1", *ranked, "3", "train.py"), cwd=folder)
    code, out, err = ended(hosts.start("a", command("run", "--host-rank", "0", *ranked, "1", "train.py"), cwd=folder))
    assert (code, out.splitlines()[-1:]) == (0, wanted_loss(folder).splitlines()), err
    assert ended(other)[0] == 0


@pytest.mark.exhaustive
def test_a_script_names_the_hosts_and_python_starts_it_on_each(hosts: Hosts, folder: Path):
    first, second = hosts.addresses
    settings = f'rankless.configure(devices_per_host=2, port=9977, hosts=["{first}", {{"addr": "{second}"}}])'
    (folder / "train.py").write_text(TRAIN.replace("SETTINGS", settings))
    master = hosts.start("a", [sys.executable, "train.py"], cwd=folder)
    other = hosts.start("b", [sys.executable, "train.py"], cwd=folder)
    code, out, err = ended(master)
    (folder / "train.py").write_text(TRAIN.replace("SETTINGS", "pass"))
    assert (code, out.splitlines()[-1:]) == (0, wanted_loss(folder).splitlines()), err
    assert ended(other)[0] == 0


@pytest.mark.parametrize("way", ["ssh", pytest.param("hand", marks=pytest.mark.exhaustive)])
def test_two_hosts_train_like_one_device(way: str, hosts: Hosts, folder: Path):
    options = ["--hosts", listed(hosts), *(["--no-ssh", "--insecure"] if way == "hand" else [])]
    other = hosts.start("b", command("run", *options, "train.py"), cwd=folder) if way == "hand" else None
    done = hosts.run("a", command("verify", *options, "train.py"), cwd=folder, seconds=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same training: 5 steps and 5 job calls on 1 and on 4 workers" in done.stdout
    assert other is None or ended(other)[0] == 0


FAULTS = {
    "raises there": (3, "raise ValueError('tired')", 1, "rank 3 on {b} raised ValueError: tired"),
    "raises here": (0, "raise ValueError('tired')", 1, "rank 0 on {a} raised ValueError: tired"),
    "is killed there": (2, "os.kill(os.getpid(), 9)", 137, "rank 2 on {b} was killed by signal 9 (SIGKILL)"),
    "leaves early there": (3, "sys.exit(0)", 1, "rank 3 on {b} ended its script while other ranks still needed it"),
    "exits there": (3, "os._exit(9)", 9, "rank 3 on {b} ended with exit code 9"),
}


@pytest.mark.exhaustive  # the fault matrix has more of them, and a sample that always runs
@pytest.mark.parametrize("name", FAULTS)
def test_a_failed_rank_is_named_with_its_host_and_all_processes_end(name: str, hosts: Hosts, folder: Path):
    rank, action, code, words = FAULTS[name]
    job = hosts.start("a", command("run", "--hosts", listed(hosts), "faulty.py", str(rank), action), cwd=folder)
    returned, _, err = ended(job)
    a, b = hosts.addresses
    assert returned == code, err
    assert err.count(words.format(a=a, b=b)) == 1
    assert len(err[err.index("rankless: rank") :].splitlines()) <= 15
    assert nobody_is_left(folder)


@pytest.mark.exhaustive
def test_a_host_that_ssh_has_started_keeps_its_report_in_its_log_folder(tmp_path: Path):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        (folder / "faulty.py").write_text(FAULTY)
    with two_hosts(tmp_path, before={"b": f"mount --bind {there} {here}"}) as apart:  # a folder of its own
        words = command("run", "--hosts", listed(apart, 1), "faulty.py", "1", "raise ValueError('tired')")
        done = apart.run("a", words, cwd=here)
        assert done.returncode == 1, done.stderr
        kept = there / "log" / "latest" / "report1.txt"
        report = done.stderr[done.stderr.index(f"rankless: rank 1 on {apart.addresses[1]} raised ValueError: tired") :]
        own = kept.read_text().splitlines()  # without what host 0 adds about its own ranks, and its summary
        assert own[0].startswith(f"rankless: rank 1 on {apart.addresses[1]} raised ValueError: tired")
        assert [line for line in report.splitlines() if line in own] == own
        assert f"this report {kept.resolve().relative_to(there)} there" in report
        assert not list(here.glob("log/*/report*"))


def nobody_is_left(folder: Path, seconds: float = 2.0) -> bool:
    pids = read_process_ids(folder)
    assert len(pids) == 4
    wait_until(lambda: not any(is_alive(pid) for pid in pids.values()), seconds=seconds)
    return True


def agent_of(folder: Path, name: str) -> psutil.Process:
    """Return the agent on a host: the parent of the parent of its workers."""
    worker = psutil.Process(read_process_ids(folder)["rank0" if name == "a" else "rank2"])
    return worker.parents()[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["a", "b"])
def test_when_an_agent_is_killed_both_hosts_end(name: str, hosts: Hosts, folder: Path):
    words = command("run", "--hosts", listed(hosts), "--no-ssh", "--insecure", "faulty.py", "9", "")
    jobs = {each: hosts.start(each, words, cwd=folder) for each in ("a", "b")}
    wait_until(lambda: len(read_process_ids(folder)) == 4)
    agent_of(folder, name).kill()
    start = time.monotonic()
    assert nobody_is_left(folder, seconds=5)
    other = "b" if name == "a" else "a"
    code, _, err = ended(jobs[other])
    assert time.monotonic() - start < 5
    lost = hosts.addresses[0 if name == "a" else 1]
    assert code == 1, err
    assert f"host 0, {lost}, was lost" in err if name == "a" else f"host {lost} was lost" in err


def test_both_sides_detect_a_host_that_is_cut_off(hosts: Hosts, folder: Path):
    words = command("run", "--hosts", listed(hosts), "--no-ssh", "--insecure", "faulty.py", "9", "")
    jobs = {each: hosts.start(each, words, cwd=folder) for each in ("a", "b")}
    wait_until(lambda: len(read_process_ids(folder)) == 4)
    hosts.link("b", up=False)
    try:
        assert nobody_is_left(folder, seconds=8)
        outcomes = {each: ended(job) for each, job in jobs.items()}
    finally:
        hosts.link("b", up=True)
    assert [code for code, _, _ in outcomes.values()] == [1, 1]
    assert f"host {hosts.addresses[1]} was lost: no heartbeat for" in outcomes["a"][2]
    assert f"host 0, {hosts.addresses[0]}, was lost: no heartbeat for" in outcomes["b"][2]


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("name", ["a", "b"])
def test_ctrl_c_on_one_host_ends_both(name: str, hosts: Hosts, folder: Path):
    words = command("run", "--hosts", listed(hosts), "--no-ssh", "--insecure", "faulty.py", "9", "")
    jobs = {each: hosts.start(each, words, cwd=folder) for each in ("a", "b")}
    wait_until(lambda: len(read_process_ids(folder)) == 4)
    os.kill(agent_of(folder, name).pid, signal.SIGINT)
    outcomes = {each: ended(job) for each, job in jobs.items()}
    assert [code for code, _, _ in outcomes.values()] == [130, 130], outcomes
    assert nobody_is_left(folder)


@pytest.mark.exhaustive
def test_torchs_own_lines_start_on_each_host(hosts: Hosts, folder: Path):
    (folder / "main.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "import argparse; parser = argparse.ArgumentParser(); parser.add_argument('--local_rank', type=int)\n"
        "local_rank = parser.parse_args().local_rank\n"
        "dist.init_process_group()\n"
        "total = torch.ones(1); dist.all_reduce(total)\n"
        "print(os.environ['GROUP_RANK'], dist.get_rank(), local_rank, int(total), flush=True)\n"
    )
    where = ["--master_addr", hosts.addresses[0], "--master_port", "29611", "--insecure"]
    words = ["launch", "--nnodes=2", "--nproc_per_node", "2", *where]
    jobs = [
        hosts.start(name, command(*words, f"--node_rank={place}", "main.py"), cwd=folder)
        for place, name in enumerate(("a", "b"))
    ]
    for place, job in enumerate(jobs):
        code, out, err = ended(job)
        assert code == 0, err
        assert sorted(out.splitlines()) == [f"{place} {2 * place + local} {local} 4" for local in range(2)]


def test_hosts_that_differ_do_not_start(hosts: Hosts, folder: Path):
    words = command("run", "--hosts", listed(hosts), "--no-ssh", "--insecure", "faulty.py", "9")
    other = hosts.start("b", [*words, "other"], cwd=folder)
    code, _, err = ended(hosts.start("a", [*words, "this"], cwd=folder))
    assert code == 2
    assert f"the script's arguments: {hosts.addresses[1]} has 9 other, {hosts.addresses[0]} has 9 this" in err
    code, _, err = ended(other)
    assert code == 2
    assert "the script's arguments" in err
    assert read_process_ids(folder) == {}
    assert not (folder / "log").exists()


def test_a_different_token_is_rejected_and_reported_on_both_sides(hosts: Hosts, folder: Path):
    words = command("run", "--hosts", listed(hosts), "--no-ssh", "--join-timeout", "3", "train.py")
    (folder / "other").write_text("f" * 32)
    other = hosts.start("b", words, cwd=folder, env={"RANKLESS_TOKEN_FILE": str(folder / "other")})
    job = hosts.start("a", words, cwd=folder, env={"RANKLESS_TOKEN_FILE": str(folder / "token")})
    code, _, err = ended(job)
    assert code == 2
    assert f"rejected a client at {hosts.addresses[1]}: a different token" in err
    code, _, err = ended(other)
    assert code == 2
    assert "do both have the same token" in err


@pytest.mark.exhaustive
def test_a_waiting_host_names_the_missing_host_and_its_reachability(hosts: Hosts, folder: Path):
    words = command("run", "--hosts", listed(hosts), "--no-ssh", "--insecure", "--join-timeout", "6.5", "train.py")
    code, _, err = ended(hosts.start("a", words, cwd=folder))
    assert code == 2
    assert f"waiting: 1/2 hosts, missing {hosts.addresses[1]} (it is up" in err
    assert "all 2 hosts within 6.5 s" in err
    code, _, err = ended(hosts.start("b", words, cwd=folder))
    assert code == 2
    assert "no process listens at" in err


def test_a_host_outside_the_list_raises(folder: Path):
    done = subprocess.run(
        command("run", "--hosts", "192.0.2.77,192.0.2.78", "--no-ssh", "--insecure", "train.py"),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "this host among 192.0.2.77, 192.0.2.78" in done.stderr


@pytest.mark.exhaustive
def test_copy_sends_the_script_of_host_0(tmp_path: Path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    (here / "train.py").write_text(TRAIN.replace("SETTINGS", "pass"))
    # What runs on the other host finds another folder there, by a mount that only it sees.
    with two_hosts(tmp_path, before={"b": f"mount --bind {there} {here}"}) as apart:
        words = ["--hosts", ",".join(f"{address}:1" for address in apart.addresses), "train.py"]
        refused = apart.run("a", command("run", *words), cwd=here)
        assert refused.returncode == 2
        assert "no file train.py" in refused.stderr
        done = apart.run("a", command("run", "--send-script", *words), cwd=here)
        assert done.returncode == 0, done.stderr
        assert "train.py is now host 0's" in done.stderr
    assert (there / "train.py").read_text() == (here / "train.py").read_text()
    assert {file.name for file in there.glob("log/*/rank*.log")} == {"rank1.log"}


LENET = """
import runpy, sys
import rankless

if __name__ == "__main__":
    rankless.configure(devices_per_host=2, hosts=[{hosts}], port=9933)
    runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["ssh", "hand", "script"])
def test_lenet_on_two_hosts_trains_alike_however_it_is_started(way: str, hosts: Hosts, folder: Path):
    script = str(Path(__file__).parents[2] / "examples" / "lenet.py")
    name = script
    if way == "script":
        name = "lenet_on_hosts.py"
        listed_in_script = ", ".join(map(repr, hosts.addresses))
        (folder / name).write_text(LENET.format(hosts=listed_in_script, script=script))
    options = {
        "ssh": [],
        "hand": ["--no-ssh", "--insecure"],
        "script": ["--no-ssh", "--token-by-ssh", "--port", "9933"],
    }
    words = ["--hosts", listed(hosts), *options[way], "--join-timeout", "120", name, "--epochs", "1"]
    others = {"hand": command("run", *words), "script": [sys.executable, name, "--epochs", "1"]}
    job = hosts.start("a", command("verify", *words), cwd=folder)
    verdicts = 0
    while job.poll() is None and way != "ssh":
        # verify makes the run on all hosts once, and once more in float64 if rounding asks for it.
        other = hosts.start("b", others[way], cwd=folder)
        while other.poll() is None and job.poll() is None:
            time.sleep(0.05)
        verdicts += other.poll() == 0
    code, out, err = ended(job, seconds=400)
    assert code == 0, out + err
    assert "same training" in out
    assert way == "ssh" or verdicts >= 1
