"""Trainings that were silently wrong at commit e8764fd, or crashed: now the same, or refused with their line."""

import json
from pathlib import Path

import engine_holes
import pytest
from support.warm_runs import rankless

REFUSED = {
    "generator_restored_in_the_job",
    "encoder_outside_the_job",
    "gradient_of_the_batch",
    "parameter_as_an_argument",
    "gradient_read_in_the_job",
    "constants_read_as_numbers",
    "rows_as_a_plain_number",
    "scripted_model",
}
NAMES = [(hole, build.__name__) for hole, builds in engine_holes.HOLES.items() for build in builds]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what the program found on so many workers, by the name of each training that this session tests."""
    folder = tmp_path_factory.mktemp("holes")
    cases = [item.callspec.params for item in request.session.items if item.path == request.path]
    names = [case["name"] for case in cases if case["outcomes"] == request.param]
    done = rankless("run", "-n", str(request.param), engine_holes.__file__, *names, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, str] = json.loads((Path(folder) / "outcomes.json").read_text())
    return found


@pytest.mark.ci_sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("outcomes", [2, pytest.param(3, marks=pytest.mark.exhaustive)], indirect=True)
@pytest.mark.parametrize(("hole", "name"), NAMES)
def test_the_training_is_the_same_or_refused_with_its_line(hole: str, name: str, outcomes: dict[str, str]):
    found = outcomes[name]
    assert found.startswith("refused: ") if name in REFUSED else found == "same", f"{hole}: {found}"
