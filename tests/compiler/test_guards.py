"""Guards: which plain values a job reads, and when they require another program."""

import types

import pytest
import torch
from support.devices import DEVICE
from torch import nn

from rankless.compiler.capture import capture as capture_module
from rankless.compiler.guards.guard_discovery import discover_guards
from rankless.compiler.guards.guards import GuardSet
from rankless.context.world import World
from rankless.jobs.arguments import flatten_arguments
from rankless.jobs.job import make_job
from rankless.jobs.programs import program_cache
from rankless.jobs.views.captured import ConsistentView
from rankless.parallel.mesh import Mesh

SCALE = 2.0
SETTINGS = types.SimpleNamespace(optimizer=types.SimpleNamespace(scale=2.0), unread=1.0)


def doubled(value):
    return value * 2


def tripled(value):
    return value * 3


FACTORS = [1.0, 2.0]
APPLIED = doubled


def collect_guards(function, modules) -> GuardSet:
    return discover_guards(function, modules).guard_set({})


def list_labels(guards: GuardSet) -> set[str]:
    return {guard.label for guard in guards.guards}


def failing_label(guards: GuardSet) -> str:
    """Return the label of the first changed value."""
    assert not guards.all_hold()
    guard = guards.first_failing()
    assert guard is not None
    return guard.label


def test_a_closure_value_is_guarded_until_it_changes():
    scale = 1.0

    def job(value):
        return value * scale

    guards = collect_guards(job, {})
    assert guards.all_hold()
    assert guards.first_failing() is None
    scale = 3.0
    assert failing_label(guards) == "scale"


def test_the_guard_of_a_value_that_changes_back_holds_again():
    scale = 1.0

    def job(value):
        return value * scale

    guards = collect_guards(job, {})
    scale = 3.0
    assert not guards.all_hold()
    scale = 1.0
    assert guards.all_hold()


def test_an_equal_number_of_another_type_fails_its_guard():
    scale = 1

    def job(value):
        return value / scale

    guards = collect_guards(job, {})
    scale = 1.0
    assert failing_label(guards) == "scale"


def test_a_global_is_guarded_until_it_changes(monkeypatch: pytest.MonkeyPatch):
    def job(value):
        return value * SCALE

    guards = collect_guards(job, {})
    assert guards.all_hold()
    monkeypatch.setitem(globals(), "SCALE", 5.0)
    assert failing_label(guards) == "SCALE"


def test_a_nested_attribute_is_guarded_and_an_attribute_not_read_is_not(monkeypatch: pytest.MonkeyPatch):
    def job(value):
        return value * SETTINGS.optimizer.scale

    guards = collect_guards(job, {})
    monkeypatch.setattr(SETTINGS, "unread", 7.0)
    assert guards.all_hold()
    monkeypatch.setattr(SETTINGS.optimizer, "scale", 7.0)
    assert failing_label(guards) == "SETTINGS.optimizer.scale"


def test_a_value_read_by_a_function_that_the_job_calls_is_guarded():
    scale = 1.0

    def scaled(value):
        return value * scale

    def job(value):
        return scaled(value)

    guards = collect_guards(job, {})
    assert "scale" in list_labels(guards)
    scale = 2.0
    assert failing_label(guards) == "scale"


def test_a_list_that_grows_or_has_another_entry_fails_its_guard(monkeypatch: pytest.MonkeyPatch):
    def job(value):
        return value * sum(FACTORS)

    monkeypatch.setitem(globals(), "FACTORS", [1.0, 2.0])
    guards = collect_guards(job, {})
    assert guards.all_hold()
    FACTORS.append(3.0)
    assert failing_label(guards) == "FACTORS"
    FACTORS.pop()
    assert guards.all_hold()
    FACTORS[0] = 9.0
    assert failing_label(guards) == "FACTORS"


def test_a_list_of_tensors_that_grows_fails_its_guard():
    kept = [torch.ones(1)]

    def job(value):
        return value + sum(kept)

    guards = collect_guards(job, {})
    assert guards.all_hold()
    kept.append(torch.ones(1))
    assert failing_label(guards) == "kept"


def test_a_function_replaced_under_its_name_fails_its_guard(monkeypatch: pytest.MonkeyPatch):
    def job(value):
        return APPLIED(value)

    guards = collect_guards(job, {})
    assert guards.all_hold()
    monkeypatch.setitem(globals(), "APPLIED", tripled)
    assert failing_label(guards) == "APPLIED"


def test_a_tensor_changed_in_place_passes_its_guard_and_a_rebound_one_fails():
    weights = torch.ones(2)

    def job(value):
        return value * weights

    guards = collect_guards(job, {})
    weights.add_(1.0)
    assert guards.all_hold()
    weights = torch.full((2,), 2.0)
    assert failing_label(guards) == "weights"


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.scale = 1.0
        self.note = "unread"

    def forward(self, value):
        return self.linear(value) * self.scale


def test_an_attribute_that_a_modules_forward_reads_is_guarded():
    model = nn.Sequential(Scaled())

    def job(value):
        return model(value)

    guards = collect_guards(job, {"model": model})
    model[0].note = "still unread"
    assert guards.all_hold()
    model[0].scale = 2.0
    assert failing_label(guards) == "model.0.scale"


def record_captures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows by one entry per capture."""
    captures: list[str] = []

    def capture(source, *arguments, **options):
        captures.append(source.name)
        return capture_module.capture(source, *arguments, **options)

    monkeypatch.setattr(program_cache, "capture", capture)
    return captures


def test_a_changed_value_captures_exactly_once_and_an_unchanged_one_never(monkeypatch: pytest.MonkeyPatch):
    captures, model, scale = record_captures(monkeypatch), Scaled(), 1.0

    def job(features):
        return model(features) * scale

    world = World(mesh=Mesh.solo(DEVICE), notify=lambda _: None, send_record=lambda _: None)
    definition = make_job(job, model=model, optimizer=None, view="consistent", world=lambda: world).definition
    consistent_view, arguments = (
        ConsistentView(definition, world),
        flatten_arguments((torch.ones(2, 3),), {}, torch.device("cpu")),
    )
    wanted = job(arguments.tensors[0]).detach()
    for value, captured in ((1.0, 1), (1.0, 1), (2.0, 2), (2.0, 2), (1.0, 2), (2.0, 2)):
        scale = value
        torch.testing.assert_close(consistent_view.run(arguments).result, wanted * value)
        assert len(captures) == captured
