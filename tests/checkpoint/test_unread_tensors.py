"""What an object's own `load_state_dict` does with tensors that are not read yet."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from checkpoint.saved_objects import SOLO, Holder, save
from torch import nn

from rankless.checkpoint import load
from rankless.ownership.unread_tensor import UnreadTensor

WEIGHT = torch.arange(20_000.0).view(100, 200)
STATE = {"weight": WEIGHT, "bias": torch.ones(3), "counts": torch.arange(40_000), "step": torch.tensor(7.0)}


@pytest.fixture
def saved(tmp_path):
    save(tmp_path / "c", {"thing": Holder(STATE)})
    return tmp_path / "c"


class Taker:
    """Loads with a function, whose result it keeps."""

    def __init__(self, take):
        self.take = take

    def load_state_dict(self, state):
        assert isinstance(state["weight"], UnreadTensor)
        self.found = self.take(state)


def change_in_place(state):
    state["weight"].mul_(2)
    state["weight"][0, 1] = 5
    state["weight"].view(-1)[2] = 6
    return state["weight"]


def through_an_alias(state):
    alias = state["weight"].detach()
    alias.add_(1)
    return state["weight"]


def pickled(state):
    return pickle.loads(pickle.dumps(state["weight"]))


def saved_by_torch(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer)["weight"]


def filled_by_copies(state):
    made = torch.zeros(100, 200, dtype=torch.float64)
    made.copy_(state["weight"])
    return made


def changed_array(state):
    state["weight"].numpy()[3] = 0
    return state["weight"]


CHANGED = WEIGHT * 2
CHANGED[0, 1], CHANGED[0, 2] = 5, 6
USES = {
    "kept": (lambda state: state["weight"], WEIGHT),
    "cloned": (lambda state: state["weight"].clone(), WEIGHT),
    "deep copy": (lambda state: copy.deepcopy(state)["weight"], WEIGHT),
    "converted": (lambda state: state["weight"].to(dtype=torch.float64), WEIGHT.double()),
    "double": (lambda state: state["weight"].double(), WEIGHT.double()),
    "on the CPU": (lambda state: state["weight"].cpu(), WEIGHT),
    "half": (lambda state: state["weight"].to(dtype=torch.bfloat16, device="cpu"), WEIGHT.bfloat16()),
    "changed": (change_in_place, CHANGED),
    "alias": (through_an_alias, WEIGHT + 1),
    "part": (lambda state: state["weight"][1:3].t(), WEIGHT[1:3].t()),
    "sum": (lambda state: torch.cat([state["weight"] @ state["weight"].t(), state["weight"]], 1).sum(), None),
    "parameter": (lambda state: nn.Parameter(state["weight"]), WEIGHT),
    "frozen parameter": (lambda state: nn.Parameter(state["weight"], requires_grad=False), WEIGHT),
    "array": (lambda state: torch.from_numpy(np.asarray(state["weight"]) * 3), WEIGHT * 3),
    "changed array": (changed_array, torch.cat([WEIGHT[:3], torch.zeros(1, 200), WEIGHT[4:]])),
    "pickled": (pickled, WEIGHT),
    "saved by torch": (saved_by_torch, WEIGHT),
    "filled": (filled_by_copies, WEIGHT.double()),
    "lists": (lambda state: torch.tensor(state["weight"].tolist()), WEIGHT),
    "integers": (lambda state: state["counts"] + 1, torch.arange(1, 40_001)),
    "foreach": (lambda state: torch._foreach_mul([state["weight"]], 2.0)[0], WEIGHT * 2),
    "memory": (lambda state: torch.empty_like(state["weight"]).zero_(), WEIGHT * 0),
}


@pytest.mark.parametrize("use", USES)
def test_every_use_sees_values_and_what_is_kept_is_plain(saved, use):
    take, wanted = USES[use]
    taker = Taker(take)
    load(saved, {"thing": taker}, mesh=SOLO)
    wanted = take(STATE) if wanted is None else wanted
    found = taker.found
    assert type(found) is (nn.Parameter if "parameter" in use else torch.Tensor)
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)
    assert found.requires_grad == (use == "parameter")
    with torch.no_grad():
        found.zero_()  # it has memory of its own
    again = Holder()
    load(saved, {"thing": again}, mesh=SOLO)
    assert torch.equal(again.state["weight"], WEIGHT)
    assert vars(found) == {}


def test_what_is_kept_twice_stays_one_tensor_and_aliases_share_memory(saved):
    taker = Taker(lambda state: [state["weight"], {"same": state["weight"]}, state["weight"].detach(), state["bias"]])
    load(saved, {"thing": taker}, mesh=SOLO)
    first, inner, alias, bias = taker.found
    assert first is inner["same"]
    assert alias is not first
    alias.fill_(3)
    assert bool((first == 3).all())
    assert torch.equal(bias, torch.ones(3))


def test_a_generator_takes_its_state_as_before(tmp_path):
    class Drawer:
        def __init__(self, seed):
            self.generator = torch.Generator().manual_seed(seed)

        def state_dict(self):
            return {"generator": self.generator.get_state(), "noise": torch.zeros(3)}

        def load_state_dict(self, state):
            self.generator.set_state(state["generator"])

    first, second = Drawer(1), Drawer(2)
    save(tmp_path / "c", {"drawer": first})
    load(tmp_path / "c", {"drawer": second}, mesh=SOLO)
    assert torch.equal(torch.rand(3, generator=first.generator), torch.rand(3, generator=second.generator))


def test_an_object_that_raises_keeps_plain_tensors(saved):
    class Fussy(Holder):
        def load_state_dict(self, state):
            super().load_state_dict(state)
            raise ValueError("no")

    thing = Fussy()
    with pytest.raises(Exception, match="ValueError: no"):
        load(saved, {"thing": thing}, mesh=SOLO)
    assert type(thing.state["weight"]) is torch.Tensor
    assert torch.equal(thing.state["weight"], WEIGHT)


def test_a_module_that_assigns_what_it_loads_has_parameters(saved):
    class Assigning(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(100, 200))
            self.register_buffer("bias", torch.zeros(3))
            self.register_buffer("counts", torch.zeros(40_000, dtype=torch.int64))
            self.register_buffer("step", torch.tensor(0.0))

        def load_state_dict(self, state, strict=True):  # noqa: ARG002
            return super().load_state_dict(state, assign=True)

    model = Assigning()
    load(saved, {"thing": model}, mesh=SOLO)
    assert type(model.weight) is nn.Parameter
    assert model.weight.requires_grad
    assert torch.equal(model.weight, WEIGHT)
    assert type(model.counts) is torch.Tensor
    model.weight.sum().backward()
    assert torch.equal(model.weight.grad, torch.ones(100, 200))


def test_the_swap_of_parameters_works(saved):
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(100, 200))
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        load(saved, {"thing": model}, mesh=SOLO, strict=False)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    assert torch.equal(model.weight, WEIGHT)
    assert type(model.weight) is nn.Parameter
