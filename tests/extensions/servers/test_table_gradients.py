"""What scripts do to gradients between backward pass and step happens to the gradients of a table, or is refused."""

import pytest
import torch
from embedding_pair import IDS, OPTIMIZERS, EmbeddingPair
from support.devices import DEVICE
from torch import nn

from rankless.errors import TableError
from rankless.parameter_server import Embedding

pytestmark = pytest.mark.usefixtures("float64_by_default")


def test_gradients_zeroed_in_place_are_forgotten(pair):
    for _ in range(4):
        pair.backward()
        for optimizer in pair.optimizers:
            optimizer.zero_grad(set_to_none=False)
        pair.backward()
        pair.step()
    pair.check()


def test_a_step_after_zeroing_in_place_counts_and_moves_rows_with_momentum(pair):
    for _ in range(4):
        pair.zero_grad()
        pair.backward()
        pair.step()
        for optimizer in pair.optimizers:
            optimizer.zero_grad(set_to_none=False)
        pair.step()
    pair.check()


def test_an_optimizer_that_meets_no_gradient_changes_nothing(pair):
    others = [pair.make(module.parameters()) for module in (pair.table, pair.plain)]
    for _ in range(4):
        pair.zero_grad()
        pair.backward()
        pair.step()
        pair.zero_grad()
        for other in others:
            other.step()
    pair.check()


def test_scaled_gradients_step_with_their_factors(pair):
    for _ in range(4):
        pair.zero_grad()
        pair.backward()
        for module in (pair.table, pair.plain):
            module.weight.grad.mul_(0.25)
        pair.backward()
        for module in (pair.table, pair.plain):
            module.weight.grad.mul_(0.5)
        pair.step()
    pair.check()


def test_a_gradient_scaler_scales_back_and_skips_what_is_not_finite(pair):
    scalers = [torch.amp.GradScaler(DEVICE.type, init_scale=1024.0, growth_interval=3) for _ in range(2)]
    for step in range(12):
        pair.zero_grad()
        for scaler, loss, optimizer in zip(scalers, pair.losses(), pair.optimizers, strict=True):
            scaler.scale(loss * (torch.inf if step in (2, 7) else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    pair.check()


def test_numbers_that_are_not_finite_reach_only_their_rows():
    embedding = Embedding(2)
    weights = torch.tensor([[1.0], [torch.inf], [torch.nan]])
    (embedding(torch.arange(3)) * weights).sum().backward()
    torch.optim.SGD(embedding.parameters(), 0.1).step()
    assert embedding(torch.arange(3)).isfinite().all(dim=1).tolist() == [True, False, False]


@pytest.mark.parametrize(
    "change",
    [
        lambda gradient: gradient / 3,
        lambda gradient: (gradient + gradient).coalesce(),
        lambda gradient: gradient.clone(),
        lambda gradient: gradient * 0,
        lambda gradient: -gradient,
    ],
)
def test_a_replaced_gradient_steps_with_its_factor(change):
    pair = EmbeddingPair(OPTIMIZERS["adagrad"])
    for _ in range(4):
        pair.zero_grad()
        for _ in range(2):
            pair.backward()
            for module in (pair.table, pair.plain):
                module.weight.grad = change(module.weight.grad)
        pair.step()
    pair.check(changed=False)


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_clipping_is_refused_by_pytorch_as_for_every_sparse_gradient(pair, clip):
    pair.backward()
    for module in (pair.table, pair.plain):
        with pytest.raises((NotImplementedError, RuntimeError)):
            clip(module.parameters(), 1.0)


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.RMSprop,
        torch.optim.Adadelta,
        lambda parameters: torch.optim.SGD(parameters, 0.1, weight_decay=0.1),
        lambda parameters: torch.optim.Adagrad(parameters, weight_decay=0.1),
        lambda parameters: torch.optim.SGD(parameters, 0.1, fused=True),
    ],
)
def test_optimizers_that_refuse_sparse_gradients_refuse_a_table(make):
    pair = EmbeddingPair(make)
    pair.backward()
    known = type(pair.optimizers[0]) in (torch.optim.SGD, torch.optim.Adagrad)
    for optimizer, expected in zip(pair.optimizers, (RuntimeError if known else TableError, RuntimeError), strict=True):
        with pytest.raises(expected):
            optimizer.step()
    pair.check(changed=False)
    assert pair.table.statistics().rows == 0


def test_an_optimizer_of_the_script_is_refused_by_name():
    class Halving(torch.optim.SGD):
        pass

    pair = EmbeddingPair(lambda parameters: Halving(parameters, 0.1))
    pair.table(IDS).sum().backward()
    layer = nn.Linear(2, 1)
    layer(torch.ones(2)).sum().backward()
    before = layer.weight.detach().clone()
    pair.optimizers[0].add_param_group({"params": layer.parameters()})
    with pytest.raises(TableError, match="Halving"):
        pair.optimizers[0].step()
    assert torch.equal(layer.weight, before), "no other parameter has been stepped"


def nesterov(parameters):
    return torch.optim.SGD(parameters, 0.05, momentum=0.9, nesterov=True, foreach=True)


@pytest.mark.parametrize("way", ["step", "closure", "keyword"])
def test_an_optimizer_that_changes_gradients_in_place_steps_as_with_a_plain_embedding(way):
    pair = EmbeddingPair(nesterov)
    for _ in range(6):
        for loss, optimizer in zip(pair.losses(), pair.optimizers, strict=True):

            def closure(loss=loss, optimizer=optimizer):
                optimizer.zero_grad()
                loss.backward()
                for parameter in optimizer.param_groups[0]["params"]:
                    parameter.grad.mul_(0.5)
                return loss

            if way == "step":
                closure()
                optimizer.step()
            elif way == "closure":
                optimizer.step(closure)
            else:
                optimizer.step(closure=closure)
        pair.check()


def test_gradients_that_an_optimizer_changed_in_place_are_not_used_again():
    pair = EmbeddingPair(nesterov)
    for _ in range(3):
        pair.zero_grad()
        pair.backward()
        pair.step()
    with pytest.raises(TableError, match=r"zero_grad\(\)"):
        pair.step()
    pair.backward()
    with pytest.raises(TableError, match="foreach=False"):
        pair.step()
    pair.zero_grad()
    pair.backward()
    pair.step()
