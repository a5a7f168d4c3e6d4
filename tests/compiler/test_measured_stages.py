"""Stages that are balanced by measured times: all workers have the same, and the training is that of one device."""

import pytest
import torch
import torch.nn.functional as F
from simulated_pipelines import capture_job
from support.grid_jobs import check_equal, make_grid_job
from support.processes import on_mesh
from torch import nn

from rankless.compiler.ir.logical_program import LogicalValue
from rankless.compiler.pipeline_parallel import stages as stage_cuts
from rankless.compiler.pipeline_parallel.stages import find_stages, list_forward, make_value, measure_call, measure_work
from rankless.parallel.mesh import Mesh
from rankless.parallel.user_plan import Plan

WIDTH = 64


class Block(nn.Module):
    """A layer, and a function that reads and writes as much whether it is slow or fast."""

    def __init__(self, function) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x):
        return self.function(self.layer(x)).clamp(-1, 1)


def compute_slowly(x):
    """Compute a function of each number that takes a thousand times as long as its absolute value."""
    return torch.polygamma(2, x.abs() + 1)


def make_blocks(*functions) -> nn.Sequential:
    return nn.Sequential(*(Block(function) for function in functions), nn.Linear(WIDTH, 4))


def capture_blocks(model: nn.Module, rows: int = 512):
    arguments = [torch.randn(rows, WIDTH), torch.randint(0, 4, (rows,))]
    return capture_job(lambda x, y: F.cross_entropy(model(x), y), {"model": model}, arguments, trains=True)


def find_borders(program, count=2, **options):
    names = {item.name: item.name for item in program.inputs.values() if item.kind == "parameter"}
    return find_stages(program, count, names, **options).borders


@pytest.fixture
def one_thread():
    """Measure with one thread: several wait for each other where tests run beside this one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_a_slow_function_counts_by_its_time():
    model = make_blocks(compute_slowly, torch.abs, torch.abs, torch.abs)
    program = capture_blocks(model)
    assert find_borders(program) == ("model.2",)
    work = measure_work(program)
    assert find_borders(program, work=work) == ("model.1",)
    by_block = {}
    for node, seconds in zip(list_forward(program), work, strict=True):
        if node.meta["module"] is not None:
            name = ".".join(node.meta["module"].path.split(".")[:2])
            by_block[name] = by_block.get(name, 0.0) + seconds
    assert by_block["model.0"] > 3 * by_block["model.2"]


def test_operators_with_equal_arguments_are_measured_once(monkeypatch):
    calls = []
    monkeypatch.setattr(stage_cuts, "measure_call", lambda operator, *_: calls.append(operator) or 1.0)
    program = capture_blocks(make_blocks(*[torch.abs] * 6))
    measure_work(program)
    assert calls.count(torch.ops.aten.abs.default) == 1
    assert len(calls) < 30


def test_what_cannot_be_measured_is_estimated(monkeypatch):
    monkeypatch.setattr(stage_cuts, "measure_call", lambda *_: None)
    program = capture_blocks(make_blocks(*[torch.abs] * 4))
    assert find_borders(program, work=measure_work(program)) == find_borders(program)


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(3, 4).t(),
        torch.randn(1, 4).expand(3, 4),
        torch.randint(0, 2, (5,)),
        torch.ones(2, 2, dtype=torch.bool),
        torch.empty(0, 3),
        torch.tensor(1.0, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.complex64),
    ],
    ids=["transposed", "expanded", "integers", "booleans", "empty", "scalar", "complex"],
)
def test_made_up_values_have_shape_layout_and_dtype(value):
    made = make_value(LogicalValue(tuple(value.shape), value.stride(), value.dtype, value.device))
    assert (made.shape, made.dtype) == (value.shape, value.dtype)
    assert made.stride() == value.stride() or not value.numel()


def test_a_kernel_that_refuses_made_up_values_is_not_measured():
    value = LogicalValue((3,), (1,), torch.float32, torch.device("cpu"))
    assert measure_call(torch.ops.aten.mm.default, (value, value), {}) is None
    assert measure_call(torch.ops.aten.abs.default, (value,), {}) > 0


def train(mesh, sizes):
    torch.manual_seed(0)
    model = make_blocks(torch.abs, torch.tanh, torch.sin, torch.abs).double()
    x, y = torch.randn(32, WIDTH, dtype=torch.float64), torch.randint(0, 4, (32,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plan = Plan(stages="measured")
    job, world = make_grid_job(lambda x, y: F.cross_entropy(model(x), y), model, optimizer, mesh, sizes, plan)
    found = [job(x, y).detach() for _ in range(3)]
    return [*found, *(item.detach().clone() for item in model.parameters())], [
        world.pipeline.stages.get(item) for item in model.parameters()
    ]


@pytest.mark.parametrize("sizes", [{"pipeline": 3}, {"pipeline": 2, "data": 2}], ids=str)
def test_all_workers_have_the_stages_that_rank_0_has_measured(sizes):
    wanted, _ = train(Mesh.solo(), {})
    size = 3 if len(sizes) == 1 else 4
    outcomes = on_mesh(size, train, sizes)
    for found, stages in outcomes:
        assert stages == outcomes[0][1]
        assert set(stages) == set(range(sizes["pipeline"]))
        check_equal(found, wanted)
