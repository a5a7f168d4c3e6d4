"""What a run listens on, and the files that it makes, are those of the page on security, for each kind of run."""

import contextlib
import fnmatch
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from support.jobs import job_environment

from docs.extensions.access_inventory import FILES, SOCKETS, format_files, format_sockets

PAGE = Path(__file__).parents[2] / "docs/guides/security.md"
JOB = """
import os, time, torch, rankless
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
@rankless.job(model=model, optimizer=optimizer)
def train(x):
    return model(x).square().mean()
print(train(torch.ones(8, 4)).item())
open(f"ready.{rankless.rank()}", "w").close()
while not rankless.once(lambda: os.path.exists("go")):
    train(torch.ones(8, 4))
print("right", train(torch.ones(8, 4)).item() < 1)
"""
PLAIN = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
open(f"ready.{dist.get_rank()}", "w").close()
while not os.path.exists("go"):
    time.sleep(0.05)
total = torch.ones(4)
dist.all_reduce(total)
print("right", total[0].item() == 2)
"""
HOROVOD = """
import os, time, torch, horovod.torch as hvd
hvd.init()
open(f"ready.{hvd.rank()}", "w").close()
while not os.path.exists("go"):
    time.sleep(0.05)
print("right", hvd.allreduce(torch.ones(4), op=hvd.Sum)[0].item() == 2)
"""
TABLE = """
import os, torch, rankless
table = rankless.parameter_server.Embedding(4)
linear = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adagrad([*table.parameters(), *linear.parameters()], lr=0.1)
@rankless.job(model=torch.nn.ModuleList([table, linear]), optimizer=optimizer)
def train(ids):
    return linear(table(ids)).square().mean()
train(torch.arange(8))
open(f"ready.{rankless.rank()}", "w").close()
while not rankless.once(lambda: os.path.exists("go")):
    train(torch.arange(8))
print("right", train(torch.arange(8)).item() < 10)
"""
COMMANDS: dict[str, tuple[str, str, list[str]]] = {
    "one host": ("one host", JOB, ["run", "-n", "2"]),
    "gloo": ("one host", PLAIN, ["run", "-n", "2", "--backend", "gloo"]),
    "plain": ("one host", PLAIN, ["run", "-n", "2"]),
    "horovodrun": ("horovodrun", HOROVOD, ["horovodrun", "-np", "2"]),
    "elastic": ("elastic", HOROVOD, ["horovodrun", "-np", "2", "--min-np", "2"]),
    "torchrun": ("torchrun", PLAIN, ["torchrun", "--nproc-per-node", "2"]),
    "fleetrun": ("fleetrun", PLAIN, ["fleetrun", "--nproc_per_node", "2"]),
    "servers": ("parameter servers", TABLE, ["run", "-n", "2", "--servers", "1"]),
}
QUICK = pytest.param("one host")
SLOW = [pytest.param(each, marks=pytest.mark.exhaustive) for each in COMMANDS if each != "one host"]


@contextlib.contextmanager
def started(name: str, folder: Path) -> Iterator[psutil.Process]:
    """Start a run, and yield its agent while two ranks wait for the file `go`, then let it end."""
    _, script, command = COMMANDS[name]
    (folder / "train.py").write_text(script)
    with subprocess.Popen(
        [sys.executable, "-m", "rankless", *command, "train.py"],
        cwd=folder,
        env=job_environment({}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            while not all((folder / f"ready.{rank}").exists() for rank in range(2)):
                assert process.poll() is None, process.stdout and process.stdout.read()
                time.sleep(0.05)
            yield psutil.Process(process.pid)
            (folder / "go").touch()
            output = process.communicate()[0]
        finally:
            process.kill()
    assert process.returncode == 0, output
    assert "right True" in output, output


def listening(agent: psutil.Process) -> set[tuple[str, str]]:
    """Return who listens where: the holder, and the address or the name of a Unix socket."""
    found = set()
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    names = {line[6]: line[7] for line in lines if line[3] == "00010000" and len(line) > 7}
    for process in [agent, *agent.children(recursive=True)]:
        is_server = "parameter server" in process.cmdline()[0] or "extensions.servers.service" in str(process.cmdline())
        holder = "agent" if process.pid == agent.pid else "server" if is_server else "worker"
        for each in process.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN:
                found.add((holder, each.laddr.ip))
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"/proc/{process.pid}/fd"):
                with contextlib.suppress(OSError):
                    inode = os.readlink(f"/proc/{process.pid}/fd/{descriptor}")
                    if inode.startswith("socket:[") and inode[8:-1] in names:
                        found.add((holder, names[inode[8:-1]]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", [QUICK, *SLOW])
def test_a_run_listens_where_the_page_says_and_its_files_have_the_modes_of_the_page(name: str, tmp_path: Path):
    kind = COMMANDS[name][0]
    with started(name, tmp_path) as agent:
        found = listening(agent)
        for holder, address in found:
            known = [
                each
                for each in SOCKETS
                if each.holder == holder and (not each.kinds or kind in each.kinds) and each.address
            ]
            assert any(address.startswith(each.address) for each in known), (holder, address)
        assert ("agent", "127.0.0.1") in found
        if name in ("one host", "plain"):
            assert not [each for each in found if each[0] == "worker"]
        check_files(kind, tmp_path / "log")


def check_files(kind: str, logs: Path) -> None:
    private = [
        each for each in FILES if (not each.kinds or kind in each.kinds) and not each.pattern.startswith(("/", "~"))
    ]
    for folder in {path.parent for path in logs.rglob("*.log") if not path.is_symlink()} - {logs}:
        modes = {".": folder, **{path.name: path for path in folder.iterdir() if not path.is_symlink()}}
        for name, path in modes.items():
            for each in private:
                if fnmatch.fnmatch(name, each.pattern):
                    assert path.stat().st_mode & 0o777 == each.mode, (path, each)
            if kind == "one host":
                assert any(fnmatch.fnmatch(name, each.pattern) for each in private), path


def test_the_page_shows_the_tables():
    text = PAGE.read_text()
    assert f"<!-- sockets -->\n{format_sockets()}\n<!-- end -->" in text
    assert f"<!-- files -->\n{format_files()}\n<!-- end -->" in text


ATTACK = """
import os, sys, random, socket, struct
"name".encode("idna")  # nobody may not read the files of Python
if os.getuid() == 0:
    os.setgid(65534); os.setuid(65534)
port, count, draws = int(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
MAGIC = struct.pack("=BI", 0, 0x3C85F7CE)
def text(data): return struct.pack("=Q", len(data)) + data
def query(kind, *parts): return bytes([kind]) + b"".join(map(text, parts))
def message():
    kind = draws.randrange(9)
    if kind == 0: return draws.randbytes(draws.randrange(1, 400))
    if kind == 1: return MAGIC[: draws.randrange(1, 5)]
    if kind == 2: return MAGIC + query(1, b"/key", b"value")
    if kind == 3: return MAGIC + bytes([draws.randrange(20)]) + struct.pack("=Q", draws.getrandbits(64))
    if kind == 4:
        code = draws.randbytes(16).hex().encode()
        return MAGIC + query(2, b"/rankless/proof", b"", b'{"nonce":"a","code":"' + code + b'"}')
    if kind == 5: return MAGIC + bytes([17, 7]) + query(8, b"/key") * 5
    if kind == 6: return draws.randbytes(draws.choice([1000, 5000, 70_000]))
    if kind == 7: return struct.pack(">I", draws.randrange(300)) + draws.randbytes(200)
    return b""
idle, done, refused = [], 0, 0
while done < count:
    try:
        connection = socket.create_connection(("127.0.0.1", port), timeout=5)
    except OSError:
        refused += 1
        done += 1
        continue
    try:
        for _ in range(draws.randrange(1, 100)):
            done += 1
            connection.sendall(message())
        if draws.random() < 0.2:
            connection.settimeout(0.01)
            answer = connection.recv(65536)
            assert b"value" not in answer
    except OSError:
        pass
    if draws.random() < 0.3:
        idle.append(connection)
        if len(idle) > 300: idle.pop(draws.randrange(len(idle))).close()
    else:
        connection.close()
print(done, refused, flush=True)
"""


def ports_of(agent: psutil.Process) -> set[int]:
    processes = [agent, *agent.children(recursive=True)]
    return {
        each.laddr.port for one in processes for each in one.net_connections("tcp") if each.status == psutil.CONN_LISTEN
    }


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("one host", 500),
        *(
            pytest.param(name, 100_000, marks=pytest.mark.exhaustive)
            for name in ("one host", "plain", "horovodrun", "elastic", "torchrun", "fleetrun", "servers")
        ),
    ],
)
def test_another_user_who_attacks_all_ports_of_a_run_changes_nothing(name: str, count: int, tmp_path: Path):
    tmp_path.chmod(0o755)
    with started(name, tmp_path) as agent:
        before = agent.memory_info().rss
        ports = ports_of(agent)
        assert ports
        for port in ports:
            with pytest.raises(dist.DistError):
                steal(port)
        attackers = [
            subprocess.Popen([sys.executable, "-c", ATTACK, str(port), str(count), "0"], stdout=subprocess.PIPE)
            for port in ports
        ]
        for attacker in attackers:
            output = attacker.communicate()[0].decode()
            print(f"{name}: messages and refused connections {output.strip()}")
            assert attacker.returncode == 0
            assert int(output.split()[0]) >= count
        grown = agent.memory_info().rss - before
        print(f"{name}: the agent's memory grew by {grown >> 10} KiB")
        assert grown < 64 << 20


def steal(port: int) -> None:
    """Do what any client of PyTorch's store can do without a token."""
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    for key in store.list_keys() if hasattr(store, "list_keys") else ["key"]:
        store.delete_key(key)
