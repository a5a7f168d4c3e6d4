"""A training of a GPT of 10 million parameters whose worker 1 is killed before a step, with Rankless or with DDP.

The script writes to `seconds` how long the first step took that had not been made before, from the kill, and with
Rankless to `phases` when rank 0 had heard of the loss, had left its collective, and was in a new group. With DDP a
checkpoint is written every 10 steps, from which torchrun's second start continues; ours has none.
"""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import rankless
from bench.models import CHARACTERS, CONTEXT, GPT
from rankless.runtime.worker_recovery import WorkerRecovery

ROWS, KILLED_BEFORE, SAVED_EVERY = 8, 15, 10
parser = argparse.ArgumentParser()
parser.add_argument("--ddp", action="store_true")
parser.add_argument("--zero", help="the level of zero= of the job")
parser.add_argument("--steps", type=int, help="measure a step, and kill nobody")
arguments = parser.parse_args()
rank = int(os.environ["RANK"])
torch.manual_seed(0)
model = GPT(layers=8, width=320)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
steps = arguments.steps or KILLED_BEFORE + 1
text = torch.randint(CHARACTERS, (ROWS * steps, CONTEXT + 1))


def lose(tokens: torch.Tensor, network: torch.nn.Module = model) -> torch.Tensor:
    return F.cross_entropy(network(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def die_before(step: int) -> None:
    if step == KILLED_BEFORE and rank == 1 and arguments.steps is None and not os.path.exists("killed"):
        Path("killed").write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)


def note_phases() -> dict[str, float]:
    """Return a dict that gets the times of the phases of a recovery."""
    phases: dict[str, float] = {}
    abort, regroup = WorkerRecovery._abort, WorkerRecovery._regroup

    def note_abort(recovery: WorkerRecovery) -> None:
        phases.setdefault("detected", time.time())
        abort(recovery)

    def note_regroup(recovery: WorkerRecovery, **options: bool) -> None:
        phases.setdefault("released", time.time())
        regroup(recovery, **options)
        phases["regrouped"] = time.time()  # with the round in which the worker is replaced

    WorkerRecovery._abort, WorkerRecovery._regroup = note_abort, note_regroup  # type: ignore[method-assign]
    return phases


def train_with_rankless() -> int:
    phases = note_phases()
    train = rankless.job(model=model, optimizer=optimizer, zero=arguments.zero)(lose)
    for step, (tokens,) in enumerate(rankless.loader(torch.utils.data.TensorDataset(text), batch_size=ROWS)):
        if step == steps // 2:
            start = time.monotonic()
        die_before(step)
        train(tokens)
    if arguments.steps is not None and rankless.rank() == 0:
        Path("step_seconds").write_text(str((time.monotonic() - start) / (steps - steps // 2)))
    if arguments.steps is None and rank == 0:
        killed = float(Path("killed").read_text())
        Path("phases").write_text(json.dumps({name: moment - killed for name, moment in phases.items()}))
    return rankless.rank()


def train_with_ddp() -> int:
    # torchrun's restart finds the addresses of the first start in its store, so that Gloo fails to connect.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    attempt = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    dist.init_process_group("gloo", store=attempt, rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    parallel = DistributedDataParallel(model)
    first = 0
    if os.path.exists("checkpoint.pt"):
        saved = torch.load("checkpoint.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    for step in range(first, steps):
        die_before(step)
        tokens = text[ROWS * step : ROWS * (step + 1)].tensor_split(dist.get_world_size())[rank]
        optimizer.zero_grad()
        lose(tokens, parallel).backward()
        optimizer.step()
        if (step + 1) % SAVED_EVERY == 0 and rank == 0:
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(states, "checkpoint.new")
            os.replace("checkpoint.new", "checkpoint.pt")
    return rank


if (train_with_ddp if arguments.ddp else train_with_rankless)() == 0 and arguments.steps is None:
    Path("seconds").write_text(str(time.time() - float(Path("killed").read_text())))
