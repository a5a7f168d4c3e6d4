"""What a job accepts and refuses before it runs, and what a call returns."""

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rankless.context.world import World
from rankless.errors import CaptureError, ConfigError
from rankless.jobs.job import make_job
from rankless.parallel.mesh import Mesh


def make_world(mesh: Mesh | None = None) -> World:
    return World(mesh=mesh or Mesh.solo(), notify=print, send_record=print)


def make_test_job(function, model, *, optimizer=None, view="consistent", mesh=None):
    return make_job(function, model=model, optimizer=optimizer, view=view, world=lambda: make_world(mesh))


def test_an_unknown_view_raises_by_name():
    with pytest.raises(ConfigError, match="view='global'"):
        make_test_job(lambda x: x, nn.Linear(2, 2), view="global")


def test_an_optimizer_with_unknown_parameters_raises():
    with pytest.raises(ConfigError, match="to none of them"):
        make_test_job(lambda x: x, nn.Linear(2, 2), optimizer=torch.optim.SGD(nn.Linear(3, 3).parameters()))


@pytest.mark.parametrize(
    ("optimizer", "found"),
    [
        (torch.optim.SGD, r"the class SGD\n.*make one: SGD\(model.parameters\(\), …\)"),
        ([torch.optim.Adam], "the class Adam"),
        (nn.Linear(2, 2).parameters(), "Parameter\n.*pass the optimizer itself"),
        (0.1, "float\n.*pass the optimizer itself"),
    ],
    ids=["a class", "a list of classes", "parameters", "a rate"],
)
def test_what_is_no_optimizer_raises_with_the_fix(optimizer, found):
    with pytest.raises(ConfigError, match=f"found:    {found}"):
        make_test_job(lambda x: x, nn.Linear(2, 2), optimizer=optimizer)


@pytest.mark.parametrize("model", [[torch.zeros(2)], {"two words": nn.Linear(2, 2)}], ids=["a tensor", "a bad name"])
def test_a_model_that_is_no_module_raises(model):
    with pytest.raises(ConfigError, match="model="):
        make_test_job(lambda x: x, model)


def test_a_model_in_a_parallel_wrapper_raises_with_the_fix():
    with pytest.raises(ConfigError, match=r"DataParallel around it\n.*pass and call its \.module"):
        make_test_job(lambda x: x, nn.DataParallel(nn.Linear(2, 2)))


def test_a_model_on_another_kind_of_device_raises_with_the_fix():
    mesh = Mesh(rank=0, size=2, device=torch.device("cuda", 0))
    with pytest.raises(ConfigError, match=r"model.to\('cuda'\)"):
        make_test_job(lambda x: x, nn.Linear(2, 2), mesh=mesh)(torch.zeros(4, 2))


def test_a_train_job_steps_as_the_plain_script_and_detaches_results():
    torch.manual_seed(0)
    model, plain_model = nn.Linear(3, 2), nn.Linear(3, 2)
    plain_model.load_state_dict(model.state_dict())
    features, labels = torch.randn(5, 3), torch.randint(0, 2, (5,))

    def train(features, labels):
        scores = model(features)
        return {"loss": F.cross_entropy(scores, labels), "scores": scores, "name": "run"}

    job = make_test_job(train, model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    result = job(features, labels=labels)

    plain = torch.optim.SGD(plain_model.parameters(), lr=0.1)
    loss = F.cross_entropy(plain_model(features), labels)
    loss.backward()
    plain.step()
    assert torch.equal(result["loss"], loss.detach())
    assert result["name"] == "run"
    assert not result["loss"].requires_grad
    assert not result["scores"].requires_grad
    assert torch.equal(model.weight, plain_model.weight)
    assert torch.equal(model.weight.grad, plain_model.weight.grad)


def test_a_predict_job_computes_no_gradients_and_takes_numpy_arrays():
    model = nn.Linear(3, 2)
    scores = make_test_job(lambda features: model(features), model)(numpy.ones((4, 3), dtype=numpy.float32))
    assert scores.shape == (4, 2)
    assert not scores.requires_grad
    assert model.weight.grad is None


@pytest.mark.parametrize("mesh", [None, Mesh(rank=0, size=1, device=torch.device("cpu"))], ids=["alone", "a mesh"])
def test_a_train_job_without_a_loss_raises(mesh):
    model = nn.Linear(3, 2)
    job = make_test_job(
        lambda x: model(x).detach().mean(), model, optimizer=torch.optim.SGD(model.parameters()), mesh=mesh
    )
    with pytest.raises(CaptureError, match="to return its loss"):
        job(torch.zeros(4, 3))


def test_a_job_keeps_the_name_and_docstring_of_its_function():
    def score(x):
        """Scores."""
        return x

    job = make_test_job(score, nn.Linear(2, 2))
    assert (job.__name__, job.__doc__) == ("score", "Scores.")
