"""`rankless plan` for ordinary loops, with real runs on two workers."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.json_schema import check_result
from support.warm_runs import rankless

from rankless.logical_view.call_observers import find_origin, name_function
from rankless.records.job_programs import CountedCall, CountedMove, ProgramInputRecord, RecordedStep
from rankless.records.number_formatting import format_decimal_bytes
from rankless.terminal.plan_table import make_plan_report, render_plan

SCRIPTS = Path(__file__).parents[1] / "logical" / "scripts"
HEAD = """
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,))), batch_size=16)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""
PARAMETER_BYTES = 4 * (8 * 16 + 16 + 16 * 3 + 3)


def plan(script: str | Path, folder: Path, *options: str) -> tuple[dict[str, Any], str]:
    """Return the only step that `rankless plan` reports of a script on two workers, and the table as one line."""
    if isinstance(script, str):
        (folder / "train.py").write_text(HEAD + script)
        script = folder / "train.py"
    options = ("-n", "2", "--devices", "cpu", "--seed", "3", "--json", "plan.json", *options)
    done = rankless("plan", *options, str(script), folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert max(map(len, done.stdout.splitlines()[1:])) <= 100
    report = check_result((folder / "plan.json").read_text(), "plan")
    assert (report["jobs"], report["workers"]) == ([], 2)
    (step,) = report["recorded_steps"]
    return step, " ".join(done.stdout.split())


def select(step: dict[str, Any], list_name: str, **wanted: Any) -> list[dict[str, Any]]:
    """Return the calls, moves or inputs of a step that have some fields."""
    return [item for item in step["recorded"][list_name] if all(item[name] == value for name, value in wanted.items())]


def add_bytes(items: list[dict[str, Any]]) -> int:
    return sum(item["bytes"] * item.get("count", 1) for item in items)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_residual_network_moves_gradients_and_statistics(tmp_path: Path) -> None:
    step, shown = plan(SCRIPTS / "resnet_amp.py", tmp_path)
    assert (step["recorded"]["job"], step["recorded"]["step"]) == ("script", 1)
    assert step["whole_calls"] == 0 < step["divided_calls"]
    parameters = select(step, "inputs", kind="parameter")
    gradients = select(step, "moves", purpose="gradient")
    assert add_bytes(gradients) == add_bytes(parameters) > 20_000
    moved = {name for move in gradients for name in move["value"].split(", ")}
    assert moved == {item["name"] for item in parameters}
    norms = {item["module"] for item in select(step, "calls", module_type="BatchNorm2d")}
    statistics = select(step, "moves", reason="statistics of the whole batch")
    assert {move["module"] for move in statistics} == norms
    assert len(norms) == 6
    # Each worker sends its mean and its sum of squares of each channel.
    means = {item["name"].removesuffix(".running_mean"): item for item in select(step, "inputs", kind="buffer")}
    for move in statistics:
        assert (move["kind"], move["bytes"]) == ("all_gather", 2 * 2 * means[move["module"]]["bytes"])
    (images, labels) = select(step, "inputs", kind="batch tensor")
    reading = "dim 0 split 32+32, of a DataLoader of Digits; each worker reads whole batches"
    assert {images["placement"], labels["placement"]} == {reading}  # the data set draws random numbers
    assert step["gathered_bytes"] == 0
    assert "calls that divide their rows: 24 of 24 (100%)" in shown
    assert "gathered on every worker: none" in shown


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_transformer_computes_its_positions_whole(tmp_path: Path) -> None:
    step, shown = plan(SCRIPTS / "char_gpt.py", tmp_path)
    (positions,) = select(step, "calls", kind="plain")
    assert (positions["module"], positions["module_type"], positions["count"]) == ("model.wpe", "Embedding", 1)
    assert (step["whole_calls"], step["divided_calls"]) == (1, 59)
    assert (
        "char_gpt.py:79: torch.nn.functional.embedding in model.wpe (Embedding): its tensors are not divided" in shown
    )
    parameters = select(step, "inputs", kind="parameter")
    assert add_bytes(select(step, "moves", purpose="gradient")) == add_bytes(parameters)
    assert {item["placement"] for item in select(step, "inputs", kind="batch tensor")} == {
        "dim 0 split 16+16, of a DataLoader of CharDataset; each worker reads its own rows"
    }


@pytest.mark.slow
def test_without_a_loader_everything_is_whole_and_shard_batch_is_named(tmp_path: Path) -> None:
    step, shown = plan(SCRIPTS / "char_gpt_batches.py", tmp_path)
    assert step["divided_calls"] == 0 < step["whole_calls"]
    assert "nothing is divided: every worker computes whole batches" in shown
    assert "x = rankless.shard_batch(x)" in shown
    assert {item["kind"] for item in step["recorded"]["calls"]} == {"plain"}


WATCHED = """
import json
from rankless.torch_versions import find_function
distributed, seen = torch.distributed, []
def watch(name, place, kind):
    run = getattr(distributed, name)
    def watched(*arguments, **options):
        size = arguments[place].numel() * arguments[place].element_size()
        seen.append((kind, size * 2 if kind == "all_gather" else size))
        return run(*arguments, **options)
    setattr(distributed, name, watched)
watch("all_reduce", 0, "all_reduce")
watch(find_function(distributed, "all_gather_single").__name__, 1, "all_gather")
watch(find_function(distributed, "reduce_scatter_single").__name__, 1, "reduce_scatter")

class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x
    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient * ctx.saved_tensors[0]

norm, table = nn.BatchNorm1d(16), nn.Embedding(3, 5, sparse=True)
optimizer = torch.optim.SGD([*model.parameters(), *norm.parameters(), *table.parameters()], 0.1)
try:
    for x, y in loader:
        begun = len(seen)
        h = norm(model[0](x))
        squares = Square.apply(h)
        lowest = h.sort(dim=0)[0][:4].mean()
        chosen = h[h > 1].sum()
        loss = F.cross_entropy(model[2](h), y) + squares.mean() + lowest + chosen + torch.pdist(h).mean()
        loss = loss + table(y).pow(2).mean() + torch.vmap(torch.sin)(h.exp()).mean() + h.max().item()
        loss.backward()
        optimizer.step()
finally:
    made = seen[begun:]
    with open("seen.json", "w") as file:
        json.dump(made, file)
"""


@pytest.mark.slow
def test_the_transfers_are_those_that_run(tmp_path: Path) -> None:
    step, shown = plan(WATCHED, tmp_path, "--logical")
    seen = [(kind, size) for kind, size in json.loads((tmp_path / "seen.json").read_text())]
    listed = [(move["kind"], move["bytes"]) for move in step["recorded"]["moves"] for _ in range(move["count"])]
    # Workers exchange the number of entries of a sparse gradient first. A maximum is a value of 4 bytes.
    assert Counter(seen) - Counter(listed) == Counter({("all_gather", 2 * 8): 1, ("all_gather", 2 * 4): 1})
    assert Counter(listed) - Counter(seen) == Counter({("all_gather", 4): 1})
    rows = 16 * 16 * 4
    whole = {item["function"]: item["reason"] for item in select(step, "calls", kind="whole")}
    assert whole == {
        "Square": "its code is the script's, in a torch.autograd.Function",
        "torch.Tensor.sort": "its rule does not fit how the rows are divided",
        "torch.Tensor.__getitem__": "the shape of its result depends on values",
        "torch.nn.functional.pdist": "no sharding rule for pdist_forward",
        "torch.sin": "its code is the script's, in a transform of torch.func, or a compiled function",
    }
    (moved,) = select(step, "moves", reason="input of Square")
    assert (moved["kind"], moved["bytes"], moved["sent_bytes"], moved["gathered"]) == (
        "all_gather",
        rows,
        rows // 2,
        True,
    )
    assert step["moved_bytes"] == sum(size for _, size in listed)
    assert "Square: its code is the script's, in a torch.autograd.Function" in shown


ADVERSARIAL = """
critic, maker = nn.Linear(8, 1), nn.Linear(4, 8)
first, second = (torch.optim.SGD(each.parameters(), 0.1) for each in (critic, maker))

def evaluate():
    with torch.no_grad():
        return sum((model(x).argmax(1) == y).sum().item() for x, y in loader)

def main():
    for epoch in range(3):
        evaluate()
        for x, y in loader:
            made = maker(torch.randn(5, 4))
            loss = F.softplus(-critic(x)).mean() + F.softplus(critic(made.detach())).mean()
            first.zero_grad()
            loss.backward()
            first.step()
            evaluate()
            loss = F.softplus(-critic(made)).mean()
            second.zero_grad()
            loss.backward()
            second.step()

main()
"""


@pytest.mark.slow
def test_the_step_of_a_second_optimizer_has_the_first_ones_and_no_evaluation(tmp_path: Path) -> None:
    step, _ = plan(ADVERSARIAL, tmp_path, "--steps", "4")
    assert step["recorded"]["step"] == 4
    assert not [item for item in step["recorded"]["calls"] if item["module"].startswith("model")]
    assert len(select(step, "inputs", kind="batch tensor")) == 2
    (made,) = select(step, "calls", module="maker")
    assert (made["kind"], made["count"]) == ("plain", 1)
    critics = Counter(item["kind"] for item in select(step, "calls", module="critic"))
    assert critics == {"divided": 1, "plain": 2}
    of_critic, of_both = select(step, "moves", purpose="gradient")
    assert of_critic["bytes"] == 4 * 9
    assert of_both["bytes"] == 4 * (9 + 4 * 8 + 8)


ACCUMULATED = """
for number, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y) / 2
    loss.backward()
    if number % 2:
        optimizer.step()
"""
LATE = """
total = sum(F.cross_entropy(model(x), y) for x, y in loader)
total.backward()
optimizer.step()
"""
SHORT = """
x = torch.randn(6, 8)
for _ in range(2):
    loss = model(rankless.shard_batch(x)).square().mean()
    loss.backward()
    optimizer.step()
"""
BY_HAND = """
for x, y in loader:
    F.cross_entropy(model(x), y).backward()
    for parameter in model.parameters():
        parameter.data -= 0.1 * parameter.grad
        parameter.grad = None
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "steps", "passes", "batches", "text"),
    [
        (ACCUMULATED, 1, 2, 2, "ordinary loop, step 1 (train.py:13)"),
        pytest.param(LATE, 1, 1, 4, "ordinary loop, step 1 (train.py:11)", marks=pytest.mark.exhaustive),
        ("import rankless\n" + SHORT, 3, 1, 1, "step 2 (train.py:14); the script ended before step 3"),
        pytest.param(BY_HAND, 1, 4, 4, "the script ended without", marks=pytest.mark.exhaustive),
    ],
    ids=["accumulated", "after the pass", "shard_batch", "no optimizer"],
)
def test_a_step_has_all_passes_since_the_one_before(tmp_path: Path, script, steps, passes, batches, text) -> None:
    step, shown = plan(script, tmp_path, "--steps", str(steps))
    assert text in shown
    assert add_bytes([item for item in step["recorded"]["moves"] if " gradients" in item["reason"]]) == (
        passes * PARAMETER_BYTES
    )
    names = Counter(item["name"] for item in select(step, "inputs", kind="batch tensor"))
    assert set(names.values()) == {batches}
    assert step["whole_calls"] == 0 < step["divided_calls"]


WITHOUT_BACKWARD = """
for number, (x, y) in enumerate(loader):
    gradients = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), gradients):
        parameter.grad = gradient
    optimizer.step()
open("passes", "w").write(str(number + 1))
"""


@pytest.mark.slow
def test_a_loop_without_backward_runs_to_its_end(tmp_path: Path) -> None:
    step, shown = plan(WITHOUT_BACKWARD, tmp_path)
    assert (tmp_path / "passes").read_text() == "4"
    assert step["recorded"]["step"] == 0
    assert add_bytes(select(step, "moves", purpose="gradient")) == 4 * PARAMETER_BYTES
    assert "the script ended without backward() and a step of an optimizer; this is all that it ran" in shown


TWO_JOBS = """
import rankless
other = nn.Linear(8, 3)
second = torch.optim.SGD(other.parameters(), 0.1)

@rankless.job(model=model, optimizer=optimizer)
def compiled(x):
    return model(x).square().mean()

@rankless.job(model=other, optimizer=second)
def eager(x):
    h = other(x)
    rankless.once(print, "once")
    return h.square().mean() + h[h > 0].sum()

for x in rankless.loader(torch.randn(32, 8), batch_size=8):
    compiled(x)
    eager(x)
"""


@pytest.mark.slow
def test_a_job_that_is_no_program_is_shown_beside_one_that_is(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HEAD + TWO_JOBS)
    done = rankless(
        *("plan", "-n", "2", "--devices", "cpu", "--steps", "3", "--json", "plan.json", "train.py"), folder=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = check_result((tmp_path / "plan.json").read_text(), "plan")
    assert [job["program"]["job"] for job in report["jobs"]] == ["compiled"]
    assert report["without_program"] == []
    (step,) = report["recorded_steps"]
    assert (step["recorded"]["job"], step["recorded"]["step"]) == ("eager", 1)
    assert {item["module"] for item in step["recorded"]["calls"]} == {"", "other"}
    assert [item["reason"] for item in select(step, "calls", kind="whole")] == [
        "the shape of its result depends on values"
    ]
    assert "job eager, which is no program, step 1" in done.stdout
    assert "train job compiled" in done.stdout


@pytest.mark.slow
def test_scripts_that_fail_and_scripts_that_train_nothing_say_so(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HEAD + "for x, y in loader:\n    raise ValueError('no')\n")
    done = rankless("plan", "-n", "2", "--devices", "cpu", "train.py", folder=tmp_path)
    assert done.returncode == 1
    assert "the run on 2 workers failed with exit code 1" in done.stdout
    (tmp_path / "train.py").write_text(HEAD + "print(sum(x.sum().item() for x, y in loader))")
    done = rankless("plan", "-n", "2", "--devices", "cpu", "train.py", folder=tmp_path)
    assert done.returncode == 2
    assert "found:    train.py, which does neither" in done.stderr


@pytest.mark.parametrize("option", ["--save", "--picture"])
def test_a_plan_file_and_a_picture_of_a_loop_are_refused_before_it_runs(tmp_path: Path, option: str) -> None:
    (tmp_path / "train.py").write_text("import torch\nopen('begun', 'w')\n")
    done = rankless("plan", "-n", "2", option, "plan.svg", "train.py", folder=tmp_path)
    assert done.returncode == 2
    assert f"expected: a script with jobs for {option}" in done.stderr
    assert "fix:      omit" in done.stderr
    assert not (tmp_path / "begun").exists()
    assert not (tmp_path / "plan.svg").exists()


def make_step(step: int) -> RecordedStep:
    where = f"/somewhere/{'long' * 12}.py:7"
    weight = ProgramInputRecord(
        kind="parameter", name="model.w", shape=(2,), dtype="float32", bytes=8, placement="whole on every worker"
    )
    batch = ProgramInputRecord(
        kind="batch tensor",
        name="batch",
        shape=(4,),
        dtype="float32",
        bytes=16,
        placement="dim 0 split 2+2, of a loader",
    )

    def move(purpose: Any, reason: str, size: int, count: int) -> CountedMove:
        return CountedMove(
            kind="all_gather" if purpose == "input" else "all_reduce",
            purpose=purpose,
            value="model.w",
            bytes=size,
            sent_bytes=size // 2,
            line=where,
            reason=reason,
            gathered=purpose == "input",
            overlapped=purpose == "gradient",
            count=count,
        )

    layers = [
        CountedCall(where, f"model.layers.{layer}", "Linear", "torch.linear", "divided", "", 2) for layer in range(5)
    ]
    return RecordedStep(
        job="script",
        step=step,
        line="/somewhere/train.py:9",
        inputs=(weight, batch, batch),
        calls=(
            *layers,
            CountedCall(where, "", "", "torch.Tensor.add", "sum", "its rule does not fit", 3),
            CountedCall(where, "", "", "torch.pdist", "whole", "no sharding rule for pdist", 4),
            CountedCall("/somewhere/train.py:8", "", "", "torch.tanh", "plain", "its tensors are not divided", 6),
        ),
        moves=(move("input", "input of torch.pdist", 1_000, 3), move("gradient", "a gradient", 8, 1)),
    )


@pytest.mark.parametrize("width", [40, 57, 80, 100, 200])
def test_the_table_of_a_step_fits_any_width_and_cuts_nothing_off(width: int) -> None:
    report = make_plan_report([make_step(2)], workers=2, steps=3)
    (step,) = report.recorded_steps
    assert (step.divided_calls, step.whole_calls) == (10, 10)
    assert (step.moved_bytes, step.sent_bytes, step.gathered_bytes) == (3_008, 1_504, 3_000)
    lines = render_plan(report, width).splitlines()
    assert max(map(len, lines)) <= width
    words = "".join("".join(lines).split())
    for text in (
        "ordinary loop, step 2 (train.py:9); the script ended before step 3",
        "1 parameter, 8 B: whole on every worker",
        "2 batch tensors, 32 B: dim 0 split 2+2, of a loader",
        "calls that divide their rows: 10 of 20 (50%), and 3 calls with sums over the rows",
        "torch.linear in model.layers.[0-4] (Linear)",
        "torch.pdist: no sharding rule for pdist",
        "train.py:8: torch.tanh: its tensors are not divided",
        "3 x all_gather 1.0 kB 500 B",
        "~ all_reduce",
        f"total: 4 moves, {format_decimal_bytes(3_008)} of values; each worker sends",
        "gathered on every worker: 3.0 kB",
    ):
        assert "".join(text.split()) in words, text
    assert "nothing is divided" not in render_plan(report, 200)


def test_a_script_that_makes_no_step_shows_all_that_it_ran() -> None:
    text = render_plan(make_plan_report([make_step(0)], workers=2, steps=1), 200)
    assert "ordinary loop: the script ended without backward() and a step of an optimizer; this is all" in text


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, row: torch.Tensor) -> torch.Tensor:
        return row * 2


def test_functions_have_names_also_if_they_cannot_be_keys() -> None:
    assert name_function(torch.nn.functional.relu) == "torch.nn.functional.relu"
    assert "Unhashable" in name_function(Unhashable())


class Plain(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return find_origin().module, x  # type: ignore[return-value]


def test_modules_are_named_as_the_script_names_their_model() -> None:
    chain = torch.nn.ModuleDict({"first": torch.nn.Sequential(Plain())})
    for call in (chain["first"], chain["first"][0]):
        module, _ = call(torch.ones(1))
        assert (module.path, module.kind) == ("chain.first.0", "Plain")
    module, _ = [torch.nn.Sequential(Plain())][0](torch.ones(1))
    assert module.path == "Sequential.0"
