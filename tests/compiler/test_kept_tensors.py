"""A job may keep tensors made of constants; a refused capture leaves script, model and generators as they were."""

import functools
import random
from collections import OrderedDict
from collections.abc import Callable

import numpy
import pytest
import torch
from simulated_ranks import run_on_simulated_ranks
from torch import Tensor, nn

from rankless.compiler.capture.tensors_kept_between_calls import Holder
from rankless.errors import CaptureError

WIDTH = 6
CACHE: dict[int, Tensor] = {}
SEEN: list[Tensor] = []
CALLS = {"count": 0}


@functools.lru_cache
def cached_mask(width: int) -> Tensor:
    return torch.ones(width, width, dtype=torch.float64).tril()


class Net(nn.Module):
    """A model that keeps something; `keep` is a function of the model and its input."""

    def __init__(self, keep: Callable[["Net", Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).double()
        self.mask = None
        self.masks: dict[int, Tensor] = {}
        self.parts: list[Tensor] = []
        self.keep = keep

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) @ self.keep(self, x)

    @functools.lru_cache  # noqa: B019  # what scripts write
    def cached(self, width: int) -> Tensor:
        return torch.ones(width, width, dtype=torch.float64).tril()


def ones() -> Tensor:
    return torch.ones(WIDTH, WIDTH, dtype=torch.float64)


def in_an_attribute(net: Net, _: Tensor) -> Tensor:
    if net.mask is None:
        net.mask = ones().tril()
    return net.mask


def in_a_new_attribute(net: Net, _: Tensor) -> Tensor:
    if not hasattr(net, "late"):
        net.late = (ones().tril(), ones().triu() * 2)
    return net.late[0] + net.late[1]


def in_a_dict(net: Net, x: Tensor) -> Tensor:
    width = x.shape[-1]
    if width not in net.masks:
        net.masks[width] = ones().tril()
        net.masks[width][0] = 3.0
    return net.masks[width]


def in_a_list(net: Net, _: Tensor) -> Tensor:
    if not net.parts:
        net.parts.append(ones().tril())
    return net.parts[0]


def in_a_global_dict(_: Net, x: Tensor) -> Tensor:
    if x.shape[-1] not in CACHE:
        CACHE[x.shape[-1]] = ones().tril()
    return CACHE[x.shape[-1]]


def in_a_cache(_: Net, x: Tensor) -> Tensor:
    return cached_mask(x.shape[-1])


def in_a_cached_method(net: Net, x: Tensor) -> Tensor:
    return net.cached(x.shape[-1])


def the_same_at_every_call(net: Net, _: Tensor) -> Tensor:
    net.mask = ones().tril()
    return net.mask


def in_a_new_buffer(net: Net, _: Tensor) -> Tensor:
    if not hasattr(net, "late"):
        net.register_buffer("late", ones())
    return net.late


KEPT = {
    function.__name__: function
    for function in (
        *(in_an_attribute, in_a_new_attribute, in_a_dict, in_a_list, in_a_global_dict, in_a_cache),
        *(in_a_cached_method, the_same_at_every_call, in_a_new_buffer),
    )
}


@pytest.mark.ci_sample(2)
@pytest.mark.parametrize("form", KEPT)
def test_a_tensor_made_of_constants_is_kept_as_in_a_plain_run(form: str):
    torch.manual_seed(0)
    CACHE.clear()
    net, x = Net(KEPT[form]), torch.randn(7, WIDTH, dtype=torch.float64)

    def train(x: Tensor) -> Tensor:
        return net(x).square().mean()

    for _ in range(2):
        found = run_on_simulated_ranks(train, {"model": net}, [x], 3)
        kept = {id(item): item for item in (net.mask, *net.masks.values(), *net.parts, *CACHE.values())}
        assert all(type(item) is Tensor or item is None for item in kept.values())
        loss = train(x)
        torch.testing.assert_close(found.results[0], loss.detach(), rtol=1e-12, atol=1e-12)
        assert {id(item) for item in (net.mask, *net.masks.values(), *net.parts, *CACHE.values())} == kept.keys() or (
            form == "the_same_at_every_call"
        )


def of_the_input(net: Net, x: Tensor) -> Tensor:
    if net.mask is None:
        net.mask = x.abs().max()
    return ones() * net.mask


def of_a_parameter(net: Net, _: Tensor) -> Tensor:
    if net.mask is None:
        net.mask = net.layer.weight.detach().abs()
    return net.mask


def of_random_numbers(net: Net, _: Tensor) -> Tensor:
    if net.mask is None:
        net.mask = torch.rand(WIDTH, WIDTH, dtype=torch.float64)
    return net.mask


def in_a_growing_list(net: Net, _: Tensor) -> Tensor:
    net.parts.append(ones())
    return net.parts[-1]


def in_a_global_list(_: Net, x: Tensor) -> Tensor:
    SEEN.append(x)
    return ones()


def of_the_tensor_before(net: Net, _: Tensor) -> Tensor:
    net.mask = ones() if net.mask is None else net.mask * 2
    return net.mask


def after_a_count(net: Net, _: Tensor) -> Tensor:
    CALLS["count"] += 1
    net.mask = ones() * CALLS["count"]
    return net.mask


def after_random_numbers_of_python(_: Net, __: Tensor) -> Tensor:
    return ones() * random.random() * numpy.random.rand()


def with_an_error(net: Net, x: Tensor) -> Tensor:
    net.mask = ones()
    net.parts.append(x)
    net.register_forward_hook(lambda *_: None)
    net.eval()
    torch.set_default_dtype(torch.float64)
    raise ValueError("of the script")


REFUSED = {
    of_the_input: r"model\.mask, in which the job keeps a tensor computed from arguments",
    of_a_parameter: r"model\.mask, in which",
    of_random_numbers: r"model\.mask, in which",
    in_a_growing_list: r"model\.parts\[\d\], in which the job keeps another tensor at every call|model.parts",
    in_a_global_list: r"SEEN\[0\], in which the job keeps a tensor computed from arguments",
    of_the_tensor_before: r"model\.mask, in which the job keeps another tensor at every call|model\.mask was",
    after_a_count: r"count",
    after_random_numbers_of_python: r"random",
    with_an_error: "of the script",
}


def describe(net: Net) -> object:
    attributes = [
        {name: list(item) if isinstance(item, dict | list) else item for name, item in vars(module).items()}
        for module in net.modules()
    ]
    generators = (random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist())
    return attributes, [id(item) for item in SEEN], dict(CALLS), generators, torch.get_default_dtype()


@pytest.mark.parametrize("keep", REFUSED, ids=lambda keep: keep.__name__)
def test_a_refused_capture_leaves_everything_as_it_was(keep: Callable[[Net, Tensor], Tensor]):
    net, x = Net(keep), torch.ones(7, WIDTH, dtype=torch.float64)
    before = describe(net)
    with pytest.raises((CaptureError, ValueError), match=REFUSED[keep]) as raised:
        run_on_simulated_ranks(lambda x: net(x).square().mean(), {"model": net}, [x], 2)
    assert describe(net) == before
    if keep in (of_the_input, of_random_numbers):
        assert "test_kept_tensors.py:" in str(raised.value)
    net.keep = in_an_attribute
    assert torch.isfinite(net(x)).all()


class Activations(OrderedDict):
    """Makes a module at each access, as the table of activations in transformers does."""

    def __getitem__(self, key):
        return super().__getitem__(key)()


def test_a_table_that_makes_modules_still_holds_their_classes():
    table = Activations(gelu=nn.GELU, relu=nn.ReLU)
    holder = Holder("table", table)
    before = holder.read()
    table["gelu"] = nn.SiLU
    holder.write(before)
    assert list(dict.items(table)) == [("gelu", nn.GELU), ("relu", nn.ReLU)]
    assert isinstance(table["gelu"], nn.GELU)
