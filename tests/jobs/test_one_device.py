"""What a job on one device refuses or warns of, because several workers would refuse it."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rankless.context.world import World
from rankless.errors import CaptureError
from rankless.jobs.job import make_job
from rankless.parallel.mesh import Mesh
from rankless.user_code import display_name

MARK = "# the line"


def notices_of(act, *, calls=2):
    """Return the notices of a job on one device that acts on its model, and the model."""
    notices = []
    world = World(mesh=Mesh.solo(), notify=notices.append, send_record=lambda _: None)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))

    def train(features):
        value = F.mse_loss(model(features), torch.zeros(5, 4))
        act(model)
        return value

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = make_job(train, model=model, optimizer=optimizer, view=None, world=lambda: world)
    for _ in range(calls):
        job(torch.ones(5, 6))
    return notices


def line_of(function):
    lines, first = inspect.getsourcelines(function)
    (offset,) = (number for number, text in enumerate(lines) if MARK in text)
    return f"{display_name(__file__)}:{first + offset}"


def sets_other_data(model):
    model[0].weight.data = model[0].weight.data.clamp(-0.1, 0.1).t().contiguous().t()  # the line


def sets_data_of_a_buffer_to_a_number(model):
    model[1].running_mean.data = torch.zeros(())  # the line
    model[1].running_mean = torch.zeros(4)


def sets_data_of_a_result(model):
    model(torch.ones(5, 6)).data = torch.zeros(5, 4)  # the line


@pytest.mark.parametrize(
    ("act", "found"),
    [
        (sets_other_data, ".data of parameter 'model.0.weight' set inside the job"),
        (sets_data_of_a_buffer_to_a_number, ".data of buffer 'model.1.running_mean' set inside the job"),
        (sets_data_of_a_result, ".data of a tensor set inside the job"),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_a_change_that_several_workers_refuse_is_warned_of_once_with_its_line(act, found):
    (notice,) = notices_of(act)
    assert notice.startswith(f"{line_of(act)}: job 'train': {found}; several workers cannot run this as one program")


def test_changes_that_several_workers_make_too_are_not_warned_of():
    def averages(model):
        model[1].running_mean.data.mul_(0.9)
        model[1].running_var.data = model[1].running_var * 0.9
        model[0].weight.data.clamp_(-0.1, 0.1)
        model[0].bias.data *= 0.5
        with torch.no_grad():
            model[0].bias.zero_()
        model.to("cpu").float()
        assert torch.all(model[0].weight.data.abs() < 10)

    assert notices_of(averages) == []
    assert "data" not in vars(torch.Tensor)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize(
    ("where", "name"), [("closure", "graph"), ("buffer", "model.graph")], ids=["closure", "buffer"]
)
def test_a_matrix_in_a_compressed_layout_is_warned_of_once(where: str, name: str):
    notices: list[str] = []
    world = World(mesh=Mesh.solo(), notify=notices.append, send_record=lambda _: None)
    model, graph = nn.Linear(6, 4), torch.eye(5).to_sparse_csr()
    if where == "buffer":
        model.register_buffer("graph", graph)

    def from_closure(features):
        return (graph @ model(features)).square().mean()

    def from_buffer(features):
        return (model.graph @ model(features)).square().mean()

    train = from_closure if where == "closure" else from_buffer
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = make_job(train, model=model, optimizer=optimizer, view=None, world=lambda: world)
    for _ in range(2):
        job(torch.ones(5, 6))
    (notice,) = notices
    assert (
        f"job 'from_{where}': {name} has the layout torch.sparse_csr; several workers cannot run this as one program"
        in notice
    )


def test_a_compiled_model_in_a_job_works_on_one_device():
    world = World(mesh=Mesh.solo(), notify=pytest.fail, send_record=lambda _: None)
    model = nn.Linear(6, 4)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    job = make_job(
        lambda features: compiled(features.data).square().mean(),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        view=None,
        world=lambda: world,
    )
    losses = [job(torch.ones(5, 6)).item() for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]


def test_training_calls_are_refused():
    with pytest.raises(CaptureError, match=r"backward\(\) inside the job"):
        notices_of(lambda model: model[0].weight.sum().backward())
