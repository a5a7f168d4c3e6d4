"""all_reduce on two hosts (network namespaces) of two workers each, over a slow network: hierarchical against Gloo."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from support.hosts import NAMES, two_hosts

from bench.commands import BIN, LIMIT_SECONDS, SCRIPTS
from bench.pairs import Row, make_row

RATE = "200mbit"
CALLS = {"4_kib": (4 << 10, "20"), "4_mib": (4 << 20, "1")}


def rows() -> Iterator[Row]:
    """Yield one row per size."""
    with tempfile.TemporaryDirectory() as folder, two_hosts(Path(folder) / "net") as hosts:
        for name in NAMES:
            limit = f"tc qdisc add dev eth0 root tbf rate {RATE} burst 256kb latency 50ms"
            if (limited := hosts.run(name, limit.split())).returncode:
                raise RuntimeError(limited.stderr)
        listed = ",".join(f"{address}:2" for address in hosts.addresses)
        for name, (byte_count, calls) in CALLS.items():
            job = [str(BIN / "rankless"), "run", "--hosts", listed, "--no-progress", "--devices", "cpu"]
            command = [*job, str(SCRIPTS / "host_collectives.py"), str(byte_count), "--calls", calls]
            environment = {"OMP_NUM_THREADS": "1"}
            done = hosts.run("a", command, cwd=Path(folder), env=environment, seconds=LIMIT_SECONDS)
            if done.returncode:
                raise RuntimeError(done.stdout + done.stderr)
            times: list[tuple[float, float]] = json.loads((Path(folder) / "times.json").read_text())
            yield make_row(f"all_reduce_2_hosts_{name}", peer="gloo", times=times)
