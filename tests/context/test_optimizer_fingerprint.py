"""What an optimizer's fingerprint contains: values of every kind, changes, and what the error makes of them."""

import subprocess
import sys

import numpy
import pytest
import torch
from torch import nn

from rankless.context.changes_outside_jobs import OptimizerChanges
from rankless.context.optimizer_fingerprint import OptimizerComparison, encode_hyperparameters


def make_comparison(*optimizers: torch.optim.Optimizer, module: nn.Module) -> OptimizerComparison:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return OptimizerComparison(optimizers, OptimizerChanges(), name_parameter=lambda item: names[id(item)])


def make_model() -> nn.Linear:
    return nn.Linear(2, 1)


def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.mark.parametrize(
    "value",
    [
        0.5,
        (0.9, 0.99),
        None,
        True,
        "a",
        {"b", "a"},
        numpy.float32(0.5),
        1 + 2j,
        2**70,
        torch.float16,
        torch.tensor(0.5),
        torch.zeros(100),
        object(),
        len,
        {"nested": [1, {"deep": torch.tensor([1.0])}]},
        {1: 2},
        b"bytes",
    ],
    ids=lambda value: type(value).__name__,
)
def test_settings_of_every_kind_are_encoded_and_unchanged_settings_are_no_change(value):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["own"] = value
    comparison = make_comparison(optimizer, module=model)
    first, second = comparison.fingerprint(), comparison.fingerprint()
    assert first.digests == second.digests
    assert (bool(first.details), second.details) == (True, b"")


def test_no_address_and_no_order_of_a_set_is_part_of_the_fingerprint():
    """This process orders its sets in another way than one with a fixed seed of hashes, but once in 40,000 times."""
    text = (
        "import torch; from rankless.context.optimizer_fingerprint import encode_hyperparameters as encode\n"
        "optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)\n"
        "optimizer.param_groups[0].update(a=set('stuvwxyz'), b=object(), c=print, d=lambda: 0)\n"
        "found = encode(optimizer).hex()\n"
    )
    here: dict[str, object] = {"__name__": "__main__"}
    exec(text, here)
    words = [sys.executable, "-c", text + "print(found)"]
    other = subprocess.run(words, env={"PYTHONHASHSEED": "1"}, capture_output=True, text=True, check=True)
    assert other.stdout == f"{here['found']}\n"


def test_each_setting_of_each_group_changes_the_encoding():
    model = nn.Sequential(make_model(), make_model())
    groups = [{"params": part.parameters()} for part in model]
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.1))
    seen = {encode_hyperparameters(optimizer)}
    changes: list[tuple[str, object]] = [
        ("betas", (0.8, 0.9)),
        ("eps", 1e-3),
        ("weight_decay", 0.0),
        ("maximize", True),
    ]
    for group in optimizer.param_groups:
        for name, value in changes:
            group[name] = value
            seen.add(encode_hyperparameters(optimizer))
        group["lr"].mul_(0.5)
        seen.add(encode_hyperparameters(optimizer))
    assert len(seen) == 11


def test_the_description_has_the_values_of_all_ranks_of_several_optimizers():
    sides = []
    for rank in range(3):
        models = make_model(), make_model()
        optimizers = torch.optim.SGD(models[0].parameters(), lr=0.1), torch.optim.Adam(models[1].parameters(), lr=0.2)
        comparison = make_comparison(*optimizers, module=nn.ModuleList(models))
        comparison.fingerprint()
        optimizers[1].param_groups[0]["lr"] = 0.3 if rank == 1 else 0.4
        if rank == 2:
            del optimizers[1].param_groups[0]["eps"]
        sides.append(comparison.fingerprint())
    assert [side.digests[:2] for side in sides] == [sides[0].digests[:2]] * 3
    described = sides[0].describe(
        ["hyperparameters of optimizer 1 (Adam)"], {rank: side.details for rank, side in enumerate(sides)}
    )
    assert described is not None
    assert described[0] == (
        "lr of param group 0 is 0.4 on ranks 0, 2, 0.3 on rank 1; "
        "eps of param group 0 is 1e-08 on ranks 0, 1, absent on rank 2"
    )


def test_changes_that_are_too_long_to_be_posted_are_found_but_not_described():
    model = nn.ModuleList(make_model() for _ in range(400))
    sides = []
    for rank in range(2):
        optimizer = torch.optim.SGD([{"params": [part.weight], "lr": 0.1} for part in model], lr=0.1)
        comparison = make_comparison(optimizer, module=model)
        comparison.fingerprint()
        for group in optimizer.param_groups:
            group["lr"] = 0.2 + rank
        sides.append(comparison.fingerprint())
    assert sides[0].digests != sides[1].digests
    names = ["hyperparameters of optimizer SGD"]
    assert sides[0].describe(names, {rank: side.details for rank, side in enumerate(sides)}) is None


def test_a_step_is_no_change_once_it_is_recorded_and_dead_tensors_are_no_match():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    changes = OptimizerChanges()
    assert changes.find_changes(optimizer) is None
    step(model, optimizer)
    changes.record(optimizer)
    assert changes.find_changes(optimizer) is None
    for _ in range(50):  # a new tensor may get the address and the version of the old one
        del optimizer.state[model.weight]["momentum_buffer"]
        optimizer.state[model.weight]["momentum_buffer"] = torch.zeros(1, 2).add_(0)
        found = changes.find_changes(optimizer)
        assert found is not None
        assert [(entry.parameter, entry.key) for entry in found] == [(0, "momentum_buffer")]


def test_optimizers_with_state_of_other_kinds_are_compared():
    class Unusual(torch.optim.SGD):
        state = None  # type: ignore[assignment]

    model = make_model()
    changes = OptimizerChanges()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    plain.state["global"] = {"count": 3, "names": ["a"]}
    changes.record(plain)
    plain.state["global"]["count"] = 4
    found = changes.find_changes(plain)
    assert found is not None
    assert [(entry.parameter, entry.key) for entry in found] == [(-1, "global count")]
    unusual = Unusual(model.parameters(), lr=0.1)
    unusual.state = None  # type: ignore[assignment]
    assert changes.find_changes(unusual) is None
