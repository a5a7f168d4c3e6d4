"""`rankless.place`: placements at the modules that have the parameters."""

import copy
import json

import pytest
import torch
from mesh_runs import SCRIPT
from support.warm_runs import rankless, run_script
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from rankless.api import place
from rankless.errors import ConfigError
from rankless.parallel.user_plan import list_placed

MODEL = (
    "torch.nn.Sequential(rankless.place(torch.nn.Linear(8, 12), {given}), torch.nn.Tanh(), torch.nn.Linear(12, 8), "
    "torch.nn.Linear(8, 8))"
)


def make_script(given: str, options: str = "") -> str:
    return SCRIPT.format(model=MODEL.replace("{given}", given), options=options, end="")


def find_divisions(folder, script: str) -> dict[str, int]:
    """Return the dims that a run on two workers divides, and assert that its results are those of one device."""
    (folder / "train.py").write_text(script)
    options = ("--mesh", "tensor=2", "--steps", "5", "--save", "plan.json", "train.py")
    found = rankless("plan", *options, folder=folder)
    assert found.returncode == 0, found.stdout + found.stderr
    plain = rankless("run", "--seed", "1", "-q", "train.py", folder=folder)
    divided = rankless("run", "--mesh", "tensor=2", "--seed", "1", "-q", "train.py", folder=folder)
    assert divided.stdout == plain.stdout, divided.stderr
    states = json.loads((folder / "plan.json").read_text())["jobs"]["train"]["states"]
    return {name: state["value"][0]["dim"] for name, state in states.items() if state["value"]}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_placed_parameter_is_divided_so_and_the_plan_chooses_for_others(tmp_path):
    found = find_divisions(tmp_path, make_script("{'weight': Shard(1)}"))
    assert found["model.0.weight"] == 1
    assert "model.0.bias" not in found
    assert {name for name in found if name.startswith(("model.2", "model.3"))}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_plan_of_the_job_has_priority(tmp_path):
    script = make_script("Replicate()", options=", plan=rankless.Plan(tensor={'0.bias': Shard(0)})")
    assert set(find_divisions(tmp_path, script)) == {"model.0.bias", "model.2.weight"}


@pytest.mark.slow
def test_a_name_that_matches_nothing_is_refused(tmp_path):
    found = run_script(make_script("{'wait': Shard(0)}"), "--mesh", "tensor=2", folder=tmp_path)
    assert found.returncode != 0
    printed = found.stdout + found.stderr
    assert "expected: in rankless.place names of parameters of model.0, such as 'weight'" in printed
    assert "found:    'wait', which matches none of 2" in printed


def test_placements_are_copied_with_a_module_and_are_no_state_of_it():
    plain, layer = nn.Linear(2, 2), nn.Linear(2, 2)
    assert place(layer, Shard(0)) is layer
    assert place(layer, {"bias": Replicate()}) is layer
    place(layer, {"weight": Shard(0)}, axis="expert")
    model = copy.deepcopy(nn.Sequential(layer))
    assert list(model[0].state_dict()) == list(plain.state_dict())
    ((name, module, placements),) = list_placed(model, "tensor")
    assert (name, module, placements) == ("0", model[0], {"*": Shard(0), "bias": Replicate()})
    assert [item for _, _, item in list_placed(model, "expert")] == [{"weight": Shard(0)}]
    assert torch.equal(model[0].weight, layer.weight)


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((torch.ones(2), Shard(0)), {}, "found:    Tensor"),
        ((nn.Linear(2, 2), 0), {}, "found:    0"),
        ((nn.Linear(2, 2), {"weight": Partial()}), {}, "for 'weight'"),
        ((nn.Linear(2, 2), {0: Shard(0)}), {}, "for 0"),
        ((nn.Linear(2, 2), Shard(0)), {"axis": "data"}, "found:    axis='data'"),
    ],
)
def test_what_is_no_placement_is_refused(arguments, options, text):
    with pytest.raises(ConfigError, match=text):
        place(*arguments, **options)
