"""Where a real Horovod is installed its ranks find each other under `rankless horovodrun`.

The real one cannot be built on today's PyTorch. What stands for it asks Horovod's server as its `http_store.cc` and
Gloo do: names of hosts and addresses are put, the others' waited for, all are connected, own ones deleted.
"""

import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hosts import Hosts, two_hosts
from support.jobs import rankless

pytestmark = pytest.mark.slow

REAL = '''
import http.client, os, pickle, socket, time

def told(name):
    return os.environ["HOROVOD_" + name]

class Store:
    """Horovod's HTTPStore: no server named is a process alone; else it waits for what is not there."""

    def __init__(self, scope):
        self.scope = scope

    def ask(self, method, key, value=None):
        asking = http.client.HTTPConnection(
            told("GLOO_RENDEZVOUS_ADDR"), int(told("GLOO_RENDEZVOUS_PORT")), timeout=20
        )
        asking.request(method, f"/{self.scope}/{key}", value)
        answer = asking.getresponse()
        value = answer.read()
        asking.close()
        assert answer.status in (200, 404), answer.status
        return value if answer.status == 200 else None

    def wait(self, key):
        while (value := self.ask("GET", key)) is None:
            time.sleep(0.01)
        return value

def meet(scope, rank, size):
    """The rank of the job that stands behind each rank of the scope."""
    store = Store(scope)
    listening = socket.create_server((os.environ["CARD"], 0))
    store.ask("PUT", f"rank_{rank}", socket.gethostname().encode())
    store.ask("PUT", str(rank), pickle.dumps(listening.getsockname()))
    links = []
    for other in range(rank):
        link = socket.create_connection(pickle.loads(store.wait(str(other))), timeout=20)
        link.sendall(bytes([rank, int(told("RANK"))]))
        links.append(link)
    found = {rank: int(told("RANK"))}
    for _ in range(size - 1 - rank):
        link = listening.accept()[0]
        other, found_rank = link.recv(2)
        found[other] = found_rank
        links.append(link)
    for link in links:  # all are connected before anybody's address is taken away
        link.sendall(b"b")
    for link in links:
        assert link.recv(1) == b"b"
    store.ask("DELETE", str(rank))
    return found

def init():
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" not in os.environ:
        return "alone"
    return [
        sorted(meet("global", int(told("RANK")), int(told("SIZE"))).items()),
        sorted(meet("local_" + told("HOSTNAME"), int(told("LOCAL_RANK")), int(told("LOCAL_SIZE"))).items()),
        sorted(meet("cross_" + told("LOCAL_RANK"), int(told("CROSS_RANK")), int(told("CROSS_SIZE"))).items()),
    ]
'''
TWICE = "import horovod.torch as hvd\nfor _ in range(2):\n    print(hvd.init())\n"
PREFIXED = re.compile(r"^\[(\d+)\]<stdout>:(.*)$", re.M)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> str:
    """PYTHONPATH, as one has it who has installed a Horovod."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "horovod/torch").mkdir(parents=True)
    (folder / "horovod/__init__.py").write_text("")
    (folder / "horovod/torch/__init__.py").write_text(REAL)
    return os.pathsep.join([str(folder), str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])


def by_rank(done: subprocess.CompletedProcess[str]) -> dict[int, list[str]]:
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[int, list[str]] = {}
    for rank, line in PREFIXED.findall(done.stdout):
        found.setdefault(int(rank), []).append(line)
    return found


def horovodrun(*words: str, folder: Path, **environment: str) -> dict[int, list[str]]:
    return by_rank(rankless("horovodrun", *words, folder=folder, CARD="127.0.0.1", **environment))


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_ours", [True, False], ids=["script", "another Python"])
def test_its_ranks_find_each_other_as_often_as_they_init(is_ours: bool, site: str, tmp_path: Path):
    """Another Python is one that has nothing of what Rankless needs."""
    if not is_ours:
        venv.create(tmp_path / "other", with_pip=False)
    python = "python" if is_ours else str(tmp_path / "other/bin/python")
    (tmp_path / "train.py").write_text(TWICE)
    words = ("-np", "3", "-H", "localhost:2,127.0.0.1:1", python, "train.py")
    found = horovodrun(*words, folder=tmp_path, PYTHONPATH=site)
    # Each knows by number those that have come to it, and itself: all ranks, those of its host, those of its number.
    assert found == {
        0: ["[[(0, 0), (1, 1), (2, 2)], [(0, 0), (1, 1)], [(0, 0), (1, 2)]]"] * 2,
        1: ["[[(1, 1), (2, 2)], [(1, 1)], [(0, 1)]]"] * 2,
        2: ["[[(2, 2)], [(0, 2)], [(1, 2)]]"] * 2,
    }


@pytest.mark.exhaustive
def test_jobs_without_an_installed_horovod_get_no_server(site: str, tmp_path: Path):
    code = "import os; print([name for name in os.environ if 'RENDEZVOUS' in name])"
    outer = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "1"}
    words = ("-np", "1", "python", "-c", code)
    assert horovodrun(*words, folder=tmp_path, **outer) == {0: ["[]"]}
    assert horovodrun(*words, folder=tmp_path, PYTHONPATH=site, RANKLESS_HOROVOD="1") == {0: ["[]"]}


@pytest.mark.exhaustive
def test_another_python_or_the_users_choice_starts_the_server(tmp_path: Path):
    code = "import os; print('HOROVOD_GLOO_RENDEZVOUS_PORT' in os.environ)"
    other = tmp_path / "python3.99"
    other.symlink_to(sys.executable)
    assert horovodrun("-np", "1", str(other), "-c", code, folder=tmp_path) == {0: ["True"]}
    assert horovodrun("-np", "1", "python", "-c", code, folder=tmp_path, RANKLESS_HOROVOD="0") == {0: ["True"]}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("hosts")) as found:
        yield found


SHARED = """
import os, socket, sys
os.environ["CARD"] = {"a": "10.77.0.1", "b": "10.77.0.2"}[socket.gethostname()]
import horovod.torch as real
print(real.init()[0])
assert "RANKLESS_WORKER_PLAN" not in os.environ
for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    del os.environ[name]
import torch, rankless.extensions.horovod.torch as hvd
hvd.init()
print(hvd.rank(), hvd.size(), hvd.cross_rank(), hvd.allreduce(torch.ones(1 << 18), op=hvd.Sum)[0].item())
print(os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], file=sys.stderr)
"""


@pytest.mark.exhaustive
def test_on_two_hosts_an_installed_horovod_and_ours_use_the_same_server(hosts: Hosts, site: str, tmp_path: Path):
    """A command's Python is no worker of ours: it knows what Horovod's variables say, as one of horovodrun's does."""
    (tmp_path / "train.py").write_text(SHARED)
    words = (sys.executable, "-m", "rankless", "horovodrun", "-np", "2", "-H", "a:1,b:1")
    done = hosts.run("a", (*words, "env", sys.executable, "train.py"), cwd=tmp_path, env={"PYTHONPATH": site})
    assert by_rank(done) == {
        0: ["[(0, 0), (1, 1)]", "0 2 0 2.0"],
        1: ["[(1, 1)]", "1 2 1 2.0"],
    }
    assert len(re.findall(r"^\[\d\]<stderr>:10\.77\.0\.1$", done.stderr, re.M)) == 2


def test_an_elastic_job_warns_that_the_installed_one_cannot_take_part(site: str, tmp_path: Path):
    words = ("horovodrun", "-np", "1", "--min-np", "1", "python", "-c", "print('well')")
    done = rankless(*words, folder=tmp_path, PYTHONPATH=site)
    assert done.returncode == 0, done.stderr
    assert "the installed one finds no elastic job here" in done.stderr
