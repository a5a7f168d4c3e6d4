"""A table in a script on one device trains as `nn.Embedding(sparse=True)` does, in the forms in which scripts train."""

import copy
import io
import pickle

import pytest
import torch
from embedding_pair import DIM, IDS, OPTIMIZERS, EmbeddingPair
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rankless
from rankless.errors import TableError
from rankless.parameter_server import Embedding

pytestmark = pytest.mark.usefixtures("float64_by_default")


@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.ci_sample(3)
def test_a_training_is_that_of_a_plain_embedding(pair, accumulated):
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5) for optimizer in pair.optimizers]
    for _ in range(30):
        pair.zero_grad()
        for _ in range(accumulated):
            pair.backward()
        pair.step()
        for schedule in schedules:
            schedule.step()
        pair.check()


def test_a_step_without_zero_grad_uses_all_gradients_so_far(pair):
    for _ in range(5):
        pair.backward()
        pair.step()
        pair.step()
    pair.check()


@pytest.mark.parametrize("clear", ["optimizer", "module", "parameter"])
def test_cleared_gradients_are_forgotten(pair, clear):
    for number in range(6):
        pair.backward()
        if number % 2:
            for module, optimizer in zip((pair.table, pair.plain), pair.optimizers, strict=True):
                if clear == "optimizer":
                    optimizer.zero_grad()
                elif clear == "module":
                    module.zero_grad()
                else:
                    module.weight.grad = None
        pair.step()  # where gradients have been cleared, neither moves; rows with momentum stay as well
    pair.check()


def test_a_step_before_any_backward_pass_changes_nothing(pair):
    pair.step()
    pair.check(changed=False)
    assert pair.table.statistics().rows == 0


def test_two_lookups_in_one_graph_add_up(pair):
    for _ in range(4):
        pair.zero_grad()
        first, second = pair.losses(), pair.losses((7,))
        for one, other in zip(first, second, strict=True):
            (one * other).backward()
        pair.step()
    pair.check()


def test_a_graph_that_runs_backward_twice_counts_twice(pair):
    for loss in pair.losses():
        loss.backward(retain_graph=True)
        loss.backward()
    pair.step()
    pair.check()


def test_a_failed_backward_pass_leaves_no_gradients(pair):
    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values):  # noqa: ARG004  # autograd passes it
            return values.clone()

        @staticmethod
        def backward(ctx, gradient):  # noqa: ARG004  # autograd passes it
            raise MemoryError("out of memory")

    first = torch.tensor([1.0], requires_grad=True)
    loss = (pair.table(IDS[:5]) * Fail.apply(first)).sum()
    with pytest.raises(MemoryError):
        loss.backward()
    pair.backward()
    pair.step()
    pair.check()
    assert pair.table.statistics().rows <= 12


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpoints_look_up_again(pair, reentrant):
    for _ in range(3):
        pair.zero_grad()
        places = torch.randint(0, len(IDS), (9,))
        scale = torch.ones(DIM, requires_grad=True)
        for embedding, ids in ((pair.table, IDS[places]), (pair.plain, places)):
            outside = embedding(ids[:4]).sin().sum()
            inside = checkpoint(lambda scale: (embedding(ids) * scale).cos(), scale, use_reentrant=reentrant)  # noqa: B023  # called at once
            (inside.sum() * outside).backward()
        pair.step()
    pair.check()


def test_gradients_for_other_tensors_alone_do_not_count(pair):
    scale = torch.ones(DIM, requires_grad=True)
    torch.autograd.grad((pair.table(IDS) * scale).sum(), scale)
    torch.autograd.grad((pair.table(IDS) * scale).sum(), [scale, pair.table.weight])
    pair.backward()
    pair.step()
    pair.check()
    assert pair.table.statistics().rows <= 12


def test_a_parameter_that_needs_no_gradient_stays(pair):
    pair.table.weight.requires_grad_(False)
    rows = pair.table(IDS)
    assert not rows.requires_grad
    pair.step()
    assert pair.table.statistics().rows == 0


def test_a_group_with_dense_parameters_steps_both():
    pair = EmbeddingPair(OPTIMIZERS["adagrad"])
    layers = [nn.Linear(DIM, 2), nn.Linear(DIM, 2)]
    layers[1].load_state_dict(layers[0].state_dict())
    groups = [
        [{"params": layer.parameters(), "lr": 0.5}, {"params": embedding.parameters()}]
        for layer, embedding in zip(layers, (pair.table, pair.plain), strict=True)
    ]
    optimizers = [torch.optim.Adagrad(group, lr=0.1) for group in groups]
    for step in range(10):
        places = torch.arange(step, step + 5)
        for layer, rows, optimizer in zip(
            layers, (pair.table(IDS[places]), pair.plain(places)), optimizers, strict=True
        ):
            optimizer.zero_grad()
            layer(rows).sin().sum().backward()
            optimizer.step()
    pair.check()
    torch.testing.assert_close(layers[0].weight, layers[1].weight, rtol=0, atol=1e-12)


def test_a_closure_makes_its_backward_pass_within_the_step(pair):
    for _ in range(4):
        for loss, optimizer in zip(pair.losses(), pair.optimizers, strict=True):

            def closure(loss=loss, optimizer=optimizer):
                optimizer.zero_grad()
                loss.backward()
                return loss

            optimizer.step(closure)
    pair.check()


def stored(*objects: object) -> list[dict]:
    file = io.BytesIO()
    torch.save([one.state_dict() for one in objects], file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_training_continues_from_its_stored_state(pair):
    for step in range(12):
        pair.zero_grad()
        pair.backward()
        pair.step()
        if step == 5:
            states = stored(pair.table, pair.plain, *pair.optimizers)
            for module, state in zip((pair.table, pair.plain), states[:2], strict=True):
                module.load_state_dict(state)
            pair.table = Embedding(DIM, seed=77)
            pair.table.load_state_dict(states[0])
            pair.optimizers = [pair.make(pair.table.parameters()), pair.make(pair.plain.parameters())]
            for optimizer, state in zip(pair.optimizers, states[2:], strict=True):
                optimizer.load_state_dict(state)
    pair.check()


@pytest.mark.parametrize("stored_between", [False, True])
def test_a_new_optimizer_begins_with_new_states(pair, stored_between):
    for step in range(12):
        pair.zero_grad()
        pair.backward()
        pair.step()
        if step == 5:
            if stored_between:
                state = stored(pair.table)[0]
                pair.table = Embedding(DIM)
                pair.table.load_state_dict(state)
            pair.optimizers = [pair.make(pair.table.parameters()), pair.make(pair.plain.parameters())]
    pair.check()


def test_an_earlier_optimizer_may_not_step_again():
    pair = EmbeddingPair(OPTIMIZERS["adagrad"])
    other = torch.optim.SGD(pair.table.parameters(), 0.1)
    pair.backward()
    pair.optimizers[0].step()
    other.step()
    before = pair.table(IDS)
    with pytest.raises(TableError, match="one optimizer at a time"):
        pair.optimizers[0].step()
    torch.testing.assert_close(pair.table(IDS), before, rtol=0, atol=0)


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_trains_on_its_own(pair, way):
    pair.backward()
    pair.step()
    rows = pair.table(IDS).detach()
    other = copy.deepcopy(pair.table) if way == "deepcopy" else pickle.loads(pickle.dumps(pair.table))
    torch.testing.assert_close(other(IDS).detach(), rows, rtol=0, atol=1e-15)
    optimizer = pair.make(other.parameters())
    optimizer.zero_grad()
    other(IDS).sum().backward()
    optimizer.step()
    assert not torch.equal(other(IDS), rows)
    torch.testing.assert_close(pair.table(IDS).detach(), rows, rtol=0, atol=0)


def test_a_job_on_one_device_trains_a_table():
    pair = EmbeddingPair(OPTIMIZERS["adagrad"])

    @rankless.job(model=pair.table, optimizer=pair.optimizers[0])
    def train(ids: Tensor) -> Tensor:
        return pair.table(ids).sin().sum()

    for step in range(5):
        places = torch.arange(step, step + 7)
        train(IDS[places])
        pair.optimizers[1].zero_grad()
        pair.plain(places).sin().sum().backward()
        pair.optimizers[1].step()
    pair.check()


def test_a_compiled_model_looks_up_outside_its_graphs(pair):
    compiled = torch.compile(nn.Sequential(pair.table, nn.Tanh()), backend="eager")
    for step in range(4):
        places = torch.arange(step, step + 6)
        pair.zero_grad()
        compiled(IDS[places]).sum().backward()
        pair.plain(places).tanh().sum().backward()
        pair.step()
    pair.check()
