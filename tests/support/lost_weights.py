"""A script with sparse embeddings whose workers are killed, and the same training in plain PyTorch on one device."""

import subprocess
import sys
from pathlib import Path

import torch
from support.jobs import DEADLINE_SECONDS, rankless
from support.lost_workers import KILLS_OF_WORKERS

TRAINING = (
    KILLS_OF_WORKERS
    + """
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
users = nn.Embedding(40, 4, padding_idx=3, sparse=True)
items = nn.Embedding(30, 4, sparse=True)
bags = nn.EmbeddingBag(30, 4, mode="mean", sparse=True)
tied = nn.Embedding(30, 4, sparse=True)
tied.weight = items.weight
frozen = nn.Embedding(40, 4, sparse=True)
frozen.weight.requires_grad_(False)
layer = nn.Sequential(nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 1))
model = nn.ModuleList([users, items, tied, bags, frozen, layer])
optimizers = [
    torch.optim.Adagrad([*users.parameters(), *bags.parameters()], lr=0.1, initial_accumulator_value=0.1),
    torch.optim.SGD(items.parameters(), lr=0.05, momentum=0.9),
    torch.optim.AdamW(layer.parameters(), lr=0.01),
]
optimizers[1].register_step_pre_hook(lambda *_: [items.weight.grad.mul_(0.5)] and None)
schedules = [torch.optim.lr_scheduler.StepLR(each, 5, gamma=0.9) for each in optimizers]
ids = torch.stack([torch.arange(150) * 7 % 40, torch.arange(150) * 11 % 30, torch.arange(150) * 13 % 30], dim=1)
ratings = torch.sin(torch.arange(150.0))[:, None]
features = torch.cos(torch.outer(torch.arange(150.0), torch.tensor([1.0, 2.5])))
loader = rankless.loader(torch.utils.data.TensorDataset(ids, features, ratings), batch_size=16, shuffle=True)


def score(ids, features):
    looked_up = users(ids[:, 0]) * items(ids[:, 1]) + tied(ids[:, 2]) * bags(ids[:, 1:]) + frozen(ids[:, 0])
    return layer(torch.cat([looked_up, features], dim=1))


optimizers[0].register_step_pre_hook(lambda *_: reach(f"steps{calls}"))
optimizers[0].register_step_post_hook(lambda *_: reach(f"stepped{calls}"))
optimizers[2].register_step_post_hook(lambda *_: reach(f"all{calls}"))
model.register_state_dict_pre_hook(lambda *_: reach(f"state{epoch}"))


def show():
    reach(f"inside{epoch}")
    print(f"epoch {epoch}: {losses[-1]:.12f}", flush=True)


@rankless.job(model=model, optimizer=optimizers, MORE)
def train(ids, features, ratings):
    return nn.functional.mse_loss(score(ids, features), ratings)


@rankless.job(model=model)
def predict(ids, features):
    return score(ids, features).sum()


losses, seen, calls, epoch = [], [], 0, 0
for epoch in range(3):
    model.train()
    for batch, more, target in loader:
        reach(str(calls))
        losses.append(float(train(batch, more, target)))
        calls += 1
        for number, schedule in enumerate(schedules):
            schedule.step()
            reach(f"schedule{calls}.{number}")
        if READS:
            seen.append(users.weight.detach().abs().sum().item())
            seen.append(bags.weight.grad.coalesce().values().abs().sum().item())
    with torch.no_grad():
        reach(f"change{epoch}")
        items.weight.clamp_(-1.5, 1.5)
    model.eval()
    reach(f"predict{epoch}")
    losses.append(float(predict(ids, features)))
    reach(f"once{epoch}")
    rankless.once(show)
    reach(f"save{epoch}")
    rankless.save("checkpoint", model=model, optimizer=optimizers[0])
reach("end")
results = {
    "losses": losses,
    "seen": seen,
    "model": model.state_dict(),
    "states": [optimizer.state_dict()["state"] for optimizer in optimizers],
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
users = nn.Embedding(40, 4, padding_idx=3, sparse=True)
items = nn.Embedding(30, 4, sparse=True)
bags = nn.EmbeddingBag(30, 4, mode="mean", sparse=True)
tied = nn.Embedding(30, 4, sparse=True)
tied.weight = items.weight
frozen = nn.Embedding(40, 4, sparse=True)
frozen.weight.requires_grad_(False)
layer = nn.Sequential(nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 1))
model = nn.ModuleList([users, items, tied, bags, frozen, layer])
optimizers = [
    torch.optim.Adagrad([*users.parameters(), *bags.parameters()], lr=0.1, initial_accumulator_value=0.1),
    torch.optim.SGD(items.parameters(), lr=0.05, momentum=0.9),
    torch.optim.AdamW(layer.parameters(), lr=0.01),
]
optimizers[1].register_step_pre_hook(lambda *_: [items.weight.grad.mul_(0.5)] and None)
schedules = [torch.optim.lr_scheduler.StepLR(each, 5, gamma=0.9) for each in optimizers]
ids = torch.stack([torch.arange(150) * 7 % 40, torch.arange(150) * 11 % 30, torch.arange(150) * 13 % 30], dim=1)
ratings = torch.sin(torch.arange(150.0))[:, None]
features = torch.cos(torch.outer(torch.arange(150.0), torch.tensor([1.0, 2.5])))
data = torch.utils.data.TensorDataset(ids, features, ratings)
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
losses, seen = [], []


def score(ids, features):
    looked_up = users(ids[:, 0]) * items(ids[:, 1]) + tied(ids[:, 2]) * bags(ids[:, 1:]) + frozen(ids[:, 0])
    return layer(torch.cat([looked_up, features], dim=1))


for epoch in range(3):
    model.train()
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
        seen.append(users.weight.detach().abs().sum().item())
        seen.append(bags.weight.grad.coalesce().values().abs().sum().item())
    with torch.no_grad():
        items.weight.clamp_(-1.5, 1.5)
    model.eval()
    with torch.no_grad():
        losses.append(score(ids, features).sum().item())
results = {
    "losses": losses,
    "seen": seen,
    "model": model.state_dict(),
    "states": [optimizer.state_dict()["state"] for optimizer in optimizers],
}
torch.save(results, "plain.pt")
"""


def run_plain_weights(folder: Path) -> dict:
    """Return what plain PyTorch trains on one device."""
    (folder / "plain.py").write_text(PLAIN)
    subprocess.run([sys.executable, "plain.py"], cwd=folder, check=True, timeout=DEADLINE_SECONDS)
    plain = torch.load(folder / "plain.pt")
    momentum = plain["states"][1][0]
    momentum["momentum_buffer"] = momentum["momentum_buffer"].to_dense()  # servers have it dense
    return plain


def run_killed_weights(
    folder: Path, kills: str, *options: str, reads: bool = False, workers: int = 3
) -> subprocess.CompletedProcess[str]:
    """Train with 2 servers and several workers, of which some are killed.

    Args:
        folder: Where the run is.
        kills: As for `run_killed`. Moments are numbers of calls, and names with the number of calls or epochs so far.
        options: Further options of `rankless run`.
        reads: Whether the script reads a weight and a gradient after each step.
        workers: Number of workers.
    """
    text = TRAINING.replace("READS", str(reads)).replace(", MORE", "")
    (folder / "script.py").write_text(text)
    command = ("run", "--servers", "2", "--workers", str(workers), *options, "script.py")
    return rankless(*command, folder=folder, KILLS=kills)


def require_same_weights(folder: Path, plain: dict) -> dict:
    """Check that each worker that was not killed has trained what plain PyTorch has. Return the results of one."""
    found = [torch.load(path) for path in sorted(folder.glob("results*.pt"))]
    for results in found:
        assert len(results["losses"]) == len(plain["losses"])
        for name in ("losses", "model", "states", *(["seen"] if results["seen"] else [])):
            torch.testing.assert_close(results[name], plain[name], rtol=1e-10, atol=1e-10)
    return found[0]
