"""The training of recovery.py with torchft: a lighthouse, and 4 replica groups of one process, of which one is killed.

The script starts the others, and writes to `seconds` how long the first step took that had not been committed before,
from the kill. torchft does not read the part of the batch of a dead group.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from bench.models import CHARACTERS, CONTEXT, GPT

GROUPS, ROWS, KILLED_BEFORE = 4, 8, 15
TIMEOUT = timedelta(seconds=60)


def start_all() -> None:
    """Start the lighthouse and the groups, and wait for their ends."""
    import torchft  # noqa: PLC0415  # where its program lies

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    program = Path(torchft.__file__).parents[1] / "bin" / "torchft_lighthouse"
    words = [str(program), "--min_replicas", "2", "--join_timeout_ms", "10000", "--bind", f"[::]:{port}"]
    environment = {**os.environ, "TORCHFT_LIGHTHOUSE": f"http://localhost:{port}"}
    lighthouse = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        own = [sys.executable, __file__]
        groups = [subprocess.Popen([*own, str(number)], env=environment) for number in range(GROUPS)]
        codes = [group.wait() for group in groups]
    finally:
        lighthouse.kill()
        lighthouse.wait()
    if codes != [0, -signal.SIGKILL, 0, 0]:
        raise SystemExit(f"the groups ended with {codes}")


def train(number: int) -> None:
    """Train as one replica group."""
    torch.manual_seed(0)
    model = GPT(layers=8, width=320)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.randint(CHARACTERS, (ROWS * (KILLED_BEFORE + 1), CONTEXT + 1))
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def load(state: dict) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()},
        min_replica_size=2,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        replica_id=f"group{number}",
        timeout=TIMEOUT,
        init_sync=False,
    )
    parallel, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, plain)
    while (step := manager.current_step()) <= KILLED_BEFORE:
        if step == KILLED_BEFORE and number == 1:
            Path("killed").write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        tokens = text[ROWS * step : ROWS * (step + 1)].tensor_split(GROUPS)[number]
        optimizer.zero_grad()
        F.cross_entropy(parallel(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    if number == 0:
        Path("seconds").write_text(str(time.time() - float(Path("killed").read_text())))
    manager.shutdown(wait=False)


if len(sys.argv) > 1:
    train(int(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # its threads would wait for the lighthouse
start_all()
