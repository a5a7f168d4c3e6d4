"""Horovod's allreduce on two hosts (network namespaces) of two workers each, over a slow network, against Gloo."""

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from support.hosts import NAMES, two_hosts

from bench.commands import LIMIT_SECONDS, SCRIPTS
from bench.pairs import Row, make_row

RATE = "1gbit"
CALLS = {"256_kib": (str(256 << 10), "--calls", "10"), "16_mib": (str(16 << 20), "--calls", "1")}


def rows() -> Iterator[Row]:
    """Yield one row per size."""
    own_memory = dict.fromkeys(NAMES, "mount -t tmpfs none /dev/shm")
    with tempfile.TemporaryDirectory() as folder, two_hosts(Path(folder) / "net", before=own_memory) as hosts:
        for name in NAMES:
            limit = (
                "tc",
                "qdisc",
                "add",
                "dev",
                "eth0",
                "root",
                "tbf",
                "rate",
                RATE,
                "burst",
                "1mb",
                "latency",
                "50ms",
            )
            if (limited := hosts.run(name, limit)).returncode:
                raise RuntimeError(limited.stderr)
        for name, arguments in CALLS.items():
            job = ("horovodrun", "-np", "4", "-H", "a:2,b:2", sys.executable, str(SCRIPTS / "horovod_calls.py"))
            command = [sys.executable, "-m", "rankless", *job, *arguments, "--pairs", "9"]
            environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPTS.parents[1])}
            done = hosts.run("a", command, cwd=Path(folder), env=environment, seconds=LIMIT_SECONDS)
            if done.returncode:
                raise RuntimeError(done.stdout + done.stderr)
            times: list[tuple[float, float]] = json.loads((Path(folder) / "times.json").read_text())
            yield make_row(f"horovod_2_hosts_allreduce_{name}", peer="Gloo", times=times)
