"""The recorded traffic of a program equals what `torch.distributed` communicates, and jobs warn of gathers."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.processes import on_mesh
from torch import Tensor, nn

from rankless.context.world import RunSettings, World
from rankless.jobs.arguments import flatten_arguments, get_shardings
from rankless.jobs.job_definition import JobDefinition
from rankless.jobs.programs.bound_program import collect_inputs
from rankless.jobs.programs.program_cache import ProgramCache
from rankless.jobs.programs.program_recorder import describe_program
from rankless.jobs.views.captured import ConsistentView
from rankless.parallel.mesh import Mesh
from rankless.records.job_programs import JobProgram
from rankless.records.program_by_module import describe_gather_place, list_gather_places
from rankless.terminal.plan_table import make_plan_report, render_plan
from rankless.torch_versions import find_name
from rankless.user_code import display_name

GATHER = find_name(dist, "all_gather_single")

pytestmark = pytest.mark.slow


class Layers(nn.Module):
    """Every kind of collective of the data axis: gathered and reduced statistics, a gathered batch, gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(3))
        self.last = nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        values = self.first(inputs)
        for norm in self.norms:
            values = norm(values)
        return self.last(values)


@contextmanager
def count_bytes() -> Iterator[list[tuple[str, int]]]:
    """Record inside the context the bytes of every whole value in a collective."""
    seen: list[tuple[str, int]] = []
    originals = dist.all_reduce, getattr(dist, GATHER)

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(("all_reduce", tensor.nbytes))
        return originals[0](tensor, *args, **kwargs)

    def all_gather_single(output: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(("all_gather", output.nbytes))
        return originals[1](output, *args, **kwargs)

    replace_collectives(all_reduce, all_gather_single)
    try:
        yield seen
    finally:
        replace_collectives(*originals)


def replace_collectives(all_reduce: Callable[..., Any], all_gather_single: Callable[..., Any]) -> None:
    dist.all_reduce = all_reduce
    setattr(dist, GATHER, all_gather_single)


def compare_plan_with_traffic(mesh: Mesh, rows: int, dtype: torch.dtype) -> tuple[JobProgram, list[tuple[str, int]]]:
    torch.manual_seed(0)
    model = Layers().to(dtype)
    labels = torch.randint(0, 4, (rows,))

    def train(inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs), labels) + torch.cumsum(inputs, 0).square().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = JobDefinition(
        name="train", function=train, modules={"model": model}, optimizers=(optimizer,), line="train.py:1"
    )
    world = World(mesh=mesh, notify=lambda _text: None, send_record=lambda _record: None)
    arguments = flatten_arguments((torch.randn(rows, 6, dtype=dtype), labels), {}, mesh.device)
    shardings = get_shardings(arguments, mesh)
    programs = ProgramCache(job, world)
    executable = programs.capture_program(programs.look_up(arguments, shardings))
    values = collect_inputs(executable, arguments, shardings, mesh)
    with count_bytes() as moved:
        executable.local(values)
    return describe_program(job, executable.local), moved


@pytest.mark.ci_sample(2)
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_redistributions_have_their_bytes_in_program_order(workers: int, dtype: torch.dtype) -> None:
    program, moved = on_mesh(workers, compare_plan_with_traffic, 6, dtype)[0]
    assert [(move.kind, move.bytes) for move in program.moves] == moved
    assert {move.kind for move in program.moves} == {"all_reduce", "all_gather"}
    assert len(moved) >= 3 + 1 + 1 + 3 + 1
    for move in program.moves:
        share = move.bytes * (workers - 1) // workers
        assert move.sent_bytes in (share, 2 * share, 2 * move.bytes * (workers - 1) // workers)


def test_inputs_have_placements_and_redistributions_name_script_lines() -> None:
    program, _ = on_mesh(3, compare_plan_with_traffic, 7, torch.float32)[0]
    arguments = [item.placement for item in program.inputs if item.kind == "argument"]
    assert arguments == ["dim 0 split 3+2+2"] * 2
    assert all(item.placement == "whole on every worker" for item in program.inputs if item.kind != "argument")
    here = re.escape(display_name(__file__))
    assert all(re.fullmatch(here + r":\d+", move.line) and move.reason for move in program.moves)
    gradients = [move for move in program.moves if move.overlapped]
    assert sorted(name for move in gradients for name in move.value.split(", ")) == sorted(
        item.name for item in program.inputs if item.kind == "parameter" and "norms" not in item.name
    )  # a batch norm's gradients are whole already: they are sums that its input's gradient needed
    assert sum(move.bytes for move in gradients) == 4 * (6 * 8 + 8 + 8 * 4 + 4)


class SumsOverBatch(nn.Module):
    """A layer that needs the whole batch."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.cumsum(0)


class Mixed(nn.Module):
    """Layers that gather (sums over rows of the batch), merge statistics, reduce extrema, and join an empty cache."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.layers = nn.ModuleList(SumsOverBatch() for _ in range(3))
        self.norm = nn.BatchNorm1d(32)
        self.last = nn.Linear(32, 4)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        values = self.attention(inputs, inputs, inputs, need_weights=False)[0]
        for layer in self.layers:
            values = values + layer(values)
        cached = torch.cat([values.new_empty(0), values], dim=-2)
        return self.last(self.norm(cached.mean(1))) - values.max(), cached


COLLECTIVES = {
    "c10d::allreduce_": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::alltoall_base_": "all_to_all",
}


class KeptPrograms:
    """Receives the programs of a job, as `rankless plan` does."""

    def __init__(self) -> None:
        self.programs: list[JobProgram] = []

    def record(self, job: Any, local: Any) -> None:
        self.programs.append(describe_program(job, local))

    def run(self, _job: Any, bound: Any, values: Any, sizes: Any) -> Any:
        return bound.local(values, sizes)

    def finish(self, known: Any) -> None:
        """There is no file to close."""


def compare_plan_with_profile(mesh: Mesh, rows: int) -> tuple[JobProgram, list[str], list[str]]:
    """Return the plan of a job, the collectives that PyTorch's profiler saw in its second call, and all notices."""
    torch.manual_seed(0)
    model = Mixed()

    def train(inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores, cached = model(inputs)
        return F.cross_entropy(scores, labels), cached, scores.argmax(1)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = JobDefinition(
        name="train", function=train, modules={"model": model}, optimizers=(optimizer,), line="train.py:1"
    )
    notices: list[str] = []
    kept = KeptPrograms()
    world = World(
        mesh=mesh, notify=notices.append, send_record=lambda _record: None, settings=RunSettings(programs=kept)
    )
    view = ConsistentView(job, world)
    inputs, labels = torch.randn(rows, 40, 32), torch.randint(0, 4, (rows,))
    view.run(flatten_arguments((inputs, labels), {}, mesh.device))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        view.run(flatten_arguments((inputs, labels), {}, mesh.device))
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    ran = [COLLECTIVES.get(event.name, event.name) for event in events if event.name.startswith("c10d::")]
    (program,) = kept.programs
    return program, ran, notices


def test_the_plan_lists_exactly_the_collectives_that_run() -> None:
    for program, ran, notices in on_mesh(2, compare_plan_with_profile, 16):
        assert [move.kind for move in program.moves] == ran
        gathers = [move for move in program.moves if move.gathered]
        inputs = [move for move in gathers if move.purpose == "input"]
        assert {move.module for move in inputs} == {f"model.layers.{layer}" for layer in range(3)}
        assert {move.module_type for move in inputs} == {"SumsOverBatch"}
        assert {move.backward for move in inputs} == {False, True}
        assert {move.reason for move in inputs} == {"input of cumsum", "input of flip"}
        outputs = [move.reason for move in program.moves if move.purpose == "output"]
        assert sorted(outputs) == ["result 1", "result 2", "the loss"]
        assert [move.reason for move in gathers if move.purpose == "output"] == ["result 1", "result 2"]
        assert 0 < program.whole_operators < program.operators
        forward, backward, returned = notices
        modules = "of model.layers.[0-2] (SumsOverBatch)"
        assert forward.startswith(f"{display_name(__file__)}:")
        assert f"cumsum {modules} gathers 246 kB per step: its rule does not fit" in forward
        assert f"flip {modules} in backward gathers" in backward
        assert returned.startswith("train.py:1: job 'train' returns 82.0 kB of tensors that every rank gathers")


class Gathering(nn.Module):
    """Layers with a rule that does not fit, layers without a rule, and layers that gather little."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(32, 32)
        self.norms = nn.ModuleList(SumsOverBatch() for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        values = self.first(inputs)
        if "no rule" in self.kind:
            values = values + values.median()
        if "norms" in self.kind:
            for norm in self.norms:
                values = norm(values.square())
        if "small" in self.kind:
            values = values + torch.cumsum(values[:, :1, :1], 0)
        return values.square().mean()


GATHERING = ["norms", "no rule", "small", "none"]


def list_notices_and_plan(mesh: Mesh, kind: str) -> tuple[list[str], str, JobProgram]:
    torch.manual_seed(0)
    model = Gathering(kind).double()
    job = JobDefinition(
        name="train",
        function=lambda inputs: model(inputs),
        modules={"model": model},
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.1),),
        line="train.py:1",
    )
    notices: list[str] = []
    kept = KeptPrograms()
    view = ConsistentView(
        job,
        World(mesh=mesh, notify=notices.append, send_record=lambda _record: None, settings=RunSettings(programs=kept)),
    )
    for _ in range(3):
        view.run(flatten_arguments((torch.randn(16, 20, 32, dtype=torch.float64),), {}, mesh.device))
    view.run(flatten_arguments((torch.randn(14, 20, 32, dtype=torch.float64),), {}, mesh.device))
    return notices, render_plan(make_plan_report(kept.programs, workers=mesh.size, steps=3), 1000), kept.programs[0]


@pytest.mark.parametrize("kind", GATHERING)
@pytest.mark.ci_sample(2)
def test_a_run_warns_of_exactly_the_costly_places_that_the_plan_lists(kind: str) -> None:
    for notices, plan, program in on_mesh(2, list_notices_and_plan, kind):
        warned = [
            re.fullmatch(r"(.*): job 'train' runs in full on every rank: (.*) \(correct, .*\)", text)
            for text in notices
        ]
        found = {f"{os.path.basename(match[1])}: {match[2]}" for match in warned if match}
        listed = {line.strip() for line in plan.splitlines() if "per step:" in line or "takes gathered" in line}
        places = list_gather_places(program)
        costly = {place for place in places if place.is_costly}
        assert found == {f"{os.path.basename(place.line)}: {describe_gather_place(place)}" for place in costly}
        assert len(found) == len(warned) == len([match for match in warned if match])
        assert found <= listed
        # Each gathered input of the program is in exactly one place, with its bytes.
        moved = [move.bytes for move in program.moves if move.gathered and move.purpose == "input"]
        assert sum(place.values for place in places) == len(moved)
        assert sum(place.bytes for place in places) == sum(moved)
        if "norms" in kind:
            assert any(place.has_rule for place in costly)
        assert any(not place.has_rule for place in costly) == ("no rule" in kind)
        if "small" in kind:
            assert any(not place.is_costly for place in places)
        if kind in ("small", "none"):
            assert not costly
            assert bool(places) == (kind == "small")
