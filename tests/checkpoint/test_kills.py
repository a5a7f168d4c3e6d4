"""A save killed at any point leaves the old checkpoint or the new one, and does not block the next save."""

import os
import shutil

import pytest
from checkpoint.killed_saves import save_until_killed
from checkpoint.saved_objects import Number, loaded_number, save

OLD, NEW, NEXT = 1, 2, 3


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch):
    """A kill does not lose what the system has buffered, so fsync has no effect here."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def outcomes_of_kills(folder, *, step=1, **how):
    """Return what loads after a kill at each point of a save, from the first to the last."""
    outcomes = []
    points = 1
    finished = False
    save(folder / "old", {"number": Number(OLD)})
    while not finished:
        path = folder / str(points) / "c"
        shutil.copytree(folder / "old", path)
        finished = save_until_killed(path, {"number": Number(NEW)}, points=points, **how)
        outcomes.append(loaded_number(path))
        save(path, {"number": Number(NEXT)})
        assert loaded_number(path) == NEXT
        assert os.listdir(path.parent) == ["c"]
        points += step
    return outcomes


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("background", "step"), [(False, 1), (True, 2)])
def test_a_save_killed_at_100_points_leaves_the_old_or_the_new_checkpoint(tmp_path, background, step):
    outcomes = outcomes_of_kills(tmp_path, background=background, step=step)
    assert len(outcomes) >= 100 // step
    assert set(outcomes) == {OLD, NEW}
    assert outcomes == sorted(outcomes)


@pytest.mark.ci_sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "killed_rank", "background"), [(2, 0, False), (2, 1, True), (3, 2, False)])
def test_a_kill_of_any_rank_of_a_sharded_save_leaves_the_old_or_the_new_checkpoint(
    tmp_path, ranks, killed_rank, background
):
    how = {"layout": "sharded", "ranks": ranks, "killed_rank": killed_rank, "background": background}
    outcomes = outcomes_of_kills(tmp_path, step=7, **how)
    assert len(outcomes) >= 8
    assert outcomes[0] == OLD
    assert outcomes[-1] == NEW
    assert set(outcomes) == {OLD, NEW}


@pytest.mark.exhaustive
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("ranks", "killed_rank"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_every_point_of_every_rank(tmp_path, ranks, killed_rank, background):
    outcomes = outcomes_of_kills(
        tmp_path, layout="sharded", ranks=ranks, killed_rank=killed_rank, background=background
    )
    assert len(outcomes) >= 30
    assert set(outcomes) == {OLD, NEW}


@pytest.mark.slow
def test_a_first_save_that_is_killed_does_not_block_the_next(tmp_path):
    for points in range(1, 200, 7):
        path = tmp_path / str(points) / "c"
        path.parent.mkdir()
        finished = save_until_killed(path, {"number": Number(NEW)}, points=points)
        if path.exists():
            assert loaded_number(path) == NEW
        save(path, {"number": Number(NEXT)})
        assert loaded_number(path) == NEXT
        assert os.listdir(path.parent) == ["c"]
        if finished:
            break
    assert finished
