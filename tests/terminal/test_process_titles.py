"""The titles of a job's processes, as `ps` and `top` read them from the kernel."""

import json
import os
import sys
from pathlib import Path

import pytest
from support.jobs import run_script

import rankless
from rankless.config.run_config import Program
from rankless.terminal import process_title

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(process_title.setproctitle is None, reason="setproctitle is not installed"),
    pytest.mark.skipif(sys.platform != "linux", reason="titles need Linux"),
]

SCRIPT = """
import json, os, sys
from pathlib import Path

def title(process_id):
    folder = Path(f"/proc/{process_id}")
    return (folder / "cmdline").read_text().partition("\\0")[0], (folder / "comm").read_text()

def parent(process_id):
    return int(Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[1])

readable, written = os.pipe()
if os.fork() == 0:
    os.write(written, json.dumps(title(os.getpid())).encode())
    os._exit(0)
os.wait()
chain = [os.getpid(), parent(os.getpid()), parent(parent(os.getpid()))]
print(json.dumps({
    "titles": [title(each) for each in chain], "child": json.loads(os.read(readable, 1000)),
    "argv": sys.argv, "flag": "SPT_NOENV" in os.environ,
    "seen": Path("/proc/self/environ").read_text().count("RANKLESS_MARK"),
}))
"""


def run_and_report(folder: Path, *options: str, **environment: str) -> list[dict]:
    """Return what each rank of two reads about its titles."""
    done = run_script(SCRIPT, "-n", "2", "--show", "all", *options, folder=folder, **environment)
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("["))
    return [json.loads(line.partition(" ")[2]) for line in lines]


@pytest.mark.parametrize("options", [(), pytest.param(("--no-warm",), marks=pytest.mark.exhaustive)])
def test_every_process_of_a_job_has_a_title_with_the_job_and_its_rank(options: tuple[str, ...], tmp_path: Path):
    reports = run_and_report(tmp_path, *options, RANKLESS_MARK="1")
    for rank, report in enumerate(reports):
        worker, fork_server, agent = report["titles"]
        assert worker == [f"rankless: script.py rank {rank} of 2", f"rank{rank}-script.py"[:15] + "\n"]
        assert report["child"] == [f"rankless: script.py rank {rank} of 2, child process", worker[1]]
        assert fork_server == ["rankless: script.py fork server", "fork-server\n"]
        assert agent[1] == "agent-script.py\n"
        # Slurm takes the words of a short title for the fields of /proc/PID/stat that follow it.
        assert not any(" " in short for _, short in (*report["titles"], report["child"]))
        # The agent's command line is only as long as the user typed it.
        assert agent[0].startswith("rankless: script.py agent of 2 ranks"[:30])
        assert (report["argv"], report["flag"], report["seen"]) == (["script.py"], False, 1)


def test_a_job_without_setproctitle_runs_and_keeps_its_command_lines(tmp_path: Path):
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "setproctitle.py").write_text("raise ImportError('not installed')")
    reports = run_and_report(tmp_path, PYTHONPATH=str(tmp_path / "hidden"))
    assert [report["argv"] for report in reports] == [["script.py"]] * 2
    assert not any("rankless: " in title for report in reports for title, _ in report["titles"])


def read_own_title(_rank: int) -> str:
    return Path("/proc/self/cmdline").read_text().partition("\0")[0].partition("rankless: ")[2]


@pytest.mark.exhaustive
def test_spawned_processes_are_titled_with_the_function():
    script = os.path.basename(sys.argv[0])
    assert rankless.spawn(read_own_title, nprocs=2) == [
        f"{script} read_own_title() rank {rank} of 2" for rank in (0, 1)
    ]


@pytest.mark.parametrize(
    ("kind", "target", "name"),
    [
        ("script", "/a/b/train.py", "train.py"),
        ("script", "folder/", "folder"),
        ("script", "new\nline\x1b[31m.py", "new?line?[31m.py"),
        ("script", "tr\udcffain.py", "tr?ain.py"),
        ("script", "übung.py", "übung.py"),
        ("module", "package.train", "package.train"),
        ("code", "print('secret')", "-c"),
        ("command", "/usr/bin/env", "env"),
    ],
)
def test_a_program_is_named_in_one_printable_line(kind, target: str, name: str):
    assert process_title.name_program(Program(kind=kind, target=target)) == name
