"""A script with tables whose workers are killed, and the same training in plain PyTorch on one device."""

import subprocess
from pathlib import Path

import torch
from support.warm_process import WarmProcess
from support.warm_runs import rankless

KILLS_OF_WORKERS = """
import copy, os, signal, subprocess, time
import psutil, torch
from torch import nn
import rankless

RANK = int(os.environ.get("RANK", 0))
KILLS = [part.split(":") for part in os.environ.get("KILLS", "").split(",") if part]
pending = []


def reach(moment):
    # KILLS has the worker, the moment, and after how many milliseconds it is killed, or "frozen", or "heard" for one
    # that hears of another's loss then
    own = int(os.environ.get("RANK", 0))  # a copy of a worker has taken the place of another one
    for worker, at, delay in KILLS:
        if at == moment and worker == "server" and own == 0:
            agent = psutil.Process(os.getppid()).parent()
            server = next(each for each in agent.children() if "parameter server" in " ".join(each.cmdline()))
            server.kill()
        elif at == moment and worker == "host" and own == int(os.environ["WORLD_SIZE"]) - 1:
            agent = psutil.Process(os.getppid()).parent()
            for each in [agent, *agent.children(recursive=True)]:
                if each.pid != os.getpid():
                    each.kill()
            os.kill(os.getpid(), signal.SIGKILL)
        elif at == moment and worker == "link" and own == 0:
            open("reached", "w").close()
            while not os.path.exists("cut"):
                time.sleep(0.01)
        elif at == moment and worker == str(own) and delay == "frozen":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif at == moment and worker == str(own) and delay == "heard":
            raise rankless.errors.CollectiveError(expected="all workers", found="a loss", fix="continue")
        elif at == moment and worker == str(own):
            if float(delay) == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            pending.append(subprocess.Popen(["sh", "-c", f"sleep {float(delay) / 1000}; kill -9 {os.getpid()}"]))


barrier, barriers = torch.distributed.barrier, 0


def pass_barrier(*args, **kwargs):
    # an operation of all workers ends with a barrier
    global barriers
    barrier(*args, **kwargs)
    barriers += 1
    reach(f"barrier{barriers}")


torch.distributed.barrier = pass_barrier


def await_kill():
    # before something that all workers do: a kill after all others have ended would end the run
    if pending:
        time.sleep(30)
"""

TRAINING = (
    KILLS_OF_WORKERS
    + """
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
initial = rankless.parameter_server.Constant(value=0.5)
users = rankless.parameter_server.Embedding(4, initial=initial, seed=1)
items = rankless.parameter_server.Embedding(4, initial=initial, seed=2)
layer = nn.Sequential(nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 1))
model = nn.ModuleList([users, items, layer])
optimizers = [
    torch.optim.Adagrad(users.parameters(), lr=0.1, initial_accumulator_value=0.1),
    torch.optim.SGD(items.parameters(), lr=0.05, momentum=0.9),
    torch.optim.AdamW(layer.parameters(), lr=0.01),
]
schedules = [torch.optim.lr_scheduler.StepLR(each, 5, gamma=0.9) for each in optimizers]
ids = torch.stack([torch.arange(150) * 7 % 40, torch.arange(150) * 11 % 30], dim=1)
ratings = torch.sin(torch.arange(150.0))[:, None]
features = torch.cos(torch.outer(torch.arange(150.0), torch.tensor([1.0, 2.5])))
loader = rankless.loader(torch.utils.data.TensorDataset(ids, features, ratings), batch_size=16, shuffle=True, WORKERS)


def score(ids, features):
    return layer(torch.cat([users(ids[:, 0]) * items(ids[:, 1]), features], dim=1))


@rankless.job(model=model, optimizer=optimizers)
def train(ids, features, ratings):
    return nn.functional.mse_loss(score(ids, features), ratings)


@rankless.job(model=model)
def predict(ids, features):
    return score(ids, features).sum()


losses, seen, calls = [], [], 0
for epoch in range(3):
    model.train()
    for batch, more, target in loader:
        reach(str(calls))
        losses.append(float(train(batch, more, target)))
        calls += 1
        for schedule in schedules:
            schedule.step()
        if GATHERS:
            seen.append(target.sum().item())
    model.eval()
    reach(f"predict{epoch}")
    losses.append(float(predict(ids, features)))
    reach(f"once{epoch}")
    rows = rankless.once(lambda: users.statistics().rows)
    assert rows == 40, rows
    print(f"epoch {epoch}: {losses[-1]:.12f}", flush=True)
    reach(f"save{epoch}")
    rankless.save("checkpoint", model=model)
reach("end")
results = {
    "losses": losses,
    "seen": seen,
    "rows": [users.list_rows()["rows"], items.list_rows()["rows"]],
    "layer": layer.state_dict(),
    "states": optimizers[2].state_dict()["state"],
    "size": rankless.world_size(),
}
torch.save(results, f"results{RANK}.new")
os.replace(f"results{RANK}.new", f"results{RANK}.pt")
"""
)

PLAIN = """
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
users, items = nn.Embedding(40, 4, _weight=torch.full((40, 4), 0.5), sparse=True), nn.Embedding(
    30, 4, _weight=torch.full((30, 4), 0.5), sparse=True
)
layer = nn.Sequential(nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 1))
optimizers = [
    torch.optim.Adagrad(users.parameters(), lr=0.1, initial_accumulator_value=0.1),
    torch.optim.SGD(items.parameters(), lr=0.05, momentum=0.9),
    torch.optim.AdamW(layer.parameters(), lr=0.01),
]
schedules = [torch.optim.lr_scheduler.StepLR(each, 5, gamma=0.9) for each in optimizers]
ids = torch.stack([torch.arange(150) * 7 % 40, torch.arange(150) * 11 % 30], dim=1)
ratings = torch.sin(torch.arange(150.0))[:, None]
features = torch.cos(torch.outer(torch.arange(150.0), torch.tensor([1.0, 2.5])))
data = torch.utils.data.TensorDataset(ids, features, ratings)
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
losses, seen = [], []


def score(ids, features):
    return layer(torch.cat([users(ids[:, 0]) * items(ids[:, 1]), features], dim=1))


for epoch in range(3):
    layer.train()
    for batch, more, target in loader:
        loss = nn.functional.mse_loss(score(batch, more), target)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        for schedule in schedules:
            schedule.step()
        losses.append(loss.item())
        seen.append(target.sum().item())
    layer.eval()
    with torch.no_grad():
        losses.append(score(ids, features).sum().item())
torch.save(
    {
        "losses": losses,
        "seen": seen,
        "rows": [users.weight.detach(), items.weight.detach()],
        "layer": layer.state_dict(),
        "states": optimizers[2].state_dict()["state"],
    },
    "plain.pt",
)
"""


STEPS = """
import os, torch, rankless
from torch import nn
table, layer = rankless.parameter_server.Embedding(4), nn.Linear(4, 1)
optimizers = [torch.optim.SGD(table.parameters(), lr=0.1), torch.optim.SGD(layer.parameters(), lr=0.1)]


@rankless.job(model=[table, layer], optimizer=optimizers)
def train(ids):
    return layer(table(ids)).square().mean()


def die_at(step, now):
    if step == now and os.environ["RANK"] == "1":
        os.kill(os.getpid(), 9)

"""


def run_plain(folder: Path) -> dict:
    """Return what plain PyTorch trains on one device."""
    (folder / "plain.py").write_text(PLAIN)
    done = WarmProcess(folder / "plain.py").wait()
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "plain.pt")


def run_killed(
    folder: Path, kills: str, *options: str, gathers: bool = False, workers: str = ""
) -> subprocess.CompletedProcess[str]:
    """Train with 2 servers and 3 workers, of which some are killed.

    Args:
        folder: Where the run is.
        kills: WORKER:MOMENT:MILLISECONDS of each kill, with commas, or `server` as the worker. Moments are numbers of
            calls, and names.
        options: Further options of `rankless run`.
        gathers: Whether the script reads whole batches between calls.
        workers: Further arguments of the loader, as text.
    """
    text = TRAINING.replace("GATHERS", str(gathers)).replace(", WORKERS", f", {workers}" if workers else "")
    (folder / "script.py").write_text(text)
    command = ("run", "--servers", "2", "--workers", "3", *options, "script.py")
    return rankless(*command, folder=folder, KILLS=kills)


def require_same_training(
    folder: Path,
    plain: dict,
    *,
    names: tuple[str, ...] = ("losses", "rows", "layer", "states"),
    bound_of_seen: float = 1e-12,
) -> dict:
    """Check that each worker that was not killed has trained what plain PyTorch has. Return the results of one.

    Args:
        folder: Where the run was.
        plain: The results of plain PyTorch.
        names: Which of them all workers must have.
        bound_of_seen: The greatest difference of what the script has seen between calls.
    """
    found = [torch.load(path) for path in sorted(folder.glob("results*.pt"))]
    for results in found:
        assert len(results["losses"]) == len(plain["losses"])
        if results["seen"]:
            torch.testing.assert_close(results["seen"], plain["seen"], rtol=0, atol=bound_of_seen)
        for name in names:
            torch.testing.assert_close(results[name], plain[name], rtol=1e-10, atol=1e-10)
    return found[0]
