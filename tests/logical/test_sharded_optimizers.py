"""With `zero=`, the logical view shards optimizer state and gradients, and trains as one device does.

The oracle is plain PyTorch on the whole batch, in float64.
"""

import gc
import time
from itertools import product
from pathlib import Path

import pytest
import torch
from logical.optimizer_loops import OPTIMIZER_LOOPS, Doubled, Lion
from logical.optimizer_state_loops import STATE_LOOPS
from logical.script_outputs import compare_files, compare_texts, compare_values
from logical.test_plain_scripts import FOLDER, IN_FLOAT64, SCRIPTS, run_plain
from logical.view_comparison import describe, divide, is_equal, make_batch
from support.processes import on_mesh
from support.warm_runs import rankless, run_script
from torch import Tensor, nn

from rankless.logical_view import function_handlers  # noqa: F401  # registers what tensors answer
from rankless.logical_view.gradients import LogicalBackward
from rankless.logical_view.tensor import LogicalView
from rankless.ownership.partitioned_tensor import PartitionedTensor, get_local
from rankless.parallel.mesh import Mesh
from rankless.plain_script.sharded_optimizers import ShardedOptimizers
from rankless.records.parallel_plan import ZeroLevel

pytestmark = pytest.mark.slow

TENSORS = (Tensor, nn.Parameter, PartitionedTensor)
LEVELS: tuple[ZeroLevel, ...] = ("optimizer", "gradients")
PARTS = 6
"""Loops that take longer than a minute together return nothing in time on a loaded machine."""
CASES = [
    pytest.param(*case, marks=() if case[:2] == ("gradients", 2) and case[2] % 2 == 0 else pytest.mark.exhaustive)
    for case in product(LEVELS, (2, 3), range(PARTS))
]


def compare(mesh: Mesh, level: ZeroLevel, part: int) -> list[str]:
    """Return the loops of a part whose results with sharded state differ from plain PyTorch's."""
    view = LogicalView(mesh, lambda _: None)
    differing = []
    torch.set_default_dtype(torch.float64)
    try:
        for name, loop in list((OPTIMIZER_LOOPS | STATE_LOOPS).items())[part::PARTS]:
            expected = describe(loop, make_batch(), "data")
            assert not isinstance(expected[0], type), (name, expected)  # no error
            with LogicalBackward(view).install(), ShardedOptimizers(view).install():
                view.zero = level
                found = describe(loop, divide(make_batch(), view), "data")
                view.zero = None
            if not is_equal(expected, found):
                pairs = zip(expected, found, strict=False)
                first = next((pair for pair in pairs if not is_equal([pair[0]], [pair[1]])), (expected, found))
                differing.append(f"{name}: {first[1]} instead of {first[0]}")
    finally:
        torch.set_default_dtype(torch.float32)
    return differing


@pytest.mark.parametrize(("level", "workers", "part"), CASES)
@pytest.mark.ci_sample(1)
def test_optimizers_on_shards_compute_what_one_device_computes(level: ZeroLevel, workers: int, part: int) -> None:
    for differing in on_mesh(workers, compare, level, part):
        assert not differing, "\n".join(differing)


def count_bytes() -> int:
    """Return the bytes of all tensors that were made since `gc.freeze`, after which objects are listed fast.

    A thread of gloo holds what the last collective has sent a moment longer than its caller, so the least of some
    counts is that of the loop.
    """
    counts = []
    for _ in range(5):
        gc.collect()
        with torch._C.DisableTorchFunctionSubclass():
            storages = [item.untyped_storage() for item in gc.get_objects() if type(item) in TENSORS]
        counts.append(sum({storage._cdata: storage.nbytes() for storage in storages}.values()))
        del storages
        time.sleep(0.05)
    return min(counts)


def measure(mesh: Mesh, level: ZeroLevel | None) -> dict[str, int]:
    """Return the bytes of all that a loop with Adam holds around its third step, and of what the rank has of it."""
    view = LogicalView(mesh, lambda _: None)
    gc.collect()
    gc.freeze()
    with LogicalBackward(view).install(), ShardedOptimizers(view).install():
        view.zero = level
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        optimizer = torch.optim.Adam(model.parameters())
        batch, found = torch.ones(6, 64), {}
        for number in range(3):
            optimizer.zero_grad()
            model(divide(batch, view)).square().mean().backward()
            if number == 1:  # which reads all gradients
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            found["before the step"] = count_bytes()
            optimizer.step()
            found["after it"] = count_bytes()
        view.zero = None
    gc.unfreeze()
    state = [value for entries in optimizer.state.values() for value in entries.values() if value.dim()]
    found["state"] = sum(get_local(value).nbytes for value in state)
    return found | {"parameters": sum(parameter.nbytes for parameter in model.parameters())}


@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_a_rank_holds_its_part_of_state_and_gradients(workers: int) -> None:
    shares: dict[ZeroLevel | None, float] = {None: 4.0, "optimizer": 2 + 2 / workers, "gradients": 1 + 3 / workers}
    for level, share in shares.items():
        for found in on_mesh(workers, measure, level):
            parameters, state = found["parameters"], found["state"]
            is_sharded = level is not None
            assert state == pytest.approx(2 * parameters / (workers if is_sharded else 1), rel=0.05)
            assert found["before the step"] == pytest.approx(share * parameters, rel=0.05)
            assert found["after it"] == pytest.approx(share * parameters, rel=0.05)


def list_whole(mesh: Mesh) -> tuple[list[bool], list[bool], list[str]]:
    """Return which gradients are whole after a backward pass, which states after a step, and the notices."""
    notices: list[str] = []
    view = LogicalView(mesh, notices.append)
    with LogicalBackward(view).install(), ShardedOptimizers(view).install():
        view.zero = "gradients"
        given = [nn.Parameter(torch.ones(shape)) for shape in ((4, 5), (5,), (1, 1), (4, 5), (4, 5), (4, 5), (4, 5))]
        given[3].register_post_accumulate_grad_hook(lambda _: None)
        optimizers = torch.optim.Adam(given[:4]), torch.optim.Muon(given[4:5]), Doubled(given[5:6]), Lion(given[6:])
        batch = divide(torch.ones(6, 5), view)
        sum((batch * parameter.sum(0)).sum() for parameter in given).backward()  # type: ignore[union-attr]
        gradients = [isinstance(parameter.grad, PartitionedTensor) for parameter in given]
        for optimizer in optimizers:
            optimizer.step()
        view.zero = None
    states = [value for optimizer in optimizers for entries in optimizer.state.values() for value in entries.values()]
    return gradients, [isinstance(value, PartitionedTensor) for value in states if value.dim()], notices


def test_what_cannot_be_sharded_stays_whole_with_a_notice() -> None:
    for gradients, states, notices in on_mesh(2, list_whole):
        assert gradients == [True, True, False, False, False, False, False]
        # Two entries of each parameter of Adam, one of Muon's, two of a subclass and one of the script's own.
        assert states == [True, True, True, True, False, False, True, True, True, False, False, False]
        names = [notice.partition("whole state of ")[2].partition(",")[0] for notice in notices]
        assert [name for name in names if name] == ["Doubled", "Lion"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "level", "workers"), product(SCRIPTS, LEVELS, (2, 3)))
def test_a_plain_script_trains_as_on_one_device(name: str, level: ZeroLevel, workers: int, tmp_path: Path) -> None:
    script, one, several = FOLDER / f"{name}.py", tmp_path / "one", tmp_path / "several"
    one.mkdir(), several.mkdir()
    expected = run_plain(script, one)
    options = ("-n", str(workers), "--logical", "--zero", level, "--devices", "cpu", "--log-dir", str(tmp_path / "log"))
    found = rankless("run", *options, str(IN_FLOAT64), str(script), folder=several)
    assert found.returncode == 0, found.stdout + found.stderr
    assert not compare_texts(expected, found.stdout)
    assert not compare_files(one, several)


RESUMED = """
import os, sys
import torch
from torch import nn

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(24, 5), torch.randn(24, 2))
model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
first, last = map(int, sys.argv[1:])
if first:
    saved = torch.load("checkpoint.pt", weights_only=True)
    for each, state in zip((model, optimizer, scheduler), saved):
        each.load_state_dict(state)
for epoch in range(first, last):
    for inputs, targets in torch.utils.data.DataLoader(data, 6):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
    scheduler.step()
    print(epoch, loss.item(), norm.item())
    torch.save([each.state_dict() for each in (model, optimizer, scheduler)], "checkpoint.pt")
"""


def test_a_script_resumes_on_another_number_of_workers(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(RESUMED)
    runs = [(("-n", "1"), 0, 2), (("-n", "2", "--zero", "gradients"), 2, 4), (("-n", "3", "--zero", "optimizer"), 4, 6)]
    found = ""
    for options, first, last in runs:
        command = (*options, "--devices", "cpu", str(IN_FLOAT64), "script.py", str(first), str(last))
        outcome = rankless("run", "--logical", "--log-dir", str(tmp_path / "log"), *command, folder=tmp_path)
        assert outcome.returncode == 0, outcome.stderr
        found += outcome.stdout
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    (tmp_path / "checkpoint.pt").unlink()
    alone = rankless("run", "--devices", "cpu", str(IN_FLOAT64), "script.py", "0", "6", folder=tmp_path)
    assert not compare_texts(alone.stdout, found)
    assert not compare_values(torch.load(tmp_path / "checkpoint.pt", weights_only=True), saved)


IN_CODE = """
import rankless
rankless.logical(zero="gradients")
import torch
from torch import nn

model, batch = nn.Linear(4, 4), rankless.shard_batch(torch.ones(6, 4))
optimizer = torch.optim.Adam(model.parameters())
third = torch.optim.SparseAdam([nn.Parameter(torch.ones(4, 4))])
for _ in range(2):
    model(batch).square().sum().backward()
    print(type(model.weight.grad).__name__, tuple(model.weight.grad.shape))
    optimizer.step(), third.step()
print(type(optimizer.state[model.weight]["exp_avg"]).__name__)
"""


def test_a_script_asks_for_it_in_code(tmp_path: Path) -> None:
    found = run_script(IN_CODE, "-n", "2", "--devices", "cpu", folder=tmp_path)
    assert found.stdout.split() == ["PartitionedTensor", "(4,", "4)"] * 2 + ["PartitionedTensor"], found.stderr
    assert "script.py:13: every worker holds the whole state of SparseAdam" in found.stderr
    other = run_script(IN_CODE, "-n", "2", "--zero", "optimizer", "--devices", "cpu", folder=tmp_path)
    assert other.returncode == 1
    assert 'found:    zero="gradients"' in other.stderr
    alone = run_script(IN_CODE, folder=tmp_path)
    assert alone.stdout.split()[0] == "Tensor", alone.stderr


@pytest.mark.exhaustive
def test_verify_checks_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(RESUMED)
    options = ("-n", "2", "--zero", "gradients", "--devices", "cpu", "--seed", "1")
    found = rankless("verify", *options, "script.py", "0", "2", folder=tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "its batches, gradients and optimizer state divided between 2 workers" in found.stderr


@pytest.mark.parametrize(
    ("options", "script", "reason"),
    [
        (("--zero", "parameters"), "import torch", "found:    parameters"),
        (("--zero", "optimizer", "--separate"), "import torch", "found:    --separate"),
        (("--zero", "optimizer"), "import torch.distributed as d; d.init_process_group()", "a script that knows ranks"),
        (("--zero", "optimizer", "--mesh", "tensor=2"), "import torch", "found:    a mesh with the axis tensor"),
    ],
)
@pytest.mark.parametrize("command", ["run", "verify"])
def test_what_cannot_be_sharded_is_refused_before_anything_starts(
    command: str, options: tuple[str, ...], script: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(f"{script}\nopen('started', 'w')")
    found = rankless(command, "-n", "2", *options, "script.py", folder=tmp_path)
    assert found.returncode == 2, found.stderr
    assert reason in found.stderr
    assert "fix:" in found.stderr
    assert not (tmp_path / "started").exists()
