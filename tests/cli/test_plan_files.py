"""`rankless plan --save` and `--plan`, with real runs of small scripts."""

import json
from pathlib import Path

import pytest
from support.warm_runs import rankless

SCRIPT = """
import torch, torch.nn.functional as F
import rankless

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

@rankless.job(model=model, optimizer=optimizer)
def train(images, labels):
    return F.cross_entropy(model(images), labels)

data = torch.utils.data.TensorDataset(torch.randn(40, 8), torch.randint(0, 4, (40,)))
for images, labels in rankless.loader(data, batch_size=10, shuffle=True):
    loss = train(images, labels)
shown = [parameter.grad is not None for parameter in model.parameters()]
print(f"loss {float(loss):.12f}, gradients shown: {all(shown)}")
"""


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """Return the file of the script's plan for two workers."""
    (tmp_path / "train.py").write_text(SCRIPT)
    saved = rankless("plan", "-n", "2", "--seed", "1", "--save", "plan.json", "train.py", folder=tmp_path)
    assert saved.returncode == 0, saved.stderr
    return tmp_path / "plan.json"


def divide(
    plan: Path,
    *kinds: str,
    lengths: tuple[int, ...] = (4, 2),
    axis: str = "data",
    dim: int = 0,
    times: int = 1,
    blocks: int = 1,
) -> None:
    """Change the plan: these kinds of state of the first layer's weight are divided."""
    content = json.loads(plan.read_text())
    state = content["jobs"]["train"]["states"]["model.0.weight"]
    for kind in kinds:
        state[kind] = [{"axis": axis, "dim": dim, "lengths": list(lengths), "blocks": blocks}] * times
    plan.write_text(json.dumps(content))


def run(plan: Path, *options: str) -> str:
    found = rankless("run", "-n", "2", "--seed", "1", "-q", *options, "train.py", folder=plan.parent)
    lines = found.stderr.splitlines(keepends=True)
    return found.stdout + "".join(line for line in lines if "have no .grad after a call" not in line)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_saved_plan_runs_and_says_how_everything_is_held(plan: Path) -> None:
    content = json.loads(plan.read_text())
    assert content["axes"] == [{"name": "data", "role": "data", "size": 2}]
    train = content["jobs"]["train"]
    assert train["arguments"] == {"images": 0, "labels": 0}
    assert train["states"]["model.0.weight"] == {
        "shape": [6, 8],
        "dtype": "float64",
        "value": [],
        "gradient": [],
        "optimizer_state": [],
        "offloaded": False,
    }
    assert run(plan, "--plan", "plan.json") == run(plan)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_plan_that_divides_more_gives_the_same_training(plan: Path) -> None:
    plain = run(plan)
    assert "gradients shown: True" in plain
    divide(plan, "optimizer_state")
    assert run(plan, "--plan", "plan.json") == plain
    divide(plan, "optimizer_state", "gradient", lengths=(6, 0))
    assert run(plan, "--plan", "plan.json") == plain.replace("True", "False")
    divide(plan, "optimizer_state", "gradient", "value")
    assert run(plan, "--plan", "plan.json") == plain.replace("True", "False")
    verified = rankless("verify", "-n", "2", "--plan", "plan.json", "train.py", folder=plan.parent)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "same training" in verified.stdout
    shown = rankless("plan", "-n", "2", "--plan", "plan.json", "train.py", folder=plan.parent)
    assert "1 parameter, 384 B: in pieces, read whole in shared memory" in shown.stdout
    arguments = ("plan", "-n", "2", "--plan", "plan.json", "train.py")
    shown = rankless(*arguments, folder=plan.parent, RANKLESS_BACKEND="gloo")
    assert "1 parameter, 384 B: in pieces, whole while in use" in shown.stdout


@pytest.mark.slow
def test_a_plan_for_another_run_is_refused_before_any_process_starts(plan: Path) -> None:
    runs_before = list(plan.parent.glob("log/*"))
    workers = rankless("run", "-n", "3", "--plan", "plan.json", "train.py", folder=plan.parent)
    assert workers.returncode == 2
    assert "expected: 2 workers, for which the plan plan.json was made" in workers.stderr
    (plan.parent / "train.py").write_text(SCRIPT.replace("8, 6", "8, 7").replace("6, 4", "7, 4"))
    other = rankless("run", "-n", "2", "--plan", "plan.json", "train.py", folder=plan.parent)
    assert other.returncode == 2
    assert "found:    another one: changed since" in other.stderr
    for text, found in (
        ("{", "Input data was truncated"),
        ('{"format": 2, "rankless": "0"}', "missing required field"),
        ('{"format": 1, "rankless": "0.9"}', "format 1, of Rankless 0.9"),
    ):
        plan.write_text(text)
        damaged = rankless("run", "-n", "2", "--plan", "plan.json", "train.py", folder=plan.parent)
        assert damaged.returncode == 2
        assert found in damaged.stderr
    missing = rankless("verify", "-n", "2", "--plan", "no.json", "train.py", folder=plan.parent)
    assert missing.returncode == 2
    assert "No such file" in missing.stderr
    assert list(plan.parent.glob("log/*")) == runs_before


@pytest.mark.ci_sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"kinds": ["value"]}, "a value or gradient that is divided otherwise than its optimizer state"),
        ({"kinds": ["optimizer_state", "value"]}, "a value or gradient that is divided otherwise"),
        ({"kinds": ["optimizer_state"], "times": 2}, "found:    divisions along data, data"),
        ({"kinds": ["optimizer_state"], "lengths": (3, 2)}, "the lengths [3, 2] for 6 rows"),
        ({"kinds": ["optimizer_state"], "lengths": (6,)}, "the lengths [6] for 2 workers"),
        ({"kinds": ["optimizer_state"], "lengths": (7, -1)}, "the lengths [7, -1] for 2 workers"),
        ({"kinds": ["optimizer_state"], "lengths": (3, 3), "blocks": 2}, "2 blocks along the axis data"),
        ({"kinds": ["optimizer_state"], "dim": 2}, "dim 2 of the shape [6, 8]"),
        ({"kinds": ["optimizer_state"], "axis": "tensor"}, "the axis 'tensor', which is none of data"),
    ],
)
def test_a_division_that_makes_no_sense_is_refused_before_any_process_starts(
    plan: Path, changes: dict[str, object], found: str
) -> None:
    kinds = changes.pop("kinds")
    divide(plan, *kinds, **changes)
    refused = rankless("run", "-n", "2", "--plan", "plan.json", "train.py", folder=plan.parent)
    assert refused.returncode == 2
    assert found in refused.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_plan_may_compute_values_again_and_must_say_a_fraction(plan: Path) -> None:
    plain = run(plan)
    content = json.loads(plan.read_text())
    assert content["jobs"]["train"]["recompute"] == 0
    content["jobs"]["train"]["recompute"] = 1
    plan.write_text(json.dumps(content))
    assert run(plan, "--plan", "plan.json") == plain
    shown = rankless("plan", "-n", "2", "--seed", "1", "--plan", "plan.json", "train.py", folder=plan.parent)
    assert "computed again for gradients, to save memory: " in shown.stdout
    content["jobs"]["train"]["recompute"] = 1.5
    plan.write_text(json.dumps(content))
    refused = rankless("run", "-n", "2", "--plan", "plan.json", "train.py", folder=plan.parent)
    assert refused.returncode == 2
    assert "Expected `float` <= 1.0" in refused.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_plan_for_another_model_is_refused_before_the_first_step(plan: Path) -> None:
    content = json.loads(plan.read_text())
    states = content["jobs"]["train"]["states"]
    states["model.0.weight"]["shape"] = [5, 8]
    plan.write_text(json.dumps(content))
    assert "expected: model.0.weight as float64 [5, 8]" in run(plan, "--plan", "plan.json")
    states["model.9.weight"] = states.pop("model.0.weight")
    plan.write_text(json.dumps(content))
    assert "no such parameter or buffer" in run(plan, "--plan", "plan.json")
    del states["model.9.weight"]
    plan.write_text(json.dumps(content))
    assert "model.0.weight, which the plan does not have" in run(plan, "--plan", "plan.json")
    content["jobs"] = {}
    plan.write_text(json.dumps(content))
    assert "job 'train'" in run(plan, "--plan", "plan.json")
