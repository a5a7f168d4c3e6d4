"""What `rankless verify -n 2` and each of its runs cost, against one run of the same script as plain PyTorch.

Both sides choose their threads themselves: all cores for one process. `VERIFY_COST_STEPS` overrides the steps of all
models, for a quick look.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

from bench.commands import BIN, SCRIPTS
from bench.pairs import Row, make_row, measure

AIM = 3.5
STEPS = {"embeddings": 9000, "lenet": 800, "gpt": 400}
"""How many steps take about a minute on two cores."""
RUN = re.compile(r"^  (.+?) {2,}([0-9.]+) s$", re.MULTILINE)


def rows() -> Iterator[Row]:
    """Yield one row per model, and print what each run of `verify` took."""
    for model, usual in STEPS.items():
        words = [str(SCRIPTS / "verified.py"), model, "--steps", os.environ.get("VERIFY_COST_STEPS", str(usual))]
        ours = [str(BIN / "rankless"), "verify", "-n", "2", "--devices", "cpu", "--seed", "1", *words]
        peer = [sys.executable, *words, "--plain"]
        times = measure(lambda ours=ours: run(ours), lambda peer=peer: run(peer), pairs=3)
        yield make_row(f"verify_cost_{model}", peer="plain PyTorch", times=times, aim=AIM)


def run(command: Sequence[str]) -> float:
    """Return the seconds that a command takes, and print those of the runs that it reports."""
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS.parents[1])}
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
        seconds = time.monotonic() - start
    for what, took in RUN.findall(done.stderr):
        print(f"  {what}: {took} s", flush=True)
    return seconds
