"""A job with `capture=False` runs any Python, trains as the plain script does, and stays equal on every rank."""

import itertools
import random
import re
from dataclasses import replace

import numpy
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from support.processes import on_mesh
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import rankless
from rankless.collectives.desync_detection import DesyncDetector
from rankless.context.world import World
from rankless.data.logical_tensor import GatherMonitor, LogicalTensor
from rankless.errors import CaptureError, ConfigError, RanksDiverged
from rankless.jobs.job import make_job
from rankless.jobs.job_definition import StepOptions
from rankless.parallel.mesh import Mesh
from rankless.parallel.tensor_placement import Shard, split_lengths

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
]


def boolean_mask(model, x):
    hidden = model(x)
    return hidden[hidden.abs() > 0.3].square().sum() / (1 + (hidden > 0.9).sum().item())


def packed_sequence(model, x):
    lengths = (x[:, 0].abs() * 2).long().clamp(1, 3)
    packed = pack_padded_sequence(x.unsqueeze(-1), lengths, batch_first=True, enforce_sorted=False)
    output, _ = pad_packed_sequence(model.tagger(packed)[0], batch_first=True)
    return output.square().mean()


def ctc(model, x):
    scores = model(x).reshape(-1, 1, 2).log_softmax(-1)
    return F.ctc_loss(scores, torch.ones(1, 2, dtype=torch.long), [len(scores)], [2])


def counts_as_sizes(model, x):
    repeated = torch.repeat_interleave(model(x), (x[:, 0] > 0).long() + 1, dim=0)
    return repeated.square().mean() * len(repeated.detach().unique())


def scripted(model, x):
    return model.scripted(x).square().mean()


def through_numpy(model, x):
    weights = numpy.exp(x.numpy()[:, 0])
    return (model(x).square().sum(1) * torch.from_numpy(weights)).mean()


def teacher_forcing(model, x):
    hidden = x
    for _ in range(3):
        hidden = torch.cat([model(hidden), x[:, :1]], 1) if random.random() < 0.5 else x * numpy.random.rand()
    return model(hidden).square().mean()


def dropout_and_batch_norm(model, x):
    return F.dropout(model.norm(model(x)), 0.4).square().mean()


def changed_parameters(model, x):
    with torch.no_grad():
        model.weight.clamp_(-0.4, 0.4)
        model.teacher.weight.data = 0.9 * model.teacher.weight + 0.1 * model.weight
    return (model(x) - model.teacher(x)).square().mean()


def state_in_python(model, x):
    model.calls = getattr(model, "calls", 0) + 1
    return model(x).square().mean() * model.calls


def several_results(model, x):
    loss = model(x).square().mean()
    return {"loss": loss, "value": float(loss), "worst": x[model(x)[:, 0] > 0.2], "name": "batch"}


def losses_per_sample(model, x):
    return model(x).square().sum(1)[x[:, 1] > -1]


def higher_gradients(model, x):
    points = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(points).sum(), points, create_graph=True)
    return slope.square().sum() + model(x).mean() if slope.norm() > 0.01 else model(x).mean()


def sparse_gradient(model, x):
    return model.table((x[:, 0] > 0).long()).square().mean() + model(x).square().mean()


def masked_time_steps(model, x):
    """SpecAugment's masks and layer drop, drawn by NumPy and Python as wav2vec2 draws them."""
    mask = numpy.zeros(tuple(x.shape), bool)
    for row in mask:
        row[numpy.random.choice(len(row), int(0.5 * len(row) + numpy.random.rand()), replace=False)] = True
    hidden = torch.where(torch.from_numpy(mask), model.bias[0], x)
    for _ in range(2):
        if numpy.random.uniform(0, 1) > 0.5 and random.random() > 0.3:
            hidden = hidden + model.teacher(hidden)[:, :1]
    return model(hidden).square().mean()


def matched_boxes(model, x):
    """A loss of the pairs that Hungarian matching finds, as DETR's."""
    boxes, wanted = model(x), x[: len(x) // 2, :2]
    costs = torch.cdist(boxes, wanted, p=1)
    rows, columns = linear_sum_assignment(costs.detach().numpy())
    return F.l1_loss(boxes[torch.as_tensor(rows)], wanted[torch.as_tensor(columns)], reduction="sum") / len(wanted)


LOSSES = [
    masked_time_steps,
    matched_boxes,
    boolean_mask,
    packed_sequence,
    ctc,
    counts_as_sizes,
    scripted,
    through_numpy,
    teacher_forcing,
    dropout_and_batch_norm,
    changed_parameters,
    state_in_python,
    several_results,
    losses_per_sample,
    higher_gradients,
    sparse_gradient,
]


class Model(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.teacher = nn.Linear(3, 2).requires_grad_(False)
        self.tagger = nn.LSTM(1, 2, batch_first=True)
        self.scripted = torch.jit.script(nn.Sequential(nn.Linear(3, 2), nn.Tanh()))
        self.table = nn.Embedding(2, 2, sparse=True)
        self.double()


def seed():
    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)


def make_batches(sizes=(7, 5, 8, 7)):
    generator = torch.Generator(torch.get_default_device()).manual_seed(8)
    return [torch.randn(size, 3, generator=generator, dtype=torch.float64) for size in sizes]


def make_training(mesh, loss, *, captured=False, optimized=True, **options):
    """Return the model, a job, and what the job notified."""
    seed()
    model, notices = Model(), []
    compared = replace(mesh, desync_detector=DesyncDetector(mesh, notify=notices.append))
    world = World(mesh=compared, notify=notices.append, send_record=lambda _: None)
    job = make_job(
        lambda *arguments: loss(model, *arguments),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1) if optimized else None,
        view=None if captured else "whole",
        world=lambda: world,
        step_options=StepOptions(**options),
    )
    return model, job, notices


def plain_training(loss):
    seed()
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in make_batches():
        optimizer.zero_grad()
        result = loss(model, batch)
        result = result["loss"] if isinstance(result, dict) else result
        result.mean().backward()
        optimizer.step()
        losses.append(result.detach())
    return losses, model.state_dict()


def split(batch, mesh):
    placement = Shard(0, split_lengths(len(batch), mesh.size))
    local = batch.narrow(0, placement.start(mesh.rank), placement.lengths[mesh.rank]).clone()
    return LogicalTensor(local, placement=placement, mesh=mesh, monitor=GatherMonitor(print))


def train(mesh, loss, from_loader):
    model, job, notices = make_training(mesh, loss)
    results = [job(split(batch, mesh) if from_loader else batch) for batch in make_batches()]
    losses = [result["loss"] if isinstance(result, dict) else result for result in results]
    return losses, model.state_dict(), notices


@pytest.mark.ci_sample(5)
@pytest.mark.parametrize("from_loader", [False, True], ids=["tensors", "batches of a loader"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_the_job_trains_as_the_plain_script_on_every_rank(loss, size, from_loader):
    losses, state = plain_training(loss)
    for found, found_state, notices in on_mesh(size, train, loss, from_loader):
        assert all(map(torch.equal, found, losses))
        assert found_state.keys() == state.keys()
        assert all(torch.equal(found_state[name], state[name]) for name in state)
        (notice,) = notices
        assert "with capture=False runs on the whole batch on every rank" in notice


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_one_worker_runs_it_without_a_warning(loss):
    losses, state, notices = train(Mesh.solo(), loss, False)
    plain, plain_state = plain_training(loss)
    assert all(map(torch.equal, losses, plain))
    assert all(torch.equal(state[name], plain_state[name]) for name in state)
    assert notices == []


def predict(mesh):
    model, job, _ = make_training(mesh, lambda model, x: [row for row in model(x) if row.sum() > 0], optimized=False)
    (batch, *_) = make_batches()
    return job(split(batch, mesh)), [row for row in model(batch).detach() if row.sum() > 0]


def test_a_predict_job_may_return_as_many_results_as_values_decide():
    for found, wanted in on_mesh(2, predict):
        assert 0 < len(found) == len(wanted) < 7
        assert all(map(torch.equal, found, wanted))


def train_beside_a_captured_job(mesh):
    model, job, notices = make_training(mesh, dropout_and_batch_norm)
    model.eval()
    evaluate = make_job(
        lambda x: norm(x).sum(), model=(norm := model.norm), optimizer=None, view=None, world=job._world
    )
    sums = []
    for batch in make_batches():
        job(batch)
        sums.append((evaluate(batch[:, :2]), norm(batch[:, :2]).detach().sum()))
    return sums, notices


def test_a_captured_job_sees_the_parameters_that_it_trains():
    for sums, notices in on_mesh(2, train_beside_a_captured_job):
        assert all(abs(found - wanted) < 1e-12 for found, wanted in sums)
        assert len(notices) == 1


def train_with_options(mesh):
    model, job, _ = make_training(mesh, losses_per_sample, clip_norm=0.05, check_finite=True)
    norms = [job(batch) is not None and job.gradient_norm for batch in make_batches()]
    return norms, model.state_dict()


def test_clipping_is_that_of_one_device():
    (norms, state), *_ = on_mesh(2, train_with_options)
    wanted, wanted_state = train_with_options(Mesh.solo())
    assert norms == wanted
    assert all(torch.equal(state[name], wanted_state[name]) for name in state)


def train_unlike(mesh, change):
    model, job, notices = make_training(mesh, lambda model, x: change(model, x, mesh.rank))
    results = [job(batch) for batch in make_batches()]
    return results, model.state_dict(), [notice for notice in notices if "other values" in notice]


def loss_of_the_rank(model, x, rank):
    return {"loss": model(x).square().mean() * (1 + rank), "rank": rank, "tensor": torch.tensor(rank)}


def buffer_of_the_rank(model, x, rank):
    model.norm.running_mean += rank
    return model.norm(model(x)).square().mean()


def parameter_of_the_rank(model, x, rank):
    if rank == 1:
        model.teacher.weight.data = model.teacher.weight + 1
    return (model(x) - model.teacher(x)).square().mean().detach() + model(x).sum()


@pytest.mark.parametrize("change", [loss_of_the_rank, buffer_of_the_rank, parameter_of_the_rank])
def test_if_ranks_compute_other_values_all_take_those_of_rank_0_and_are_warned_once(change):
    first, *others = on_mesh(3, train_unlike, change)
    assert all(len(notices) == 1 and "on rank 1" in notices[0] for _, _, notices in [first, *others])
    alone = train_unlike(Mesh.solo(), change)
    for results, state, _ in [first, *others]:
        assert str(results) == str(first[0]) == str(alone[0])
        assert all(torch.equal(state[name], alone[1][name]) for name in state)


def kinds_of_the_rank(model, x, rank):
    return {"loss": model(x).mean(), **({} if rank else {"extra": 1})}


def sizes_of_the_rank(model, x, rank):
    return {"loss": model(x).mean(), "rows": x[rank:]}


def gradients_of_the_rank(model, x, rank):
    return model(x).mean() if rank else model.scripted(x).mean()


def draws_of_the_rank(model, x, rank):
    return model(x).mean() * (1 + 0 * sum(torch.rand(()) for _ in range(rank)))


def python_draws_of_the_rank(model, x, rank):
    return model(x).mean() * (1 + 0 * sum(random.random() for _ in range(rank)))


def numpy_draws_of_the_rank(model, x, rank):
    return model(x).mean() * (1 + 0 * sum(numpy.random.rand() for _ in range(rank)))


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize(
    ("change", "found"),
    [
        (kinds_of_the_rank, "on rank"),
        (sizes_of_the_rank, r"a tensor float64\[7, 3\] on rank 0, a tensor float64\[6, 3\] on rank 1"),
        (gradients_of_the_rank, "a value of type NoneType on rank 0"),
        (draws_of_the_rank, "state of torch's random generator"),
        (python_draws_of_the_rank, "state of Python's random module"),
        (numpy_draws_of_the_rank, "state of NumPy's random generator"),
    ],
)
def test_ranks_that_do_other_things_raise(change, found):
    with pytest.raises(RanksDiverged) as raised:
        on_mesh(2, train_unlike, change)
    assert re.search(found, str(raised.value)), raised.value


def other_batches(mesh):
    _, job, _ = make_training(mesh, boolean_mask)
    for batch in itertools.islice(make_batches(), 2):
        job(batch + mesh.rank)


def test_other_batches_on_a_rank_raise():
    with pytest.raises(RanksDiverged, match="arguments"):
        on_mesh(2, other_batches)


def raise_in_the_job(mesh):
    _, job, _ = make_training(mesh, lambda model, x: {"loss": model(x).mean()}["the script's own"])
    job(make_batches()[0])


@pytest.mark.parametrize("size", [1, 2])
def test_an_error_of_the_job_is_the_scripts_own(size):
    with pytest.raises(KeyError, match="the script's own"):
        raise_in_the_job(Mesh.solo()) if size == 1 else on_mesh(size, raise_in_the_job)


def test_training_calls_stay_refused():
    _, job, _ = make_training(Mesh.solo(), lambda model, x: model(x).sum().backward())
    with pytest.raises(CaptureError, match=r"backward\(\) inside the job"):
        job(make_batches()[0])


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"accumulate": 2}, "accumulate=2 on job"),
        ({"view": "mirrored"}, "which captures nothing"),
        ({"capture": None}, "capture=None"),
        ({"view": "whole"}, 'view="whole"'),
    ],
)
def test_options_that_need_a_program_are_refused(options, found):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=found):
        rankless.job(model=model, optimizer=optimizer, **{"capture": False, **options})(lambda x: model(x).mean())


def refused(mesh):
    _, job, _ = make_training(mesh, boolean_mask, captured=True, accumulate=2)
    job(make_batches()[0])


def test_a_refusal_names_the_way_out():
    with pytest.raises(CaptureError, match=r"or pass capture=False to rankless\.job"):
        on_mesh(2, refused)
