"""The output, logs and environment of `rankless run`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.jobs import DEADLINE_SECONDS, RANKLESS, kill_job, run_script, start_script, wait_until
from support.warm_runs import rankless
from support.warm_runs import run_script as run_script_here

pytestmark = pytest.mark.slow


def test_the_start_prints_a_table_of_ranks_process_ids_devices_and_log_files(tmp_path: Path) -> None:
    script = "import os\nprint(os.getpid())"
    job = run_script_here(script, "-n", "2", "--devices", "cpu", "--seed", "5", folder=tmp_path)
    lines = job.stderr.splitlines()
    assert re.fullmatch(r"rankless: 2 workers, \d+ threads? each, seed 5, logs in log/\S+", lines[0])
    assert lines[1].split() == ["rank", "pid", "device", "log", "file"]
    assert [line.split()[::2] for line in lines[2:4]] == [["0", "cpu"], ["1", "cpu"]]
    assert len(lines) == 5
    for line in lines[2:4]:
        _, process_id, _, log_file = line.split()
        assert (tmp_path / log_file).read_text() == f"{process_id}\n"
    assert job.stdout == f"{lines[2].split()[1]}\n"


@pytest.mark.exhaustive
def test_the_table_comes_before_the_output_of_the_workers(tmp_path: Path) -> None:
    job = subprocess.run(
        [*RANKLESS, "run", "-n", "2", "-c", "print('hello', flush=True)"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    assert [line.split()[0] for line in job.stdout.splitlines()] == [
        *("rankless:", "rank", "0", "1", "hello", "rankless:"),
    ]


@pytest.mark.exhaustive
def test_workers_share_the_cores_as_threads(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    script = "import os, torch\nprint(torch.get_num_threads(), os.environ['OMP_NUM_THREADS'])"
    one = run_script_here(script, "-n", "1", folder=tmp_path)
    assert one.stdout == f"{cores} {cores}\n"
    for warm in ((), ("--no-warm",)):
        three = run_script_here(script, "-n", "2", "--threads", "3", *warm, folder=tmp_path)
        assert three.stdout == "3 3\n"


def test_every_rank_has_a_file_and_latest_points_to_the_newest_run(tmp_path: Path) -> None:
    script = "import os, sys\nprint('out of', os.environ['RANK'])\nprint('err of', os.environ['RANK'], file=sys.stderr)"
    for _ in range(2):
        job = run_script_here(script, "-n", "2", folder=tmp_path)
    runs = sorted(path.name for path in (tmp_path / "log").iterdir() if not path.is_symlink())
    assert len(runs) == 2
    latest = tmp_path / "log" / "latest"
    assert f"logs in log/{os.readlink(latest)}" in job.stderr
    assert sorted(path.name for path in latest.iterdir()) == ["rank0.log", "rank1.log", "run.json"]
    assert (latest / "rank1.log").read_text() == "out of 1\nerr of 1\n"
    assert job.stdout == "out of 0\nerr of 0\n"


@pytest.mark.exhaustive
def test_concurrent_runs_do_not_interfere(tmp_path: Path) -> None:
    script = "import os, sys, time\nprint(os.environ['TORCHELASTIC_RUN_ID'], os.environ['MASTER_PORT'])"
    jobs = [start_script(script, "-n", "2", folder=tmp_path) for _ in range(3)]
    outputs = [job.communicate(timeout=60)[0] for job in jobs]
    assert len(set(outputs)) == 3
    runs = [path for path in (tmp_path / "log").iterdir() if not path.is_symlink()]
    assert sorted((run / "rank1.log").read_text() for run in runs) == sorted(outputs)
    assert (tmp_path / "log" / "latest").is_symlink()


def test_show_all_prefixes_every_rank_and_keeps_lines_whole(tmp_path: Path) -> None:
    script = "import os\nfor i in range(200):\n    print('line', i, 'of', os.environ['RANK'])\nprint('end', end='')"
    job = run_script_here(script, "-n", "3", "--show", "all", folder=tmp_path)
    for rank in range(3):
        lines = [line for line in job.stdout.splitlines() if line.startswith(f"[{rank}] ")]
        assert lines == [f"[{rank}] line {i} of {rank}" for i in range(200)] + [f"[{rank}] end"]


def test_output_is_shown_while_the_job_runs(tmp_path: Path) -> None:
    script = "import time\nprint('now')\ntime.sleep(600)"
    job = start_script(script, "-n", "1", folder=tmp_path)
    try:
        assert job.stdout is not None
        assert job.stdout.readline() == "now\n"
        assert job.poll() is None
    finally:
        kill_job(job)


def test_long_output_is_complete_before_the_agent_ends(tmp_path: Path) -> None:
    # Only rank 0 fails: on a busy machine the failure of rank 1 would end rank 0 before it has printed everything.
    loop = "for i in range(20000):\n    print(i, 'x' * 100)\nprint('last', end='')\n"
    script = f"import os\n{loop}raise SystemExit(3 if os.environ['RANK'] == '0' else 0)"
    job = run_script_here(script, "-n", "2", folder=tmp_path)
    assert len(job.stdout.splitlines()) == 20001
    assert job.stdout.endswith("\nlast")
    assert job.returncode == 3


@pytest.mark.exhaustive
def test_a_reader_that_closes_its_pipe_does_not_stop_the_job(tmp_path: Path) -> None:
    script = "import os\nfor i in range(20000):\n    print(i)\nopen('done', 'w').close()\n"
    job = start_script(script, "-n", "1", folder=tmp_path)
    try:
        assert job.stdout is not None
        job.stdout.readline()
        job.stdout.close()
        wait_until(lambda: (tmp_path / "done").exists())
        assert job.wait(timeout=20) == 0
    finally:
        if job.poll() is None:
            job.kill()


def test_workers_have_torchruns_environment_and_no_log_prints_it(tmp_path: Path) -> None:
    script = """
import os
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_NAME ROLE_WORLD_SIZE"
names += " MASTER_ADDR TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS"
print(*[os.environ[name] for name in names.split()])
assert int(os.environ["MASTER_PORT"]) and os.environ["TORCHELASTIC_RUN_ID"]
"""
    job = run_script(script, "-n", "2", "--show", "all", folder=tmp_path, MY_SECRET="do not tell")
    assert sorted(job.stdout.splitlines()) == [
        "[0] 0 0 2 2 0 1 0 default 2 127.0.0.1 0 0",
        "[1] 1 1 2 2 0 1 1 default 2 127.0.0.1 0 0",
    ]
    kept = job.stderr + "".join(path.read_text() for path in (tmp_path / "log").rglob("*.log"))
    assert "do not tell" not in kept


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "warm", [pytest.param(True, id="warm"), pytest.param(False, id="plain", marks=pytest.mark.exhaustive)]
)
def test_all_ranks_share_a_seed_and_runs_have_different_seeds(warm: bool, tmp_path: Path) -> None:
    drawing = "print(random.random(), hash('a'), numpy.random.rand(), torch.rand(1).item())"
    script = f"import random, numpy, torch, rankless\n{drawing}"
    options = ["-n", "2", "--show", "all", *([] if warm else ["--no-warm"])]
    drawn = []
    for seed in ((), (), ("--seed", "7"), ("--seed", "7")):
        job = run_script(script, *options, *seed, folder=tmp_path)
        first, second = sorted(job.stdout.splitlines())
        assert first.removeprefix("[0] ") == second.removeprefix("[1] ")
        drawn.append(first)
    assert drawn[2] == drawn[3]
    assert len({number for line in drawn[:3] for number in line.split()[1:]}) == 12


@pytest.mark.exhaustive
def test_ranks_of_a_plain_script_draw_different_random_numbers(tmp_path: Path) -> None:
    script = "import random, numpy, torch\nprint(random.random(), numpy.random.rand(), torch.rand(1).item())"
    drawn = run_script_here(script, "-n", "2", "--separate", "--show", "all", folder=tmp_path).stdout.split()
    assert len(set(drawn)) == 2 * (1 + 3)
    (tmp_path / "beside.py").write_text("import rankless\n")
    first, second = run_script_here(
        f"import beside\n{script}", "-n", "2", "--show", "all", folder=tmp_path
    ).stdout.splitlines()
    assert first.split()[1:] == second.split()[1:]


@pytest.mark.exhaustive
def test_variables_set_before_the_import_of_torch_work_or_give_a_warning(tmp_path: Path) -> None:
    script = """
import os
os.environ["OMP_NUM_THREADS"] = "5"
os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
os.environ["TORCH_LOGS"] = "+dynamo"
os.environ["GOMP_SPINCOUNT"] = "7"
import torch, torch.distributed as dist
print(torch.get_num_threads(), dist.get_debug_level())
"""
    warm = run_script(script, "-n", "2", folder=tmp_path)
    assert warm.stdout == "5 DebugLevel.DETAIL\n"
    assert warm.stderr.count("GOMP_SPINCOUNT, TORCH_LOGS set too late") == 1
    assert "--no-warm" in warm.stderr
    plain = run_script(script, "-n", "2", "--no-warm", folder=tmp_path)
    assert plain.stdout.endswith("5 DebugLevel.DETAIL\n")
    assert "too late" not in plain.stderr


def test_the_fork_server_imports_torch_once_and_has_one_thread(tmp_path: Path) -> None:
    script = "import rankless, os, time\nprint(os.getppid())\ntime.sleep(600)"
    job = start_script(script, "-n", "2", folder=tmp_path)
    try:
        assert job.stdout is not None
        parent = psutil.Process(int(job.stdout.readline()))
        assert parent.ppid() == job.pid
        assert parent.num_threads() == 1
        assert any("libtorch" in entry.path for entry in parent.memory_maps())
        assert not any("libtorch" in entry.path for entry in psutil.Process(job.pid).memory_maps())
    finally:
        kill_job(job)


def test_workers_compute_in_parallel_after_the_fork(tmp_path: Path) -> None:
    script = """
import torch
x = torch.rand(400, 400, requires_grad=True)
(x @ x).sum().backward()
print(torch.get_num_threads(), tuple(x.grad.shape), torch.compile(lambda a: a + 1, backend="eager")(x).shape[0])
"""
    job = run_script_here(script, "-n", "2", "--threads", "2", folder=tmp_path)
    assert job.stdout == "2 (400, 400) 400\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "0", "script.py"], "at least 1 worker"),
        (["-n", "2", "scirpt.py"], "no file scirpt.py"),
        (["-n", "2", "python3", "script.py"], "leave out 'python3'"),
        (["-n", "2", "."], "a folder"),
        (["-n", "2", "-m", "no_such_module_at_all"], "no such module"),
        (["-n", "2", "--devices", "97", "script.py"], "GPU 97 on this host"),
        (["-n", "2", "--devices", "gpu", "script.py"], "--devices cpu, or GPU numbers"),
        (["-n", "2", "--threads", "0", "script.py"], "at least 1 thread"),
        (["-n", "2"], "a script to run"),
    ],
)
def test_an_invalid_program_is_rejected_before_any_process_starts(
    arguments: list[str], words: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text("print('ran')")
    job = rankless("run", *arguments, folder=tmp_path)
    assert job.returncode == 2
    assert job.stdout == ""
    assert all(part in job.stderr for part in ("expected:", "found:", "fix:", words))
    assert not (tmp_path / "log").exists()


def test_a_log_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("")
    job = run_script_here("print('ran')", folder=tmp_path)
    assert job.returncode == 2
    assert "--log-dir" in job.stderr


@pytest.mark.exhaustive
def test_concurrent_scripts_make_their_own_process_groups(tmp_path: Path) -> None:
    script = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(x)
print(x.item())
dist.destroy_process_group()
"""
    jobs = [start_script(script, "-n", "2", folder=tmp_path) for _ in range(3)]
    assert [job.communicate(timeout=60)[0] for job in jobs] == ["3.0\n"] * 3


def test_the_installed_command_works_like_python_m_rankless(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).parent / "rankless"), "run", "-c", "print('ran')"]
    if not os.path.exists(command[0]):
        pytest.skip("the command is not installed beside this interpreter")
    job = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (job.stdout, job.returncode) == ("ran\n", 0)


@pytest.mark.parametrize(
    ("options", "found", "fix"),
    [
        (["--env", "A=1"], "--env A=1 on this host only", "set it in the shell in which you run the command"),
        (["--hosts", "h1,h2", "--no-ssh", "--env", "A"], "although you start each host yourself", "on each host"),
        (["--hosts", "127.0.0.1,h2", "--env", "NOT_SET_9"], "no such variable", "write --env NOT_SET_9=VALUE"),
        (["--hosts", "127.0.0.1,h2", "--env", "A B=1"], "--env A B=1", "WANDB_MODE=offline"),
        (["--hosts", "127.0.0.1,h2", "--env", "RANK=3"], "each worker or host gets for itself", "omit it"),
    ],
)
def test_a_variable_that_cannot_be_forwarded_is_rejected_with_a_fix(options, found, fix, tmp_path):
    (tmp_path / "script.py").write_text("")
    done = rankless("run", *options, "script.py", folder=tmp_path)
    assert done.returncode == 2
    assert found in done.stderr
    assert fix in done.stderr


def test_an_argument_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "script.py").write_text("raise SystemExit('it runs')")
    command = [sys.executable, "-m", "rankless", "run", "script.py", b"\xff"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "expected: a program and arguments that are text in UTF-8" in done.stderr
    assert r"found:    '\udcff'" in done.stderr
