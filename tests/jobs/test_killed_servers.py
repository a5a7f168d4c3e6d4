"""Servers that are killed at random moments lose nothing: the run continues, and its tables are bitwise the same."""

import re
from pathlib import Path

import pytest
from support.warm_runs import rankless

SCRIPT = Path(__file__).parent / "scripts/lose_servers.py"


def run(folder, kills: int, seed: int, steps: int) -> tuple[str, int, str]:
    options = ("--servers", "2", "--workers", "2", "--seed", "1", "--no-progress", "--server-restarts", "200")
    done = rankless("run", *options, str(SCRIPT), *map(str, (kills, seed, steps)), folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    digest, killed = re.search(r"RESULT (\w+) (\d+)", done.stdout).groups()
    return digest, int(killed), done.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kills", "seed", "steps"),
    [(5, 1, 60), *(pytest.param(12, seed, 300, marks=pytest.mark.exhaustive) for seed in range(2, 8))],
)
def test_tables_after_kills_are_bitwise_those_of_an_undisturbed_run(tmp_path, kills, seed, steps):
    wanted, _, _ = run(tmp_path, 0, seed, steps)
    found, killed, messages = run(tmp_path, kills, seed, steps)
    assert killed == kills
    assert found == wanted
    assert "was killed by SIGKILL; started again in" in messages
    assert "continues after" in messages
