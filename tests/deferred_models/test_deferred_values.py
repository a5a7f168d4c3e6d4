"""Models built in `rankless.deferred()` have the values of the same code without it, bit for bit."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from rankless.deferred_models.build_and_materialize import DeferredBuild
from rankless.deferred_models.deferred_tensor import DeferredTensor


class DropPaths(nn.Module):
    """Rates that Python reads from a tensor, as vision transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Dropout(rate.item()) for rate in torch.linspace(0, 0.3, 4))
        self.head = nn.Linear(3, 2)


class Scanned(nn.Module):
    """Mamba's initial step sizes: a value that a parameter receives from computed ones, with an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(4, 6)
        step = torch.exp(torch.rand(6) * (math.log(0.1) - math.log(0.001)) + math.log(0.001)).clamp(min=1e-4)
        with torch.no_grad():
            self.projection.bias.copy_(step + torch.log(-torch.expm1(-step)))
        self.decay = nn.Parameter(torch.log(torch.arange(1, 5, dtype=torch.float32)[None].expand(6, -1).contiguous()))
        self.decay._no_weight_decay = True


def tied() -> nn.Module:
    model = nn.ModuleDict({"words": nn.Embedding(7, 4, padding_idx=2), "head": nn.Linear(4, 7, bias=False)})
    model["head"].weight = model["words"].weight
    return model


def initialized_again() -> nn.Module:
    """Hugging Face's models initialize a second time, through `.data`."""
    model = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Embedding(6, 4, padding_idx=1))

    def initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)
            module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(std=0.02)
            module.weight.data[module.padding_idx].zero_()
        elif isinstance(module, nn.LayerNorm):
            module.weight.data.fill_(0.5)

    return model.apply(initialize)


def special_initializers() -> nn.Module:
    model = nn.Sequential(*[nn.Linear(5, 5) for _ in range(9)])
    nn.init.orthogonal_(model[0].weight, gain=1.5)
    nn.init.trunc_normal_(model[1].weight, std=0.5, a=-0.6, b=0.6)
    nn.init.xavier_normal_(model[2].weight)
    nn.init.kaiming_normal_(model[3].weight)
    nn.init.sparse_(model[4].weight, 0.4)
    nn.init.eye_(model[5].weight)
    nn.init.uniform_(model[6].weight, -1, 1, generator=torch.Generator().manual_seed(5))
    nn.init.dirac_(nn.Parameter(torch.empty(3, 3, 3)))
    with torch.no_grad():
        model[7].weight[1:3] *= 2
        model[8].weight.copy_(model[7].weight.t() @ model[6].weight)
        model[7].weight.zero_()
    return model


def data_assigned() -> nn.Module:
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    model[0].weight.data = torch.randn(3, 3) * 2
    model[1].weight.data = model[0].weight.data.clone()
    model[0].bias.data = model[1].bias.data  # shared
    with torch.no_grad():
        model[1].bias.add_(1)
    return model


def averaged() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    teacher = copy.deepcopy(model)
    with torch.no_grad():
        model[0].weight.mul_(2)
    for parameter in teacher.parameters():
        parameter.requires_grad_(False)
    return nn.ModuleList([model, teacher])


def quantized() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(torch.bfloat16)
    return model.double()


def drawn_from_values() -> nn.Module:
    model = nn.Module()
    rates = torch.rand(50) * 5
    model.register_buffer("counts", torch.poisson(rates))
    model.register_buffer("choices", torch.multinomial(rates, 9))
    model.register_buffer("flags", torch.bernoulli(rates / 5))
    model.register_buffer("order", torch.randperm(20)[:7])
    model.register_buffer("selected", rates[rates > 2.5])
    model.register_buffer("noise", torch.normal(rates, rates))
    model.register_buffer("like", torch.rand_like(rates))
    model.table = [torch.randn(3), torch.randn(3).t()]
    return model


def drawn_from_a_generator() -> nn.Module:
    model, generator = nn.Module(), torch.Generator().manual_seed(5)
    model.numbers = nn.Parameter(torch.rand(5, 7, generator=generator))
    model.normal = nn.Parameter(torch.randn(3, 40, generator=generator, dtype=torch.float64))
    model.register_buffer("integers", torch.randint(2, 9, (40,), generator=generator))
    model.register_buffer("order", torch.randperm(9, generator=generator))
    model.register_buffer("turned", torch.randn(6, 20).t())
    model.register_buffer("like", torch.randn_like(model.turned))
    model.register_buffer("integers like", torch.randint_like(model.turned, 3, 8))
    model.register_buffer("as_complex", torch.randn(9, 3, dtype=torch.complex64))
    model.register_buffer("in_half", torch.rand(33, dtype=torch.bfloat16))
    model.register_buffer("zero to high", torch.randint(4, (21,)))
    return model


def from_given_values() -> nn.Module:
    given = torch.arange(6.0).view(2, 3)
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2, 3], [4, 5, 6]]))
        model.bias += given[:, 0]
        given.zero_()
    model.register_buffer("mean", torch.as_tensor([0.5, 0.25]).view(2, 1))
    return model


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "convolutions": lambda: nn.Sequential(nn.Conv2d(1, 6, 5), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(6, 3)),
    "recurrent": lambda: nn.GRU(5, 4, num_layers=2, bidirectional=True),
    "long short": lambda: nn.LSTM(5, 4, proj_size=2),
    "attention": lambda: nn.TransformerEncoderLayer(8, 2, dim_feedforward=16),
    "transformer": lambda: nn.Transformer(8, 2, 1, 1, 16),
    "drop paths": DropPaths,
    "scanned": Scanned,
    "tied": tied,
    "initialized again": initialized_again,
    "special initializers": special_initializers,
    "data assigned": data_assigned,
    "averaged": averaged,
    "other types": quantized,
    "drawn from values": drawn_from_values,
    "drawn from a generator": drawn_from_a_generator,
    "from given values": from_given_values,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 3)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 3)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
    "old weight norm": lambda: weight_norm(nn.Linear(4, 3)),
    "old spectral norm": lambda: spectral_norm(nn.Linear(4, 3)),
    "pruned": lambda: prune.random_unstructured(nn.Linear(4, 3), "weight", 0.5),
    "bilinear": lambda: nn.Bilinear(3, 4, 5),
    "bag": lambda: nn.EmbeddingBag(9, 4, mode="sum"),
    "default type": lambda: nn.Linear(3, 3, dtype=torch.float64),
}


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return named | {f"table {place}": value for place, value in enumerate(getattr(model, "table", []))}


@pytest.mark.parametrize("name", BUILDERS)
def test_a_deferred_model_has_the_values_of_a_plain_one(name: str):
    torch.manual_seed(7)
    plain = BUILDERS[name]()
    following = torch.rand(3)
    torch.manual_seed(7)
    with DeferredBuild() as build:
        model = BUILDERS[name]()
    assert torch.equal(torch.rand(3), following)  # the generator is where it would be
    objects = list(model.parameters())
    build.materialize(model)
    found, wanted = state_of(model), state_of(plain)
    assert list(found) == list(wanted)
    for key, value in wanted.items():
        assert torch.equal(found[key], value), key
        assert (found[key].dtype, found[key].stride(), found[key].requires_grad) == (
            value.dtype,
            value.stride(),
            value.requires_grad,
        ), key
        assert type(found[key]) is type(value)
        assert vars(found[key]) == vars(value)
    assert all(one is other for one, other in zip(objects, model.parameters(), strict=True))
    assert not any(isinstance(value, DeferredTensor) for value in found.values())
