"""What a script changes in divided parameters holds, whatever view the next job has."""

from pathlib import Path

import pytest
from support.warm_runs import rankless, run_script

SCRIPT = """
import torch, torch.nn.functional as F
import rankless

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

@rankless.job(model=model, optimizer=optimizer, zero="parameters")
def train(inputs, labels):
    return F.cross_entropy(model(inputs), labels)

@rankless.job(model=model, {other})
def other(inputs):
    {change}
    return model(inputs).sum()

inputs, labels = torch.randn(8, 6), torch.randint(0, 4, (8,))
train(inputs, labels)
with torch.no_grad():
    model[0].weight.mul_(0.5)
other({argument})
with torch.no_grad():
    model[2].bias.add_(1.0)
    print(*[f"{{float(value.sum()):.12f}}" for value in model.state_dict().values()])
other({argument})
print(*[f"{{float(value.sum()):.12f}}" for value in model.state_dict().values()])
"""
IN_PLACE = "with torch.no_grad(): model[0].bias.add_(0.25)"
OTHERS = {
    "captured": ("", "", "inputs"),
    "whole": ("capture=False", "", "inputs"),
    "whole, and the job changes one": ("capture=False", IN_PLACE, "inputs"),
    "mirrored": ('view="mirrored"', "", "[inputs, inputs]"),
}


@pytest.mark.ci_sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS)
def test_changes_in_place_hold_after_a_job_of_each_view(tmp_path: Path, case: str) -> None:
    other, change, argument = OTHERS[case]
    script = SCRIPT.format(other=other, change=change, argument=argument)
    plain = run_script(script, "-q", "--seed", "1", folder=tmp_path)
    divided = run_script(script, "-q", "-n", "2", "--seed", "1", folder=tmp_path)
    wanted = [float(word) for word in plain.stdout.split()]
    assert len(wanted) == 8, plain.stdout + plain.stderr
    assert [float(word) for word in divided.stdout.split()] == pytest.approx(wanted, rel=1e-11), divided.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
def test_two_jobs_of_a_divided_model_are_verified_in_float64(tmp_path: Path) -> None:
    script = SCRIPT.format(other="", change="", argument="inputs").replace(
        "torch.set_default_dtype(torch.float64)\n", ""
    )
    (tmp_path / "train.py").write_text(script)
    found = rankless("verify", "-n", "2", "--dtype", "float64", "train.py", folder=tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
