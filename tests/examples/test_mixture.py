"""The transformer with experts prints the losses of one device on every mesh, and moves tokens by all-to-all."""

import json
import re
from pathlib import Path

import pytest
from support.warm_runs import rankless

EXAMPLE = Path(__file__).parents[2] / "examples" / "mixture.py"


def run(folder: Path, mesh: str, *options: str) -> list[float]:
    """Return the losses, and the percentages of choices left out, that the example prints."""
    where = ("--mesh", mesh) if mesh else ()
    done = rankless("run", *where, "-q", str(EXAMPLE), "--steps", "4", *options, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(number) for number in re.findall(r"loss ([\d.]+), ([\d.]+)%", done.stdout)[-1]]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_example_prints_the_same_on_every_mesh(tmp_path):
    wanted = run(tmp_path, "")
    assert wanted[1] > 0
    assert run(tmp_path, "data=2,expert=2", "--save", "saved") == pytest.approx(wanted, rel=2e-3)
    further = run(tmp_path, "", "--load", "saved")
    assert further[0] < wanted[0]
    assert run(tmp_path, "expert=2,tensor=2", "--load", "saved") == pytest.approx(further, rel=5e-3)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_tokens_move_to_their_experts_and_back_by_all_to_all(tmp_path):
    found = rankless("plan", "--mesh", "expert=2", "--json", "plan.json", str(EXAMPLE), "--steps", "2", folder=tmp_path)
    assert found.returncode == 0, found.stderr
    (job,) = json.loads((tmp_path / "plan.json").read_text())["jobs"]
    large = [move for move in job["program"]["moves"] if move["bytes"] > 300_000]
    assert {(move["kind"], move["axis"]) for move in large} == {("all_to_all", "expert")}
    assert [move["backward"] for move in large].count(False) == 4  # to the experts and back, in two layers
    assert [move["backward"] for move in large].count(True) == 4
