"""Loading a state that does not fit: refused with a readable difference, or loaded in part on request."""

import pytest
import torch
from checkpoint.saved_objects import SOLO, Holder, save
from support.processes import on_mesh
from torch import nn

from rankless.checkpoint import load
from rankless.checkpoint.loading import shorten_names
from rankless.errors import CheckpointError


def encoder(classes, layers=12):
    torch.manual_seed(classes)
    blocks = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)])
    return nn.ModuleDict({"blocks": blocks, "head": nn.Linear(4, classes)})


def refusal(path, objects, **options):
    with pytest.raises(CheckpointError) as caught:
        load(path, objects, mesh=SOLO, **options)
    return str(caught.value)


def test_the_error_names_missing_unexpected_and_mismatched_tensors(tmp_path):
    saved = encoder(10)
    saved["old"] = nn.Linear(1, 1, bias=False)
    save(tmp_path / "c", {"model": saved})
    here = encoder(100)
    here["new"] = nn.Linear(2, 2, bias=False)
    before = {key: value.clone() for key, value in here.state_dict().items()}
    text = refusal(tmp_path / "c", {"model": here})
    assert text.splitlines()[2:-1] == [
        "found:    ",
        "not in the checkpoint:",
        "  model.new.weight",
        "only in the checkpoint:",
        "  model.old.weight",
        "of another shape:",
        "  model.head.weight: (10, 4) saved, (100, 4) here",
        "  model.head.bias: (10,) saved, (100,) here",
    ]
    assert all(torch.equal(value, before[key]) for key, value in here.state_dict().items())


def test_many_names_that_differ_in_numbers_are_one_line(tmp_path):
    save(tmp_path / "c", {"model": encoder(10, layers=0)})
    text = refusal(tmp_path / "c", {"model": encoder(10)})
    assert "  model.blocks.*.weight (12 of them)\n  model.blocks.*.bias (12 of them)\n" in text


def test_no_kind_of_difference_takes_more_than_a_few_lines():
    names = [f"model.{letter}" for letter in "abcdefghij"]
    assert shorten_names(names) == [*names[:6], "and 4 more"]


def test_with_strict_false_fitting_tensors_load_and_the_rest_is_reported(tmp_path):
    saved, here = encoder(10), encoder(100)
    save(tmp_path / "c", {"model": saved})
    head = here["head"].weight.clone()
    average = nn.Linear(1, 1)
    loaded = load(tmp_path / "c", {"model": here, "average": average}, mesh=SOLO, strict=False)
    assert torch.equal(here["blocks"][3].weight, saved["blocks"][3].weight)
    assert torch.equal(here["head"].weight, head)
    assert loaded.left_out.splitlines() == [
        "nothing was saved as average",
        "of another shape:",
        "  model.head.weight: (10, 4) saved, (100, 4) here",
        "  model.head.bias: (10,) saved, (100,) here",
    ]
    assert load(tmp_path / "c", {"model": saved}, mesh=SOLO, strict=False).left_out == ""


def test_only_a_dtype_that_loses_precision_is_a_difference(tmp_path):
    save(tmp_path / "c", {"model": nn.Linear(2, 1, bias=False)})
    wide = nn.Linear(2, 1, bias=False).double()
    load(tmp_path / "c", {"model": wide}, mesh=SOLO)
    assert wide.weight.dtype == torch.float64
    narrow = nn.Linear(2, 1, bias=False).bfloat16()
    assert "model.weight: float32 saved, bfloat16 here" in refusal(tmp_path / "c", {"model": narrow})
    load(tmp_path / "c", {"model": narrow}, mesh=SOLO, strict=False)
    assert torch.equal(narrow.weight, wide.weight.bfloat16())


OPTIMIZERS = ["SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"]
OPTIMIZERS += ["Adafactor", "LBFGS"]


def stepped(model, kind=torch.optim.Adam, **options):
    optimizer = kind(model.parameters(), **options)
    model(torch.ones(1, model.in_features)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("strict", [True, False])
def test_an_optimizer_of_other_parameters_raises_although_torch_takes_it(tmp_path, strict):
    save(tmp_path / "c", {"optimizer": stepped(nn.Linear(3, 2))})
    other = torch.optim.Adam(nn.Linear(5, 2).parameters())
    text = refusal(tmp_path / "c", {"optimizer": other}, strict=strict)
    assert "optimizer.state.0.exp_avg: (2, 3) saved, (2, 5) here" in text
    assert other.state == {}
    fewer = torch.optim.Adam(nn.Linear(3, 2, bias=False).parameters())
    assert "2 parameters saved in group 0, 1 here" in refusal(tmp_path / "c", {"optimizer": fewer}, strict=strict)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_of_torch_is_restored(tmp_path, kind):
    model = nn.Linear(3, 2)
    if kind == "LBFGS":
        optimizer = torch.optim.LBFGS(model.parameters())
        optimizer.step(lambda: model(torch.ones(1, 3)).square().sum())
    else:
        options = {"momentum": 0.9} if kind in ("SGD", "RMSprop") else {}
        optimizer = stepped(model, getattr(torch.optim, kind), **options)
    save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    reference = getattr(torch.optim, kind)(nn.Linear(3, 2).parameters())
    load(tmp_path / "c", {"optimizer": reference}, mesh=SOLO)
    assert str(reference.state_dict()) == str(optimizer.state_dict())


def test_the_error_quotes_the_objects_own_exception(tmp_path):
    class Fussy(Holder):
        def load_state_dict(self, _state):
            raise ValueError("no such thing")

    save(tmp_path / "c", {"thing": Holder({"a": 1})})
    assert "ValueError: no such thing" in refusal(tmp_path / "c", {"thing": Fussy()})


def load_misfit(mesh, path, misfit_rank):
    model = encoder(100 if mesh.rank == misfit_rank else 10)
    before = model["blocks"][0].weight.clone()
    try:
        load(path, {"model": model}, mesh=mesh)
    except CheckpointError as error:
        return str(error), torch.equal(model["blocks"][0].weight, before)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_misfit_on_one_rank_restores_nothing_on_any(tmp_path, ranks):
    save(tmp_path / "c", {"model": encoder(10)})
    for error, untouched in on_mesh(ranks, load_misfit, tmp_path / "c", ranks - 1):
        assert untouched
        assert "model.head.weight: (10, 4) saved, (100, 4) here" in error
