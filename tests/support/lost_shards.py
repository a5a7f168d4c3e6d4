"""Scripts of jobs whose workers divide states, and of whom some are killed. On one device they are plain PyTorch."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from support.lost_workers import KILLS_OF_WORKERS
from support.warm_runs import rankless

from rankless.config.mesh_option import count_workers, parse_mesh

BEGIN = (
    KILLS_OF_WORKERS
    + """
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
ZERO = os.environ["ZERO"]
features = torch.cos(torch.outer(torch.arange(96.0), torch.arange(1.0, 7.0)))
targets = torch.sin(torch.arange(96.0))[:, None]
loader = rankless.loader(torch.utils.data.TensorDataset(features, targets), batch_size=16, shuffle=True)
net = nn.Sequential(nn.Linear(6, 13), nn.LayerNorm(13), nn.GELU(), nn.Linear(13, 1))
losses = []


def run(train, after=lambda step: None):
    step = 0
    for epoch in range(2):
        for rows, wanted in loader:
            reach(str(step))
            losses.append(float(train(rows, wanted)))
            reach(f"after{step}")
            after(step)
            step += 1


def write_shards(optimizers):
    # what this worker has of each value and state: its own shard, and copies of others', by worker
    from rankless.runtime import current_context

    found, rank = {}, rankless.rank()
    for number, member in enumerate(current_context._context.world.owner._divided.values()):
        parts = {"value": (member.shard, member.copies)}
        for optimizer in optimizers:
            for key, entry in optimizer.state.get(member.parameter, {}).items():
                if entry.dim():
                    parts[key] = entry.partition.shard, entry.partition.copies
        for name, (shard, copies) in parts.items():
            own = {rank: shard} if member.has_rows(rank) else {}
            for worker, each in {**own, **copies}.items():
                found[number, name, worker] = each.detach().clone()
    torch.save(found, f"shards{RANK}.pt")


def finish(*models, optimizers):
    await_kill()
    rankless.save("end", model=models[0])
    if "SHARDS" in os.environ:
        write_shards(optimizers)
    results = {
        "losses": losses,
        "models": [{key: value.detach().clone() for key, value in model.state_dict().items()} for model in models],
        "states": [copy.deepcopy(optimizer.state_dict()["state"]) for optimizer in optimizers],
    }
    own = os.environ.get("RANK", "0")  # of the worker whose place this one may have taken
    torch.save(results, f"results{own}.new")
    os.replace(f"results{own}.new", f"results{own}.pt")
"""
)
JOB = """
@rankless.job(model=net, optimizer=optimizer, zero=ZERO or None)
def train(rows, wanted):
    return nn.functional.mse_loss(net(rows), wanted)
"""
FORMS = {
    "an average of parameters": """
average = copy.deepcopy(net)
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
JOB
def after(step):
    with torch.no_grad():
        for kept, new in zip(average.parameters(), net.parameters()):
            kept.mul_(0.9).add_(new, alpha=0.1)
run(train, after)
finish(net, average, optimizers=[optimizer])
""",
    "changed parameters and states": """
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
@rankless.job(model=net, optimizer=optimizer, zero=ZERO or None, gradient_norm=True)
def train(rows, wanted):
    return nn.functional.mse_loss(net(rows), wanted)
def after(step):
    losses.append(float(train.gradient_norm))
    if step % 3 == 1:
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.clamp_(-0.4, 0.4)
    if step % 4 == 2:
        for state in optimizer.state.values():
            state["momentum_buffer"].mul_(0.5)
run(train, after)
finish(net, optimizers=[optimizer])
""",
    "two models": """
judge = nn.Sequential(nn.Linear(1, 9), nn.Tanh(), nn.Linear(9, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
other = torch.optim.RMSprop(judge.parameters(), lr=0.01)
@rankless.job(model={"judge": judge, "net": net}, optimizer=other, zero=ZERO or None)
def first(rows, wanted):
    return judge(net(rows)).square().mean() - judge(wanted).tanh().mean()
@rankless.job(model={"judge": judge, "net": net}, optimizer=optimizer, zero=ZERO or None)
def second(rows):
    return -judge(net(rows)).tanh().mean()
def both(rows, wanted):
    found = float(first(rows, wanted))
    reach(f"between{len(losses)}")
    return found + float(second(rows))
run(both)
finish(net, judge, optimizers=[optimizer, other])
""",
    "steps that the script ends": """
optimizer = torch.optim.Adagrad(net.parameters(), lr=0.05)
@rankless.job(model=net, optimizer=optimizer, zero=ZERO or None, accumulate=4)
def train(rows, wanted):
    return nn.functional.mse_loss(net(rows), wanted)
def after(step):
    if step == 5:
        train.flush()
    if step == 7:
        losses.append(float(net[0].weight.sum()))
run(train, after)
train.flush()
finish(net, optimizers=[optimizer])
""",
    "sums beside another job": """
optimizer = torch.optim.RAdam(net.parameters(), lr=0.01)
@rankless.job(model=net, optimizer=optimizer, zero=ZERO or None, accumulate=5)
def summed(rows, wanted):
    return nn.functional.mse_loss(net(rows), wanted)
@rankless.job(model=net, optimizer=optimizer, zero=ZERO or None)
def train(rows, wanted):
    return nn.functional.l1_loss(net(rows), wanted)
def both(rows, wanted):
    found = float(summed(rows, wanted)) if len(losses) % 3 != 1 else 0.0
    reach(f"between{len(losses)}")
    return found + float(train(rows, wanted))
def after(step):
    if step in (4, 9):
        summed.flush()
run(both, after)
summed.flush()
finish(net, optimizers=[optimizer])
""",
    "loaded states": """
optimizer = torch.optim.NAdam(net.parameters(), lr=0.01)
JOB
def after(step):
    if step == 4:
        rankless.save("kept", model=net, optimizer=optimizer)
    if step == 8:
        rankless.load("kept", model=net, optimizer=optimizer)
    if step == 9:
        net.load_state_dict({key: value * 0.9 for key, value in net.state_dict().items()})
    if step == 10:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
run(train, after)
finish(net, optimizers=[optimizer])
""",
    "Muon": """
optimizer = torch.optim.Muon([each for each in net.parameters() if each.dim() == 2], lr=0.01)
other = torch.optim.AdamW([each for each in net.parameters() if each.dim() != 2], lr=0.01)
@rankless.job(model=net, optimizer=[optimizer, other], zero=ZERO or None)
def train(rows, wanted):
    return nn.functional.mse_loss(net(rows), wanted)
run(train)
finish(net, optimizers=[optimizer, other])
""",
    "Adafactor": """
optimizer = torch.optim.Adafactor(net.parameters(), lr=0.01)
JOB
run(train)
finish(net, optimizers=[optimizer])
""",
    "deferred and offloaded": """
with rankless.deferred():
    net = nn.Sequential(nn.Linear(6, 13), nn.LayerNorm(13), nn.GELU(), nn.Linear(13, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
@rankless.job(model=net, optimizer=optimizer, zero=ZERO or None, offload=bool(ZERO))
def train(rows, wanted):
    return nn.functional.mse_loss(net(rows), wanted)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=12)
run(train, lambda step: schedule.step())
finish(net, optimizers=[optimizer])
""",
    "frozen for a while": """
optimizer = torch.optim.Adam(net.parameters(), lr=0.01, amsgrad=True)
@rankless.job(model=net, optimizer=optimizer, zero=ZERO or None, accumulate=3)
def train(rows, wanted):
    return nn.functional.mse_loss(net(rows), wanted)
def after(step):
    if step in (2, 8):
        for parameter in net[0].parameters():
            parameter.requires_grad_(step == 8)
run(train, after)
finish(net, optimizers=[optimizer])
""",
}
FORMS_OF_MESHES = {
    "transformer": """
class Block(nn.Module):
    def __init__(self, features=8, heads=2):
        super().__init__()
        self.heads, self.first, self.second = heads, nn.LayerNorm(features), nn.LayerNorm(features)
        self.queries, self.out = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.up, self.down, self.drop = nn.Linear(features, 32), nn.Linear(32, features), nn.Dropout(0.1)

    def forward(self, words):
        batch, length, features = words.shape
        parts = self.queries(self.first(words)).view(batch, length, 3, self.heads, features // self.heads)
        attended = nn.functional.scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4), is_causal=True)
        words = words + self.drop(self.out(attended.transpose(1, 2).reshape(batch, length, features)))
        return words + self.down(nn.functional.gelu(self.up(self.second(words))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(11, 8), nn.Parameter(torch.randn(6, 8) * 0.1)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(4)), nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words):
        values = self.words(words) + self.positions
        for block in self.blocks:
            values = block(values)
        return self.head(self.norm(values))


net = Transformer()
words = (features * 5).long().abs() % 11
loader = rankless.loader(torch.utils.data.TensorDataset(words, words.roll(-1, 1)), batch_size=16, shuffle=True)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
@rankless.job(model=net, optimizer=optimizer, zero=ZERO or None, clip_norm=1.0, accumulate=2)
def train(words, following):
    return nn.functional.cross_entropy(net(words).flatten(0, 1), following.flatten())
def after(step):
    if step in (3, 8):
        losses.append(float(net.blocks[1].up.weight.sum()))
    if step == 5:
        rankless.save("kept", model=net, optimizer=optimizer)
    if step == 9:
        rankless.load("kept", model=net, optimizer=optimizer)
run(train, after)
finish(net, optimizers=[optimizer])
""",
    "experts": """
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, 6, 10) * 0.3), nn.Parameter(torch.randn(4, 10, 6) * 0.3)

    def forward(self, rows):
        hidden = torch.relu(torch.einsum("bi,eih->ebh", rows, self.up))
        weights = torch.softmax(self.gate(rows), -1)
        return torch.einsum("be,ebo->bo", weights, torch.einsum("ebh,eho->ebo", hidden, self.down))


net = nn.Sequential(nn.Linear(6, 6), Experts(), nn.LayerNorm(6), nn.Linear(6, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=0.01, amsgrad=True)
JOB
run(train)
finish(net, optimizers=[optimizer])
""",
    "tied and frozen": """
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.scale = nn.Linear(6, 7, bias=False), nn.Parameter(torch.tensor(0.5))
        self.between, self.last = nn.Conv1d(7, 7, 1), nn.Linear(6, 1)
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.register_buffer("calls", torch.zeros(5))

    def forward(self, rows):
        self.calls += 1
        hidden = self.between(torch.tanh(self.first(rows))[:, :, None])[:, :, 0]
        return self.last(hidden @ self.first.weight) * self.scale


net = Tied()
first = [net.first.weight, net.scale, net.frozen]
others = [*net.between.parameters(), *net.last.parameters()]
optimizer = torch.optim.Adam([{"params": first}, {"params": others, "lr": 0.02}], lr=0.01)
JOB
@rankless.job(model=net)
def evaluate(rows):
    return net(rows).sum()
run(train, lambda step: losses.append(float(evaluate(features))) if step % 5 == 4 else None)
finish(net, optimizers=[optimizer])
""",
}
LEVELS = ("optimizer", "gradients", "parameters")


def write_script(folder: Path, form: str) -> None:
    (folder / "script.py").write_text(BEGIN + (FORMS | FORMS_OF_MESHES)[form].replace("JOB\n", JOB))


def run_alone(folder: Path, form: str, level: str) -> dict:
    """Return what the script trains in a plain process, in which its jobs are plain PyTorch."""
    write_script(folder, form)
    variables = {**os.environ, "ZERO": level, "KILLS": "", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "script.py"], cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "results0.pt")


def run_killed(
    folder: Path, form: str, level: str, workers: int, kills: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Train with some workers, of which some are killed; `kills` as in `lost_workers.run_killed`."""
    return run_killed_on_mesh(folder, form, level, f"data={workers}", kills, copies=1, **variables)


def run_killed_on_mesh(
    folder: Path, form: str, level: str, mesh: str, kills: str, *, copies: int, replaces: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    """The same on a mesh, with or without copies of states. Without a level, jobs have no `zero=`."""
    write_script(folder, form)
    command = (
        "run",
        "-n",
        str(count_workers(parse_mesh(mesh))),
        "--devices",
        "cpu",
        "--copies",
        str(copies),
        "--mesh",
        mesh,
        *(() if replaces else ("--no-replace",)),
        "script.py",
    )
    return rankless(*command, folder=folder, KILLS=kills, ZERO=level, **variables)
