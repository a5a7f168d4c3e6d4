"""Scripts of jobs without servers whose workers are killed, and the same trainings in plain PyTorch on one device."""

import subprocess
from pathlib import Path

import torch
from support.lost_workers import KILLS_OF_WORKERS
from support.warm_process import WarmProcess
from support.warm_runs import rankless

MODELS = """
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
if KIND == "lbfgs":
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=3)
elif "accumulate" in KIND:
    model = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.GELU(), nn.Linear(12, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
else:
    first = nn.Linear(6, 12, bias=False)  # Adam makes a step of rounding noise where the gradient is zero
    model = nn.Sequential(first, nn.BatchNorm1d(12), nn.Tanh(), nn.Dropout(0.2), nn.Linear(12, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.9)
features = torch.cos(torch.outer(torch.arange(150.0), torch.arange(1.0, 7.0)))
targets = torch.sin(torch.arange(150.0))[:, None]
data = torch.utils.data.TensorDataset(features, targets, torch.arange(150))
losses, seen = [], []
"""

TRAINING = (
    KILLS_OF_WORKERS
    + MODELS
    + """
loader = rankless.loader(data, batch_size=16, shuffle=True, num_workers=2 if KIND == "readers" else 0)
checkpoints = rankless.checkpoints("kept", keep_last=2)


@rankless.job(
    model=model,
    optimizer=optimizer,
    accumulate=2 if "accumulate" in KIND else 1,
    zero=KIND.split()[1] if KIND.startswith("zero") else None,
    clip_norm=0.5 if KIND.startswith("zero") else None,
)
def train(features, targets):
    return nn.functional.mse_loss(model(features), targets)


@rankless.job(model=model)
def predict(features):
    return model(features).sum()


calls = 0
for epoch in range(3):
    model.train()
    for batch, wanted, numbers in loader:
        reach(str(calls))
        losses.append(float(train(batch, wanted)))
        calls += 1
        if "accumulate" not in KIND or calls % 2 == 0:
            schedule.step()
        seen.append(numbers.sum().item())
    model.eval()
    reach(f"predict{epoch}")
    losses.append(float(predict(features)))
    reach(f"once{epoch}")
    assert rankless.once(lambda: sum(range(10))) == 45
    reach(f"save{epoch}")
    if epoch == 2:
        await_kill()
    checkpoints.save(calls, model=model, optimizer=optimizer, loader=loader)
    reach(f"load{epoch}")
    assert checkpoints.load(model=model, optimizer=optimizer, loader=loader).step == calls
    print(f"epoch {epoch}: {losses[-1]:.12f}", flush=True)
reach("end")
results = {
    "losses": losses,
    "seen": seen,
    "model": {name: value.detach().clone() for name, value in model.state_dict().items()},
    "states": copy.deepcopy(optimizer.state_dict()["state"]) if KIND != "lbfgs" else {},
    "size": rankless.world_size(),
}
own = os.environ.get("RANK", "0")  # of the worker whose place this one may have taken
torch.save(results, f"results{own}.new")
os.replace(f"results{own}.new", f"results{own}.pt")
"""
)

PLAIN = (
    "import torch\nfrom torch import nn\n"
    + MODELS
    + """
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)


def train(batches):
    rows, wanted = (torch.cat(parts) for parts in zip(*batches))

    def evaluate():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(rows), wanted)
        loss.backward()
        if KIND.startswith("zero"):
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        return loss

    if "accumulate" in KIND:
        with torch.no_grad():
            losses.extend(nn.functional.mse_loss(model(one), other).item() for one, other in batches)
    loss = optimizer.step(evaluate)
    if "accumulate" not in KIND:
        losses.append(loss.item())
    schedule.step()


for epoch in range(3):
    model.train()
    waiting = []
    for batch, wanted, numbers in loader:
        seen.append(numbers.sum().item())
        waiting.append((batch, wanted))
        if len(waiting) == (2 if "accumulate" in KIND else 1):
            train(waiting)
            waiting = []
    model.eval()
    with torch.no_grad():
        losses.append(model(features).sum().item())
results = {"losses": losses, "seen": seen, "model": model.state_dict()}
results["states"] = optimizer.state_dict()["state"] if KIND != "lbfgs" else {}
torch.save(results, "plain.pt")
"""
)

ZERO_KINDS = (
    "zero optimizer",
    "zero gradients",
    "zero parameters",
    "zero optimizer accumulate",
    "zero gradients accumulate",
    "zero parameters accumulate",
)
KINDS = ("norm and dropout", "accumulate", "lbfgs", "readers")


def run_plain(folder: Path, kind: str) -> dict:
    """Return what plain PyTorch trains on one device."""
    (folder / "plain.py").write_text(f"KIND = {kind!r}\n{PLAIN}")
    done = WarmProcess(folder / "plain.py").wait()
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "plain.pt")


def write_script(folder: Path, kind: str) -> None:
    (folder / "script.py").write_text(f"KIND = {kind!r}\n{TRAINING}")


def run_killed(
    folder: Path, kind: str, kills: str, *options: str, replaces: bool = False
) -> subprocess.CompletedProcess[str]:
    """Train with 3 workers, or as options say, of which some are killed; `kills` as in `lost_workers.run_killed`."""
    write_script(folder, kind)
    copies = ("--copies", "1") if kind in ZERO_KINDS else ()
    others = () if replaces else ("--no-replace",)
    command = ("run", "-n", "3", "--devices", "cpu", *copies, *others, *options, "script.py")
    return rankless(*command, folder=folder, KILLS=kills)


def require_same_training(folder: Path, plain: dict, *, left: int) -> None:
    """Check that each worker that was not killed has trained what plain PyTorch has, each sample once."""
    found = [torch.load(path) for path in sorted(folder.glob("results*.pt"))]
    assert len(found) == left
    for results in found:
        assert results["size"] == len(found)
        assert results["seen"] == plain["seen"]
        for name in ("losses", "model", "states"):
            torch.testing.assert_close(results[name], plain[name], rtol=1e-10, atol=1e-10)
