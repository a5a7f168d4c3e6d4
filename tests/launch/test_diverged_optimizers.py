"""Optimizers that differ between ranks: no rank makes the step, and the error names what differs where."""

import sys
from collections.abc import Iterator

import pytest
from support.hosts import Hosts, two_hosts
from support.warm_runs import run_script

pytestmark = pytest.mark.slow

SCRIPT = """
import copy, torch, rankless
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
optimizer = torch.optim.{kind}(model.parameters(), lr=0.1, weight_decay=0.01{settings})
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

@rankless.job(model=model, optimizer=optimizer{options})
def train(x, y):
    return (model(x) - y).square().mean()

generator = torch.Generator().manual_seed(1)
odd = rankless.rank() == rankless.world_size() - 1
group = optimizer.param_groups[0]
first = model[0].weight
for step in range(6):
    x, y = torch.randn(8, 3, generator=generator), torch.randn(8, 1, generator=generator)
    if step == 2:
        state = copy.deepcopy(optimizer.state_dict())
    if step == 3:
        {fault}
    train(x, y)
    print("made step", step, flush=True)
    scheduler.step()
print("done")
"""

STATE = (
    "state of optimizer SGD: momentum_buffer of model.0.weight{rest} changed outside the job on rank 1, not on rank 0"
)
ONE = STATE.format(rest="")
ALL = STATE.format(rest=", momentum_buffer of model.0.bias, momentum_buffer of model.1.weight and 1 more")
FAULTS = {
    "learning rate": (
        "group['lr'] = 0.05 if odd else group['lr']",
        "lr of param group 0 is 0.0125 on rank 0, 0.05 on rank 1",
    ),
    "momentum and weight decay": (
        "if odd: group.update(momentum=0.5, weight_decay=0)",
        "momentum of param group 0 is 0.9 on rank 0, 0.5 on rank 1; weight_decay of param group 0 is 0.01 on",
    ),
    "momentum": ("if odd: group['momentum'] = 0.5", "momentum of param group 0 is 0.9 on rank 0, 0.5 on rank 1"),
    "weight decay": (
        "if odd: group['weight_decay'] = 0",
        "weight_decay of param group 0 is 0.01 on rank 0, 0 on rank 1",
    ),
    "scheduler step": ("if odd: scheduler.step()", "lr of param group 0 is 0.0125 on rank 0, 0.00625 on rank 1"),
    "loaded state": ("if odd: optimizer.load_state_dict(state)", ALL),
    "state changed in place": ("if odd: optimizer.state[first]['momentum_buffer'].mul_(0.5)", ONE),
    "state replaced": ("if odd: optimizer.state[first]['momentum_buffer'] = torch.zeros(4, 3)", ONE),
    "state cleared": (
        "if odd: optimizer.state.clear()",
        "state of optimizer SGD: all of it changed outside the job on rank 1",
    ),
    "other contents on all ranks": (
        "optimizer.state[first]['momentum_buffer'].add_(rankless.rank())",
        "momentum_buffer of model.0.weight on rank 0: other values than on rank 1",
    ),
    "group added": (
        "if odd: optimizer.add_param_group({'params': [], 'lr': 0.3})",
        "number of parameters of param group 1 is absent on rank 0, 0 on rank 1",
    ),
    "parameter replaced through .data": ("if odd: first.data = first.data * 2", "its models changed outside jobs"),
}
IN_CI = ("learning rate", "momentum and weight decay", "scheduler step", "loaded state", "state changed in place")


def script(fault: str, *, kind: str = "SGD", settings: str = ", momentum=0.9", options: str = "") -> str:
    text = SCRIPT
    for name, value in {"fault": fault, "kind": kind, "settings": settings, "options": options}.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def require_divergence(done, folder, *, step: int = 3, ranks: int = 2) -> None:
    """Require that no rank made the step, and that the job ended with `RanksDiverged` and the script's line."""
    assert done.returncode == 1
    logs = {path.resolve(): path.read_text() for path in folder.glob("log/*/rank?.log")}
    assert len(logs) == ranks
    for log in logs.values():
        assert f"made step {step - 1}" in log
        assert f"made step {step}" not in log
    assert any("RanksDiverged" in log and "script.py:" in log for log in logs.values())


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.exhaustive) for name in FAULTS]
)
def test_all_ranks_stop_in_the_same_step_and_name_group_and_values(name: str, tmp_path):
    fault, sign = FAULTS[name]
    done = run_script(script(fault), "-n", "2", folder=tmp_path)
    require_divergence(done, tmp_path)
    assert sign in done.stderr, done.stderr


def test_equal_changes_on_all_ranks_are_no_difference(tmp_path):
    changes = (
        "group['lr'] = float('nan') if step < 0 else 0.05; group['note'] = object(); group['names'] = {'b', 'a'}; "
        "optimizer.load_state_dict(state); optimizer.state[first]['momentum_buffer'].mul_(0.5); "
        "optimizer.param_groups[0]['tensor'] = torch.tensor(0.5)"
    )
    done = run_script(script(changes), "-n", "2", folder=tmp_path, PYTHONHASHSEED="random")
    assert (done.returncode, "done" in done.stdout) == (0, True), done.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("kind", "settings", "fault", "sign"),
    [
        ("AdamW", "", "if odd: group['betas'] = (0.8, 0.999)", "betas of param group 0 is [0.9, 0.999] on rank"),
        ("AdamW", "", "if odd: optimizer.state[first]['step'].fill_(1)", "step of model.0.weight changed outside"),
        ("AdamW", "", "if odd: optimizer.state[first]['exp_avg_sq'].zero_()", "exp_avg_sq of model.0.weight changed"),
        ("Adam", ", fused=True", "if odd: group['eps'] = 1e-3", "eps of param group 0 is 1e-08 on rank"),
        ("RMSprop", "", "if odd: del optimizer.state[first]", "square_avg of model.0.bias, step of model.0.bias"),
    ],
)
def test_other_optimizers_and_more_ranks(kind, settings, fault, sign, ranks, tmp_path):
    done = run_script(script(fault, kind=kind, settings=settings), "-n", str(ranks), folder=tmp_path)
    require_divergence(done, tmp_path, ranks=ranks)
    assert sign in done.stderr, done.stderr


@pytest.mark.exhaustive
def test_what_bypasses_the_version_counter_is_found_on_request(tmp_path):
    fault = "if odd: optimizer.state[first]['momentum_buffer'].data.mul_(0.5)"
    done = run_script(script(fault, options=", check_synchronized_every=5"), "-n", "2", folder=tmp_path)
    assert done.returncode == 1
    assert "momentum_buffer of model.0.weight on rank 1 not rank 0's" in done.stderr


HOST_SCRIPT = """
import sys, torch, rankless
from torch import nn

torch.manual_seed(0)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

@rankless.job(model=model, optimizer=optimizer)
def train(x):
    return model(x).square().mean()

for step in range(40):
    odd = rankless.rank() >= rankless.world_size() // 2
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 3, generator=generator)
    if step == 20:
        exec(sys.argv[1])
    train(x)
    print("made step", step, flush=True)
print("done")
"""
HOST_FAULTS = {
    "learning rate on one host": (
        "if odd: optimizer.param_groups[0]['lr'] = 0.05",
        "lr of param group 0 is 0.1 on ranks 0, 1, 0.05 on ranks 2, 3",
    ),
    "inputs on one host": ("x = x + 1 if odd else x", "x on ranks 2, 3: other values than on ranks 0, 1"),
    "last step": (
        "train(x); optimizer.param_groups[0]['lr'] = 0.2 if odd else 0.1; train(x); sys.exit()",
        "lr of param group 0 is 0.1 on ranks 0, 1, 0.2 on ranks 2, 3",
    ),
}


@pytest.fixture(scope="module")
def hosts_without_common_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    memory = dict.fromkeys(("a", "b"), "mount -t tmpfs tmpfs /dev/shm")
    with two_hosts(tmp_path_factory.mktemp("two"), before=memory) as found:
        yield found


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", list(HOST_FAULTS))
def test_hosts_without_common_memory_are_compared(name: str, hosts_without_common_memory: Hosts, tmp_path):
    hosts = hosts_without_common_memory
    fault, sign = HOST_FAULTS[name]
    (tmp_path / "train.py").write_text(HOST_SCRIPT)
    words = ["run", "--hosts", ",".join(f"{address}:2" for address in hosts.addresses), "train.py", fault]
    done = hosts.run("a", [sys.executable, "-m", "rankless", *words], cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "cannot check" not in done.stderr
    assert sign in done.stderr
    made = [line for path in tmp_path.glob("log/latest/rank*.log") for line in path.read_text().splitlines()]
    assert "made step 19" in made
    assert "made step 22" not in made  # the next step compares at the latest


@pytest.mark.exhaustive
def test_hosts_that_are_equal_train_to_the_end(hosts_without_common_memory: Hosts, tmp_path):
    hosts = hosts_without_common_memory
    (tmp_path / "train.py").write_text(HOST_SCRIPT)
    words = ["run", "--hosts", ",".join(f"{address}:2" for address in hosts.addresses), "train.py", "pass"]
    done = hosts.run("a", [sys.executable, "-m", "rankless", *words], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "done" in done.stdout
    assert "cannot check" not in done.stderr
