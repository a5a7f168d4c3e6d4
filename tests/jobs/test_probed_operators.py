"""A job with an operator of the script: workers split it after an experiment, and train as the plain script does."""

import re
from pathlib import Path

import pytest
import torch
from support.warm_process import WarmProcess
from support.warm_runs import rankless, run_script

pytestmark = pytest.mark.slow

OPERATORS = """
import torch, torch.nn.functional as F
from torch import Tensor, nn

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
torch.manual_seed(0)


@torch.library.custom_op("mine::bend", mutates_args=())
def bend(x: Tensor) -> Tensor:
    return x.sin() * x

@torch.library.custom_op("mine::bend_backward", mutates_args=())
def bend_backward(x: Tensor, grad: Tensor) -> Tensor:
    return (x.cos() * x + x.sin()) * grad

@torch.library.custom_op("mine::centre", mutates_args=())
def centre(x: Tensor) -> Tensor:
    return x - x.mean(0)

bend.register_fake(torch.empty_like)
bend_backward.register_fake(lambda x, grad: torch.empty_like(x))
bend.register_autograd(
    lambda ctx, grad: bend_backward(ctx.saved_tensors[0], grad),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)
centre.register_fake(torch.empty_like)
centre.register_autograd(lambda ctx, grad: centre(grad), setup_context=lambda ctx, inputs, output: None)

model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
batches = [torch.randn(10, 4) for _ in range(4)]

def compute_loss(x):
    return centre(model[1](bend(model[0](x)))).square().mean()
"""
PLAIN = (
    OPERATORS
    + """
for batch in batches:
    optimizer.zero_grad()
    compute_loss(batch).backward()
    optimizer.step()
print(*[float(item.sum()) for item in model.parameters()])
"""
)
SCRIPT = (
    OPERATORS
    + """
import rankless

train = rankless.job(model=model, optimizer=optimizer)(compute_loss)
for batch in batches:
    train(batch)
print(*[float(item.sum()) for item in model.parameters()])
"""
)


def numbers(text: str) -> torch.Tensor:
    return torch.tensor([float(word) for word in re.findall(r"-?\d\.?\d*(?:e-?\d+)?", text.splitlines()[-1])])


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("workers", [2, 3])
def test_workers_train_as_the_plain_script_and_say_what_was_split(workers: int, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PLAIN)
    plain = WarmProcess(tmp_path / "plain.py").wait()
    assert plain.returncode == 0, plain.stderr
    job = run_script(SCRIPT, "-n", str(workers), folder=tmp_path)
    assert job.returncode == 0, job.stderr
    torch.testing.assert_close(numbers(job.stdout), numbers(plain.stdout), rtol=1e-10, atol=1e-12)
    assert job.stderr.count("splits mine.bend.default, for which Rankless has no rule") == 1


@pytest.mark.exhaustive
def test_a_plan_names_what_was_split_and_what_was_not(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    plan = rankless("plan", "-n", "2", "--devices", "cpu", "script.py", folder=tmp_path)
    assert plan.returncode == 0, plan.stdout + plan.stderr
    words = " ".join(plan.stdout.split())
    assert "without a sharding rule, split as sample data showed: 2: mine.bend.default (script.py:" in words
    assert re.search(r"rule, computed in full: \d: mine.centre.default \(script.py:", words), words
