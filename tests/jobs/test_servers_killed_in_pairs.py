"""500 kills of servers, in pairs within a second: none stops a run, and training computes the same bits."""

import json
import re
from pathlib import Path

import pytest
from support.warm_runs import rankless

SCRIPT = Path(__file__).parent / "scripts/train_while_servers_die_in_pairs.py"
STEPS = 150


def train(folder: Path, pairs: int, seed: int) -> dict:
    options = ("--servers", "2", "--workers", "2", "--seed", "1", "--no-progress", "--server-restarts", "1000")
    done = rankless("run", *options, str(SCRIPT), *map(str, (pairs, seed, STEPS)), folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(re.search("RESULT (.*)", done.stdout)[1])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return train(tmp_path_factory.mktemp("undisturbed"), 0, 0)["digest"]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(1, 11))  # --last-failed or -k goes on with those that are left
def test_pairs_of_killed_servers_change_no_bit(tmp_path, undisturbed, seed):
    assert train(tmp_path, 25, seed) == {"digest": undisturbed, "killed": 50}
