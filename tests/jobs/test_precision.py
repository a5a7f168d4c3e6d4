import pytest
import torch
import torch.nn.functional as F
from support.processes import on_mesh
from torch import nn

from rankless.context.world import RunSettings, World
from rankless.data.logical_tensor import GatherMonitor, LogicalTensor
from rankless.jobs.dtype_override import cast, cast_job
from rankless.jobs.job import make_job
from rankless.parallel.mesh import Mesh
from rankless.parallel.tensor_placement import Shard, split_lengths

ROWS, STEPS = 11, 4


class Model(nn.Module):
    """Tied weights, a statistic, an integer buffer and a half-precision part."""

    def __init__(self):
        super().__init__()
        self.characters = nn.Embedding(7, 6)
        self.norm = nn.BatchNorm1d(6)
        self.narrow = nn.Linear(6, 6).to(torch.bfloat16)
        self.output = nn.Linear(6, 7, bias=False)
        self.output.weight = self.characters.weight

    def forward(self, text, shift):
        hidden = self.norm(self.characters(text) + shift).tanh()
        return self.output(self.narrow(hidden.to(self.narrow.weight.dtype)).to(hidden.dtype))


def batches():
    generator = torch.Generator(torch.get_default_device()).manual_seed(1)
    for _ in range(STEPS):
        text = torch.randint(0, 7, (ROWS,), generator=generator)
        yield text, torch.randn(ROWS, 6, generator=generator)


def make_script():
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def train_as_job(mesh):
    """Return losses, parameters and dtypes of a float32 script that runs in float64, with logical batches."""
    model, optimizer, scheduler = make_script()
    world = World(mesh=mesh, notify=print, send_record=print, settings=RunSettings(dtype=torch.float64))

    def train(text, shift):
        return F.cross_entropy(model(text, shift), text)

    job = make_job(train, model=model, optimizer=optimizer, view="consistent", world=lambda: world)
    losses = []
    for text, shift in batches():
        if mesh.size > 1:
            placement = Shard(0, split_lengths(ROWS, mesh.size))
            local = shift.narrow(0, placement.start(mesh.rank), placement.lengths[mesh.rank])
            shift = LogicalTensor(local, placement=placement, mesh=mesh, monitor=GatherMonitor(print))
        losses.append(job(text, shift))
        scheduler.step()
    return torch.stack(losses), {name: item.detach() for name, item in model.state_dict().items()}


def train_plainly():
    model, _, _ = make_script()
    model.to(torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    losses = []
    for text, shift in batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(text, shift.double()), text)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.detach())
    return torch.stack(losses), model.state_dict()


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_job_in_float64_equals_the_script_in_float64(workers):
    expected_losses, expected = train_plainly()
    losses, state = train_as_job(Mesh.solo()) if workers == 1 else on_mesh(workers, train_as_job)[1]
    assert losses.dtype == torch.float64
    torch.testing.assert_close(losses, expected_losses, rtol=1e-13, atol=1e-13)
    assert {name: item.dtype for name, item in state.items()} == {name: item.dtype for name, item in expected.items()}
    for name, item in expected.items():
        torch.testing.assert_close(state[name], item, rtol=1e-11, atol=1e-13)


def test_cast_parameters_keep_identity_and_optimizer_states_follow():
    model, optimizer, _ = make_script()
    text, shift = next(batches())
    F.cross_entropy(model(text, shift), text).backward()
    optimizer.step()
    parameters = list(model.parameters())
    world = World(mesh=Mesh.solo(), notify=print, send_record=print)
    job = make_job(model.forward, model=model, optimizer=optimizer, view="consistent", world=lambda: world)
    cast_job(job.definition, torch.float64)
    assert all(after is before for after, before in zip(model.parameters(), parameters, strict=True))
    assert model.output.weight is model.characters.weight
    assert {item.dtype for item in model.parameters()} == {torch.float64}
    assert model.norm.num_batches_tracked.dtype == torch.int64
    kept = {value.dtype for state in optimizer.state.values() for key, value in state.items() if key != "step"}
    assert kept == {torch.float64}


def test_only_floating_point_and_complex_tensors_are_cast():
    assert cast(torch.ones(1, dtype=torch.bfloat16), torch.float64).dtype == torch.float64
    imaginary = cast(torch.tensor([1j], dtype=torch.complex64), torch.float64)
    assert imaginary.dtype == torch.complex128
    assert imaginary.imag.item() == 1
    for dtype in (torch.int64, torch.uint8, torch.bool):
        assert cast(torch.ones(1, dtype=dtype), torch.float64).dtype == dtype
