"""Ranks compare and share what the owner says that they hold in common."""

import pytest
import torch
from support.processes import on_mesh
from support.two_axes import make_two_axes
from torch import nn

from rankless.context.world import World
from rankless.errors import RanksDiverged
from rankless.jobs.job import make_job
from rankless.jobs.job_definition import StepOptions
from rankless.jobs.model_sync_between_ranks import check_models_equal, find_differing_tensors, sync_tensors
from rankless.ownership.partitioned_tensor import find_partition
from rankless.ownership.sharded_state_owner import ShardedStateOwner
from rankless.parallel.mesh import Mesh
from rankless.records.parallel_plan import JobPlan, StateDivision, StatePlan


def make_divided_model(mesh: Mesh) -> tuple[World, nn.Linear, object, list[str]]:
    """Return a model whose weight is divided along the first axis, while its bias is whole."""
    notices: list[str] = []
    world = World(mesh=mesh, notify=notices.append, send_record=lambda _: None)
    torch.manual_seed(0)
    model = nn.Linear(3, 6)
    job = make_job(
        lambda x: model(x).sum(),
        model=model,
        optimizer=None,
        view=None,
        world=lambda: world,
        step_options=StepOptions(),
    )
    owner = world.owner
    assert isinstance(owner, ShardedStateOwner)
    divisions = (StateDivision(axis="data", dim=0, lengths=(3, 3)),)
    weight = StatePlan(shape=(6, 3), dtype="float32", value=divisions, gradient=divisions, optimizer_state=divisions)
    owner.divide(JobPlan(states={"model.weight": weight}), {"model.weight": model.weight}, line="here")
    owner.begin_call()
    return world, model, job, notices


def change(model: nn.Linear, what: str) -> None:
    with torch.no_grad():
        if what == "piece":
            partition = find_partition(model.weight)
            assert partition is not None
            partition.shard.add_(1)
        else:
            model.bias.data.add_(1)


def compare(mesh: Mesh, has_two_axes: bool, what: str, changed_rank: int) -> tuple[dict[str, list[int]], str]:
    """Return what differs after one rank has changed something, and the error of the check."""
    world, model, job, _ = make_divided_model(make_two_axes(mesh, "sequence") if has_two_axes else mesh)
    if mesh.rank == changed_rank:
        change(model, what)
    definition = job.definition
    tensors = [("weight", model.weight), ("bias", model.bias)]
    found = find_differing_tensors(tensors, definition, world)
    try:
        check_models_equal(definition, world, call=1)
    except RanksDiverged as error:
        return found, str(error)
    return found, ""


def test_private_pieces_of_a_divided_parameter_may_differ():
    assert on_mesh(2, compare, False, "piece", 1) == [({}, "")] * 2


def test_a_whole_parameter_beside_a_divided_one_must_be_equal():
    for found, error in on_mesh(2, compare, False, "bias", 1):
        assert found == {"bias": [1]}
        assert "bias on rank 1 not rank 0's" in error


@pytest.mark.parametrize("changed_rank", [1, 3])
def test_equal_pieces_are_compared_along_the_axes_that_do_not_divide_them(changed_rank: int):
    for found, error in on_mesh(4, compare, True, "piece", changed_rank):
        assert found == {"weight": [changed_rank]}
        assert f"weight on rank {changed_rank}" in error


def test_pieces_that_differ_along_the_axis_that_divides_them_are_no_error_on_two_axes():
    assert on_mesh(4, compare, True, "nothing", -1) == [({}, "")] * 4


def share(mesh: Mesh) -> tuple[bool, list[str]]:
    """Two ranks change their pieces; return whether sharing has restored this rank's, and the notices."""
    world, model, job, notices = make_divided_model(make_two_axes(mesh, "sequence"))
    partition = find_partition(model.weight)
    assert partition is not None
    before = partition.shard.clone()
    if mesh.rank in (1, 3):
        change(model, "piece")
    sync_tensors([("weight", model.weight)], job.definition, world, when="in a test")
    return bool(torch.equal(partition.shard, before)), notices


def test_pieces_that_should_be_equal_are_shared_along_the_axes_that_do_not_divide_them():
    for is_restored, notices in on_mesh(4, share):
        assert is_restored
        assert "weight on rank 1, 3 not rank 0's" in notices[0]
