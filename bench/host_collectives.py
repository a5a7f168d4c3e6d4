"""all_reduce on two hosts (network namespaces) of two workers each: hierarchical against Gloo.

The network between the hosts first has the speed of this machine, and then 200 Mbit/s.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from support.hosts import NAMES, Hosts, two_hosts

from bench.commands import BIN, LIMIT_SECONDS, SCRIPTS
from bench.pairs import Row, make_row

RATE = "200mbit"
KIB, MIB = 1 << 10, 1 << 20
CALLS = {"4_kib": (4 * KIB, "20"), "4_mib": (4 * MIB, "3")}


def rows() -> Iterator[Row]:
    """Yield one row per network and size."""
    with tempfile.TemporaryDirectory() as folder, two_hosts(Path(folder) / "net") as hosts:
        for network in ("unlimited", RATE):
            if network == RATE:
                _limit_network(hosts)
            for name, (byte_count, calls) in CALLS.items():
                times = _measure_times(hosts, Path(folder), byte_count, calls)
                yield make_row(f"all_reduce_2_hosts_{network}_{name}", peer="gloo", times=times)


def _limit_network(hosts: Hosts) -> None:
    for name in NAMES:
        limit = f"tc qdisc add dev eth0 root tbf rate {RATE} burst 256kb latency 50ms"
        if (limited := hosts.run(name, limit.split())).returncode:
            raise RuntimeError(limited.stderr)


def _measure_times(hosts: Hosts, folder: Path, byte_count: int, calls: str) -> list[tuple[float, float]]:
    listed = ",".join(f"{address}:2" for address in hosts.addresses)
    job = [str(BIN / "rankless"), "run", "--hosts", listed, "--no-progress", "--devices", "cpu"]
    command = [*job, str(SCRIPTS / "host_collectives.py"), str(byte_count), "--calls", calls]
    done = hosts.run("a", command, cwd=folder, env={"OMP_NUM_THREADS": "1"}, seconds=LIMIT_SECONDS)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    times: list[tuple[float, float]] = json.loads((folder / "times.json").read_text())
    return times
