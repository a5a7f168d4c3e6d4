"""Saves of tables: in series, in the background, from several ranks, and when a process is killed."""

import os
import random
import shutil

import pytest
import torch
from checkpoint.incremental.saved_tables import (
    TableState,
    layer_everything,
    layers_of,
    new_bytes,
    require_loads,
    require_same,
)
from checkpoint.killed_saves import save_until_killed
from checkpoint.saved_objects import SOLO, save
from support.processes import on_mesh

import rankless
from rankless.checkpoint import load
from rankless.errors import CheckpointError
from rankless.parameter_server import ByCount, Embedding

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, 0.1),
    "sparse_adam": lambda parameters: torch.optim.SparseAdam(list(parameters), 0.02),
}
TABLES = {
    "plain": {},
    "expiring": {"expire_after_steps": 6},
    "admitting": {"admission": ByCount(occurrences=2)},
    "capped": {"max_rows": 1024},
}


@pytest.fixture(autouse=True)
def _layered(monkeypatch):
    layer_everything(monkeypatch)


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("table", TABLES)
def test_each_checkpoint_of_a_series_gives_the_table_of_its_step(tmp_path, optimizer, table):
    embedding = Embedding(3, seed=4, **TABLES[table])
    drawn = torch.Generator().manual_seed(0)
    current = OPTIMIZERS[optimizer](embedding.parameters())
    checkpoints = rankless.checkpoints(tmp_path, keep_last=4)
    wanted, layers = {}, set()
    for step in range(1, 25):
        ids = torch.randint(0, 3_000, (1_500 if step == 1 else 20,), generator=drawn) * 7_000_000_007
        embedding(torch.cat([ids, ids])).square().sum().backward()
        current.step()
        current.zero_grad()
        if step == 20:  # states of another optimizer
            current = torch.optim.Adagrad(embedding.parameters(), 0.3, initial_accumulator_value=0.5)
        checkpoints.save(step, model=embedding)
        wanted[step] = embedding.get_extra_state()
        layers.add(len(layers_of(tmp_path / f"step-{step}", "model._extra_state.ids")))
    assert checkpoints.steps == [21, 22, 23, 24]
    assert max(layers) > 1
    for step in checkpoints.steps:
        found = Embedding(3, seed=99, **TABLES[table])
        rankless.load(tmp_path / f"step-{step}", model=found)
        require_same(found.get_extra_state(), wanted[step])


def test_checkpoints_of_a_series_are_whole_without_the_others(tmp_path):
    embedding = Embedding(8, seed=4)
    optimizer = torch.optim.Adagrad(embedding.parameters(), 0.1)
    ids = torch.arange(5_000)
    checkpoints = rankless.checkpoints(tmp_path / "run", keep_last=2)
    for step in range(1, 6):
        embedding(ids if step == 1 else ids[step * 10 : step * 10 + 5]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoints.save(step, model=embedding)
    assert checkpoints.steps == [4, 5]
    layers = layers_of(tmp_path / "run" / "step-5", "model._extra_state.ids")
    assert len(layers) > 2
    assert layers[:-1] == layers_of(tmp_path / "run" / "step-4", "model._extra_state.ids")
    assert new_bytes(tmp_path / "run" / "step-5") < 0.1 * (tmp_path / "run" / "step-5" / layers[0]).stat().st_size
    shutil.copytree(tmp_path / "run" / "step-5", tmp_path / "copy")
    shutil.rmtree(tmp_path / "run")
    found = Embedding(8)
    rankless.load(tmp_path / "copy", model=found)
    require_same(found.get_extra_state(), embedding.get_extra_state())


def test_a_file_that_two_checkpoints_share_is_damaged_in_both_and_not_in_the_next(tmp_path):
    table = TableState({each: torch.full((3,), float(each)) for each in range(200)})
    checkpoints = rankless.checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, table=table)
    (name,) = layers_of(tmp_path / "step-2")
    file = tmp_path / "step-2" / name
    assert file.stat().st_nlink == 2
    data = bytearray(file.read_bytes())
    data[-9] ^= 64
    file.write_bytes(data)
    for step in (1, 2):
        with pytest.raises(CheckpointError, match="another checksum"):
            load(tmp_path / f"step-{step}", {"table": TableState()}, mesh=SOLO)
    checkpoints.save(3, table=table)
    require_loads(tmp_path / "step-3", table.state_dict(), SOLO)


def make_changed(number):
    rows = {each: torch.full((3,), float(each)) for each in range(300)}
    rows |= {each: torch.full((3,), -1.0 - number) for each in range(number, 20 + number)}
    for each in range(100, 100 + 3 * number):
        del rows[each]
    return TableState(rows, waiting=dict.fromkeys(range(-30, 0), number + 1))


def save_changed(mesh, path, layout, background, number):
    layer_everything(pytest.MonkeyPatch())  # in a process of the tests' own
    save(
        path, {"table": make_changed(number), "other": make_changed(2)}, mesh=mesh, layout=layout, background=background
    )


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "background"), [("whole", True), ("sharded", False), ("sharded", True)])
def test_several_ranks_save_what_has_changed(tmp_path, layout, background):
    for number in range(3):
        on_mesh(2, save_changed, tmp_path / "c", layout, background, number)
        require_loads(tmp_path / "c", make_changed(number).state_dict(), SOLO)
    assert len(layers_of(tmp_path / "c")) == 3


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("step", [2, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_save_of_changes_killed_at_any_point_leaves_the_old_or_the_new_table(tmp_path, monkeypatch, background, step):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    old, new = make_changed(1), make_changed(4)
    save(tmp_path / "old", {"table": make_changed(0)})
    save(tmp_path / "old", {"table": old})
    outcomes, finished, points = [], False, 1
    while not finished:
        path = tmp_path / str(points) / "c"
        shutil.copytree(tmp_path / "old", path)
        finished = save_until_killed(path, {"table": new}, points=points, background=background)
        found = TableState()
        load(path, {"table": found}, mesh=SOLO)
        outcomes.append(torch.equal(found.loaded["rows"], new.state_dict()["rows"]))
        require_same(found.loaded, (new if outcomes[-1] else old).state_dict())
        save(path, {"table": old})
        require_loads(path, old.state_dict(), SOLO)
        assert os.listdir(path.parent) == ["c"]
        points += step
    assert outcomes == sorted(outcomes)
    assert len(outcomes) > 60 // step
    assert len(layers_of(path)) > 2


def test_the_script_may_change_a_table_while_it_is_saved_in_the_background(tmp_path):
    class Live:
        def __init__(self):
            self.state = make_changed(1).state_dict()

        def state_dict(self):
            return self.state

    live = Live()
    wanted = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in live.state.items()}
    checkpoints = rankless.checkpoints(tmp_path, background=True)
    for step in range(3):
        checkpoints.save(step, table=live)
        live.state["rows"].add_(random.random())
        checkpoints.wait()
        require_loads(tmp_path / f"step-{step}", wanted, SOLO)
        live.state["rows"].copy_(wanted["rows"])
