"""Parameters divided along an axis: every model is the same training, and sends what an expert's program sends."""

import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from simulated_tensor_axis import check_tensor_axis
from tensor_axis_models import CASES, LENGTH, ROWS, WIDTH, Decoder, make_decoder, make_ids
from torch import nn

from rankless.parallel.tensor_placement import BlockedShard, Shard

MESHES = ((2,), (4,), (2, 2))
ACTIVATION = ROWS * LENGTH * WIDTH * 8


def count_parameters(model: nn.Module, names) -> float:
    """Return the part of the elements of a model's parameters that these parameters have."""
    sizes = {f"model.{name}": item.numel() for name, item in model.named_parameters()}
    return sum(sizes[name] for name in names) / sum(sizes.values())


@pytest.mark.ci_sample(2)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_model_is_the_same_training_and_most_of_it_is_divided(name, mesh):
    function, modules, arguments = CASES[name]()
    _, states = check_tensor_axis(function, modules, arguments, mesh)
    assert count_parameters(modules["model"], states) > (0.6 if name in ("gated", "phi3") else 0.85)


@pytest.mark.ci_sample(2)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_model_with_divided_activations_is_the_same_training(name, mesh):
    function, modules, arguments = CASES[name]()
    check_tensor_axis(function, modules, arguments, mesh, sequence_parallel=True)


@pytest.mark.parametrize("form", ["split", "three", "heads"])
@pytest.mark.ci_sample(1)
def test_a_decoder_sends_what_megatron_sends(form):
    function, modules, arguments = make_decoder(form)
    outcome, _ = check_tensor_axis(function, modules, arguments, (2,))
    large = [item for item in outcome.local.collectives if item.bytes >= ACTIVATION]
    # After the embedding, and twice per layer; before the head, and twice per layer.
    assert Counter((item.kind, item.backward) for item in large) == {("all_reduce", False): 5, ("all_reduce", True): 5}
    assert all(item.bytes == ACTIVATION for item in large)


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("layers", [0.0, 0.1])
@pytest.mark.parametrize("embedding", [0.0, 0.1])
def test_dropout_does_not_make_a_decoder_send_more(embedding, layers):
    function, modules, arguments = make_decoder("split")
    modules["model"].dropout.p = embedding
    for block in modules["model"].blocks:
        block.mlp[-1].p = layers
    outcome, _ = check_tensor_axis(function, modules, arguments, (2,))
    large = Counter((item.kind, item.backward) for item in outcome.local.collectives if item.bytes >= ACTIVATION)
    assert large == {("all_reduce", False): 5, ("all_reduce", True): 5}


def test_queries_keys_and_values_in_one_matrix_are_divided_by_heads():
    function, modules, arguments = make_decoder("split")
    _, states = check_tensor_axis(function, modules, arguments, (3,))
    assert states["model.blocks.0.attention.qkv.weight"] == BlockedShard(0, (8, 4, 4))
    assert states["model.blocks.0.attention.out.weight"] == Shard(1, (8, 4, 4))
    assert states["model.words.weight"] == Shard(0, (14, 13, 13))


def test_a_layer_with_fewer_heads_than_workers_is_divided_in_another_way():
    function, modules, arguments = make_decoder("split", heads=2)
    _, states = check_tensor_axis(function, modules, arguments, (4,))
    assert states["model.blocks.0.attention.qkv.weight"] == Shard(1, (4, 4, 4, 4))


def test_a_request_is_followed_by_what_is_linked_with_it():
    function, modules, arguments = make_decoder("split")
    _, states = check_tensor_axis(function, modules, arguments, (2,), {"model.blocks.1.mlp.0.bias": 0})
    assert states == {
        "model.blocks.1.mlp.0.weight": Shard(0, (32, 32)),
        "model.blocks.1.mlp.0.bias": Shard(0, (32, 32)),
        "model.blocks.1.mlp.2.weight": Shard(1, (32, 32)),
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("dim", [0, 1])
def test_a_division_that_needs_gathers_is_right(dim):
    function, modules, arguments = make_decoder("split", tied=False)
    names = [f"model.{name}" for name, item in modules["model"].named_parameters() if item.dim() > dim]
    for name in names:
        _, states = check_tensor_axis(function, modules, arguments, (2,), {name: dim})
        assert name in states


def train_with_logits():
    torch.manual_seed(0)
    model = Decoder("split").double()

    def train(ids, labels):
        logits = model(ids)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits.argmax(-1), logits

    return train, {"model": model}, make_ids()


def train_with_smoothing():
    torch.manual_seed(0)
    model = Decoder("split").double()

    def train(ids, labels):
        labels = labels.masked_fill(labels % 5 == 0, -100)
        return F.cross_entropy(model(ids).transpose(1, 2), labels, label_smoothing=0.1)

    return train, {"model": model}, make_ids()


def train_by_hand():
    """A loss without any function for it."""
    torch.manual_seed(0)
    model = Decoder("slice", dropout=0.2).double()

    def train(ids, labels):
        logits = model(ids)
        chosen = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        return (logits.logsumexp(-1) - chosen).mean()

    return train, {"model": model}, make_ids()


def train_adapters():
    """Low-rank adapters on frozen layers."""
    torch.manual_seed(0)
    model = Decoder("split").double().requires_grad_(False)
    down, up = nn.Linear(WIDTH, 4, bias=False).double(), nn.Linear(4, WIDTH, bias=False).double()

    def train(ids, labels):
        hidden = model.words(ids)
        hidden = model.blocks(hidden + up(down(hidden)))
        return F.cross_entropy(model.head(model.norm(hidden)).flatten(0, 1), labels.flatten())

    return train, {"model": nn.ModuleList([model, down, up])}, make_ids()


def train_norm_of_weights():
    """A penalty on the weights, which reads them outside their layers."""
    torch.manual_seed(0)
    model = Decoder("permuted", tied=False).double()

    def train(ids, labels):
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        return loss + 0.01 * sum(item.square().sum() + item.abs().amax() for item in model.parameters())

    return train, {"model": model}, make_ids()


def train_normed_weights():
    torch.manual_seed(0)
    layers = [nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 12)), nn.Tanh(), nn.Linear(12, 10)]
    model = nn.Sequential(*layers).double()

    def train(values, labels):
        return F.cross_entropy(model(values), labels)

    return train, {"model": model}, [torch.randn(6, WIDTH, dtype=torch.float64), torch.arange(6)]


def train_mixture():
    """Experts in one tensor, chosen by weights of all of them."""
    torch.manual_seed(0)
    model = nn.ParameterDict(
        {
            "gate": nn.Parameter(torch.randn(WIDTH, 4)),
            "up": nn.Parameter(torch.randn(4, WIDTH, 24)),
            "down": nn.Parameter(torch.randn(4, 24, WIDTH)),
        }
    ).double()

    def train(values):
        weights = (values @ model["gate"]).softmax(-1)
        hidden = torch.einsum("bd,edh->ebh", values, model["up"]).relu()
        mixed = torch.einsum("ebh,ehd->ebd", hidden, model["down"])
        return (weights.t().unsqueeze(-1) * mixed).sum(0).square().mean()

    return train, {"model": model}, [torch.randn(6, WIDTH, dtype=torch.float64)]


FORMS = [
    train_with_logits,
    train_with_smoothing,
    train_by_hand,
    train_adapters,
    train_norm_of_weights,
    train_normed_weights,
    train_mixture,
]


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("make", FORMS)
def test_training_as_people_write_it(make, mesh):
    function, modules, arguments = make()
    _, states = check_tensor_axis(function, modules, arguments, mesh)
    assert states


@pytest.mark.parametrize("recompute", [0.5, 1.0])
def test_values_can_be_computed_again(recompute):
    function, modules, arguments = make_decoder("split", dropout=0.1)
    outcome, _ = check_tensor_axis(function, modules, arguments, (2,), recompute=recompute)
    assert outcome.local.recomputed > 0


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("form", ["split", "three", "heads"])
@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)])
def test_sequence_parallelism_sends_what_megatron_sends(form, mesh):
    function, modules, arguments = make_decoder(form)
    outcome, _ = check_tensor_axis(function, modules, arguments, mesh, sequence_parallel=True)
    size = ACTIVATION // math.prod(mesh[:-1])
    large = [item for item in outcome.local.collectives if item.bytes >= size]
    # After the embedding and twice per layer it scatters, and gathers twice per layer and before the head. The backward
    # pass does the reverse, and gathers the inputs of five weights again.
    assert Counter((item.kind, item.backward) for item in large) == {
        ("reduce_scatter", False): 5,
        ("all_gather", False): 5,
        ("reduce_scatter", True): 5,
        ("all_gather", True): 5 + 5,
    }
    assert all(item.bytes == size for item in large)
