"""A script with a dense part whose workers of two kinds are killed, and the same training in plain PyTorch."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from support.jobs import DEADLINE_SECONDS
from support.lost_workers import KILLS_OF_WORKERS, require_same_training
from support.warm_runs import rankless

MODEL = """
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
ids = torch.stack([torch.arange(150) * 7 % 40, torch.arange(150) * 11 % 30], dim=1)
ratings = torch.sin(torch.arange(150.0))[:, None]
features = torch.cos(torch.outer(torch.arange(150.0), torch.tensor([1.0, 2.5, 0.3])))
data = torch.utils.data.TensorDataset(ids, features, ratings)


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 6)
        self.norm = nn.LayerNorm(6)
        self.last = nn.Linear(6, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, values):
        return self.last(nn.functional.dropout(self.norm(self.first(values)).tanh(), 0.2, self.training)) * self.scale


numbers, dense = nn.Linear(3, 4), Dense()


def score(ids, features):
    return dense(torch.cat([users(ids[:, 0]) * items(ids[:, 1]), numbers(features)], dim=1))


def error(ids, features, ratings):
    return nn.functional.mse_loss(score(ids, features), ratings)


STEPPERS = {
    "adam": lambda: [torch.optim.AdamW([*dense.parameters(), *numbers.parameters()], lr=0.01)],
    "momentum": lambda: [torch.optim.SGD([*dense.parameters(), *numbers.parameters()], lr=0.05, momentum=0.9)],
    "two": lambda: [torch.optim.Adam(dense.parameters(), lr=0.01), torch.optim.Adagrad(numbers.parameters(), lr=0.05)],
}
optimizers = [
    torch.optim.Adagrad(users.parameters(), lr=0.1, initial_accumulator_value=0.1),
    *STEPPERS["OPTIMIZER"](),
    torch.optim.SparseAdam(items.parameters(), lr=0.02),
]
schedules = [torch.optim.lr_scheduler.StepLR(each, 5, gamma=0.9) for each in optimizers]
losses, seen, calls, epoch = [], [], 0, 0


def change():
    with torch.no_grad():
        dense.first.weight.mul_(0.99)
        numbers.bias.add_(0.01)


def look():
    return [dense.last.weight.detach().sum().item(), numbers.weight.detach().abs().sum().item()]


def list_states():
    found = [optimizer.state_dict()["state"] for optimizer in optimizers[1:-1]]
    return [{name: {key: value + 0 for key, value in each.items()} for name, each in one.items()} for one in found]


def list_values():
    return {name: value + 0 for part in (numbers, dense) for name, value in part.state_dict().items()}
"""

FAULTS = """
from rankless.ownership import partitioned_tensor, states_of_survivors, sharded_state_owner
from rankless.runtime import worker_recovery

COUNTS = {}


def watch(owner, name, moment, after=None):
    # let each call of a function be a moment, before it and perhaps after it: moment0, moment1, and so on
    function = getattr(owner, name)

    def watched(*arguments, **options):
        number = COUNTS[moment] = COUNTS.get(moment, -1) + 1
        reach(f"{moment}{number}")
        result = function(*arguments, **options)
        reach(f"{after}{number}")
        return result

    setattr(owner, name, watched)


watch(worker_recovery.dist, "barrier", "computed", "passed")
watch(sharded_state_owner, "share_state", "share", "shared")
watch(partitioned_tensor, "gather_shards", "gather")
watch(states_of_survivors, "broadcast", "send")
watch(sharded_state_owner, "make_divided_parameter", "divide")
watch(partitioned_tensor.WholeValues, "write_back", "written")
watch(sharded_state_owner.ShardedStateOwner, "measure_norm", "norm")
"""

TRAINING = (
    KILLS_OF_WORKERS
    + FAULTS
    + """
initial = rankless.parameter_server.Constant(value=0.5)
users = rankless.parameter_server.Embedding(4, initial=initial, seed=1, dtype=torch.float64)
items = rankless.parameter_server.Embedding(4, initial=initial, seed=2, dtype=torch.float64)
"""
    + MODEL
    + """
rankless.parameter_server.mark_dense(dense)
model = nn.ModuleList([users, items, numbers, dense])
loader = rankless.loader(data, batch_size=16, shuffle=True, WORKERS)
optimizers[0].register_step_pre_hook(lambda *_: reach(f"steps{calls}"))
optimizers[0].register_step_post_hook(lambda *_: reach(f"stepped{calls}"))
optimizers[-1].register_step_pre_hook(lambda *_: reach(f"dense{calls}"))
optimizers[-1].register_step_post_hook(lambda *_: reach(f"all{calls}"))
model.register_state_dict_pre_hook(lambda *_: reach(f"state{epoch}"))


def show():
    reach(f"inside{epoch}")
    print(f"epoch {epoch}: {losses[-1]:.12f}", flush=True)


@rankless.job(model=model, optimizer=optimizers, MORE)
def train(ids, features, ratings):
    return error(ids, features, ratings)


@rankless.job(model=model)
def predict(ids, features):
    return score(ids, features).sum()


for epoch in range(3):
    model.train()
    reach(f"epoch{epoch}")
    for batch, more, target in loader:
        reach(str(calls))
        losses.append(float(train(batch, more, target)))
        calls += 1
        for schedule in schedules:
            schedule.step()
        reach(f"look{calls}")
        if LOOKS:
            seen += look()
            reach(f"looked{calls}")
            seen.append(target.sum().item())
    reach(f"change{epoch}")
    change()
    model.eval()
    reach(f"predict{epoch}")
    losses.append(float(predict(ids, features)))
    reach(f"once{epoch}")
    rankless.once(show)
    reach(f"save{epoch}")
    rankless.save("checkpoint", model=model, optimizers=optimizers[1])
reach("results")
results = {
    "losses": losses,
    "seen": seen,
    "rows": [users.list_rows()["rows"], items.list_rows()["rows"]],
    "values": list_values(),
    "states": list_states(),
    "size": rankless.world_size(),
}
reach("end")
torch.save(results, f"results{RANK}.new")
os.replace(f"results{RANK}.new", f"results{RANK}.pt")
"""
)

PLAIN = (
    """
import torch
from torch import nn

users = nn.Embedding(40, 4, _weight=torch.full((40, 4), 0.5, dtype=torch.float64), sparse=True)
items = nn.Embedding(30, 4, _weight=torch.full((30, 4), 0.5, dtype=torch.float64), sparse=True)
"""
    + MODEL
    + """
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
for epoch in range(3):
    dense.train()
    for batch, more, target in loader:
        loss = error(batch, more, target)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        CLIP
        for optimizer in optimizers:
            optimizer.step()
        for schedule in schedules:
            schedule.step()
        losses.append(loss.item())
        seen += look()
        seen.append(target.sum().item())
    change()
    dense.eval()
    with torch.no_grad():
        losses.append(score(ids, features).sum().item())
torch.save(
    {
        "losses": losses,
        "seen": seen,
        "rows": [users.weight.detach(), items.weight.detach()],
        "values": list_values(),
        "states": list_states(),
    },
    "plain.pt",
)
"""
)


def run_plain_heterogeneous(folder: Path, stepper: str = "adam", clip: str = "") -> dict:
    """Return what plain PyTorch trains on one device.

    Args:
        folder: Where the script is.
        stepper: The name of the optimizers of dense parameters.
        clip: A statement between the backward pass and the steps.
    """
    (folder / "plain.py").write_text(PLAIN.replace("OPTIMIZER", stepper).replace("CLIP", clip or "pass"))
    subprocess.run([sys.executable, "plain.py"], cwd=folder, check=True, timeout=DEADLINE_SECONDS)
    return torch.load(folder / "plain.pt")


def write_killed_heterogeneous(
    folder: Path, kills: str = "", *, stepper: str = "adam", looks: bool = False, more: str = "", workers: str = ""
) -> None:
    """Write the script of a run whose workers are killed.

    Args:
        folder: Where the run is.
        kills: What to kill, as in `run_killed_heterogeneous`. Default: as the environment says.
        stepper: The name of the optimizers of dense parameters.
        looks: Whether the script reads parameters and whole batches between calls.
        more: Further arguments of the job that trains, as text.
        workers: Further arguments of the loader, as text.
    """
    text = TRAINING.replace("OPTIMIZER", stepper).replace("LOOKS", str(looks))
    text = text.replace(", MORE", f", {more}" if more else "").replace(", WORKERS", f", {workers}" if workers else "")
    if kills:  # ssh passes no variables on
        text = text.replace('os.environ.get("KILLS", "")', repr(kills))
    (folder / "script.py").write_text(text)


def run_killed_heterogeneous(
    folder: Path, kills: str, *options: str, sizes: tuple[str, str] = ("3", "2"), **script: Any
) -> subprocess.CompletedProcess[str]:
    """Train with 2 servers and workers of two kinds, of which some are killed.

    Args:
        folder: Where the run is.
        kills: WORKER:MOMENT:MILLISECONDS of each kill, with commas, or `server` as the worker. Moments are numbers of
            calls, and names.
        options: Further options of `rankless run`.
        sizes: The number of workers on the CPU, and of heterogeneous ones.
        script: Further arguments of `write_killed_heterogeneous`.
    """
    write_killed_heterogeneous(folder, **script)
    command = ("run", "--servers", "2", "--workers", sizes[0], "--heter-workers", sizes[1], *options, "script.py")
    return rankless(*command, folder=folder, KILLS=kills)


def require_same_heterogeneous(folder: Path, plain: dict) -> dict:
    """Check that each worker that was not killed has trained what plain PyTorch has. Return the results of one."""
    return require_same_training(folder, plain, names=("losses", "rows", "values", "states"), bound_of_seen=1e-10)
