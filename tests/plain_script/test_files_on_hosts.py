"""Hosts that share no folder: what rank 0 writes is what every rank reads, and the other host gets no file."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch.test_hosts import command, ended, listed
from plain_script.test_file_effects import SCRIPT, run_plain
from support.hosts import Hosts, two_hosts

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]
OF_CPP = ("torch_files",)
"""These cases read a file in C++ from its path, as another host cannot."""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("two"), sshd=()) as found:
        yield found


def test_a_script_that_writes_and_reads_files_runs_on_hosts_without_a_shared_folder(hosts: Hosts, tmp_path: Path):
    plain, here, there = (tmp_path / name for name in ("plain", "here", "there"))
    for folder in (plain, here, there):
        folder.mkdir()
        shutil.copy(SCRIPT, folder / "cases.py")
    files, lines = run_plain(plain, plain / "cases.py")
    listing = [name for name in files if "/" not in name and name not in ("cases.py", "early.txt")]
    names = [name for name in listing if name not in OF_CPP]
    words = [
        *("--logical", "--seed", "1", "--hosts", listed(hosts, 1), "--no-ssh", "--insecure"),
        *("--log-dir", str(tmp_path / "log"), "cases.py", *names),
    ]
    other = hosts.start("b", command("run", *words), cwd=there)
    done = hosts.run("a", command("run", *words), cwd=here, seconds=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ended(other)[0] == 0
    wanted = [line for line in lines if line.partition(" ")[0] in names]
    assert [line for line in done.stdout.splitlines() if line.partition(" ")[0] in names] == wanted
    assert [path.name for path in there.rglob("*") if not path.is_dir()] == ["cases.py"]
