"""The benchmarks measure what they say. No figure is judged here: a busy machine must not fail a test."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.warm_runs import rankless

from bench import commands
from bench.__main__ import MODULES
from bench.commands import SCRIPTS, rankless_run, seconds_to_report, torchrun
from bench.pairs import make_row, measure

ROOT = Path(__file__).parents[2]


def run(command: list[str], *, folder: Path) -> None:
    """Have a script of a benchmark done, as its command line says; what starts cost is timed in another test."""
    done = rankless(*command[1:], folder=folder, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_benchmark_can_be_imported():
    for name in MODULES.values():
        assert importlib.import_module(f"bench.{name}").rows, name


def test_a_row_tells_the_median_of_ratios_not_the_ratio_of_medians():
    found = make_row("x", peer="y", times=[(1.0, 2.0), (4.0, 4.0), (30.0, 10.0)], aim=1.05)
    assert (found.ratio, found.runs, found.ours_seconds, found.peer_seconds) == (1.0, 3, 4.0, 4.0)
    assert found.spread == 2.5


def test_who_goes_first_alternates_and_the_first_pair_does_not_count():
    calls: list[str] = []

    def timed(name: str, seconds: float) -> float:
        calls.append(name)
        return seconds

    times = measure(lambda: timed("ours", 1.0), lambda: timed("peer", 2.0), pairs=2)
    assert times == [(1.0, 2.0), (1.0, 2.0)]
    assert calls == ["ours", "peer", "ours", "peer", "peer", "ours"]


@pytest.mark.slow
def test_the_table_of_help_is_printed_and_written_down(tmp_path: Path):
    rows = tmp_path / "rows.json"
    command = [sys.executable, "-m", "bench", "help", "--json", rows]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "python -c pass" in done.stdout
    (written,) = json.loads(rows.read_text())
    assert {"name", "peer", "ratio", "spread", "runs"} <= set(written)
    assert written["ratio"] > 0


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(rankless_run(2, "first_collective.py"), marks=pytest.mark.exhaustive),
        torchrun(2, "first_collective.py"),
        rankless_run(2, "first_result_rankless.py"),
        pytest.param(torchrun(2, "first_result_ddp.py"), marks=pytest.mark.exhaustive),
        rankless_run(2, "first_batch_tables.py", servers=2),
        pytest.param(rankless_run(2, "first_batch_tables.py"), marks=pytest.mark.exhaustive),
    ],
    ids=["rankless collective", "torchrun collective", "rankless result", "torchrun result", "servers", "tables"],
)
def test_a_start_is_timed_to_what_rank_0_reports(command: list[str]):
    assert 0.1 < seconds_to_report(command) < 200


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("lengths", ["varying", "fixed"])
def test_training_on_lengths_is_timed_as_a_whole(lengths: str, tmp_path: Path):
    command = rankless_run(2, "variable_shapes.py", lengths, "--passes", "1", "--count", "4")
    run(command, folder=tmp_path)
    assert json.loads((tmp_path / "seconds.json").read_text()) > 0


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        pytest.param("mlp", marks=pytest.mark.exhaustive),
        pytest.param("lenet_norm", marks=pytest.mark.exhaustive),
        "gpt_dropout",
    ],
)
def test_steps_of_both_sides_are_timed(model: str, tmp_path: Path):
    run(rankless_run(2, "steps.py", model, "--pairs", "1", "--steps", "1"), folder=tmp_path)
    ((ours, peer),) = json.loads((tmp_path / "times.json").read_text())
    assert ours > 0
    assert peer > 0


@pytest.mark.exhaustive
def test_steps_with_and_without_early_rows_are_timed(tmp_path: Path):
    command = rankless_run(2, "early_rows.py", "--batch", "64", "--pairs", "1", "--steps", "3", servers=2)
    run(command, folder=tmp_path)
    ((ours, peer),) = json.loads((tmp_path / "times.json").read_text())
    assert ours > 0
    assert peer > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("arguments", [(), ("--waits",)])
def test_steps_of_workers_on_their_own_are_timed(arguments: tuple[str, ...], tmp_path: Path):
    run(rankless_run(2, "own_steps.py", *arguments, servers=2, server_mode="async"), folder=tmp_path)
    assert float((tmp_path / "step_seconds").read_text()) > 0


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", pytest.param("gpt", marks=pytest.mark.exhaustive)])
def test_steps_of_pipelines_of_both_sides_are_timed(model: str, tmp_path: Path):
    command = rankless_run(2, "pipelines.py", model, "1f1b", "--pairs", "1", "--steps", "1", mesh="pipeline=2")
    run(command, folder=tmp_path)
    ((ours, peer),) = json.loads((tmp_path / "times.json").read_text())
    assert ours > 0
    assert peer > 0


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("model", [pytest.param("mlp", marks=pytest.mark.exhaustive), "gpt"])
def test_steps_of_divided_layers_of_both_sides_are_timed(model: str, tmp_path: Path):
    command = rankless_run(2, "tensor_parallel.py", model, "--pairs", "1", "--steps", "1", mesh="tensor=2")
    run(command, folder=tmp_path)
    ((ours, peer),) = json.loads((tmp_path / "times.json").read_text())
    assert ours > 0
    assert peer > 0


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("workers", "what"), [(2, "stall"), (1, "resume")])
def test_saves_and_loads_of_both_sides_are_timed(workers: int, what: str, tmp_path: Path):
    command = rankless_run(workers, "saves.py", what, "--pairs", "1", "--width", "32")
    run(command, folder=tmp_path)
    ((ours, peer),) = json.loads((tmp_path / "times.json").read_text())
    assert ours > 0
    assert peer > 0


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("check", ["digest", "guards"])
def test_checks_are_timed_as_a_part_of_the_step(check: str, tmp_path: Path):
    command = rankless_run(2, "checks.py", "lenet", check, "--blocks", "1", "--steps", "2")
    run(command, folder=tmp_path)
    ((part, whole),) = json.loads((tmp_path / "times.json").read_text())
    assert 0 < part < whole


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("part", ["step_adagrad", pytest.param("read", marks=pytest.mark.exhaustive)])
def test_lookups_and_steps_of_tables_and_of_embeddings_are_timed(part: str, tmp_path: Path):
    command = [sys.executable, str(SCRIPTS / "tables.py"), part, "64", "4"]
    commands.run(command, threads=1, folder=str(tmp_path))
    times = json.loads((tmp_path / "times.json").read_text())
    assert len(times) == 9
    assert all(ours > 0 and peer > 0 for ours, peer in times)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_growth_of_a_table_is_measured(tmp_path: Path):
    command = [sys.executable, str(SCRIPTS / "table_growth.py"), "--ids", "200000", "--dim", "16"]
    commands.run([*command, "--json", "growth.json"], threads=1, folder=str(tmp_path))
    growth = json.loads((tmp_path / "growth.json").read_text())
    assert growth["rows"] == 200_000 // 4096 * 4096
    assert 128 + 8 < growth["bytes_per_row"] < 1000
    assert 0 < growth["p50_milliseconds"] <= growth["p99_milliseconds"] <= growth["most_milliseconds"]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_saves_of_what_has_changed_are_measured(tmp_path: Path):
    command = [sys.executable, str(SCRIPTS / "table_saves.py"), "--rows", "20000", "--rounds", "1", "--batch", "50"]
    commands.run([*command, "--json", "saves.json"], threads=1, folder=str(tmp_path))
    saves = json.loads((tmp_path / "saves.json").read_text())
    assert 144 * 20_000 < saves["whole_bytes"] < 1.1 * 144 * 20_000
    assert 144 * 450 < saves["changes_bytes"] < 0.05 * saves["whole_bytes"]
    assert min(saves[f"{name}_seconds"] for name in ("contents", "whole", "changes")) > 0


@pytest.mark.exhaustive
@pytest.mark.slow
def test_captures_of_both_sides_are_timed(tmp_path: Path):
    run(rankless_run(2, "captures.py", "--pairs", "1", "--layers", "1"), folder=tmp_path)
    ((ours, peer),) = json.loads((tmp_path / "times.json").read_text())
    assert ours > 0
    assert peer > 0


@pytest.mark.slow
def test_collectives_in_shared_memory_and_their_peers_are_timed(tmp_path: Path):
    operations = ("all_reduce", "all_reduce_allocated", "all_gather_single", "broadcast")
    words = [f"{operation},40960,{peer},2" for operation in operations for peer in ("gloo", "bound")]
    run(rankless_run(2, "shared_memory_collectives.py", *words, "--pairs", "1"), folder=tmp_path)
    cases = json.loads((tmp_path / "times.json").read_text())
    assert len(cases) == len(words)
    for ((ours, theirs),) in cases:
        assert ours > 0
        assert theirs > 0


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["all_reduce", pytest.param("all_gather_single", marks=pytest.mark.exhaustive)])
def test_collectives_of_both_sides_are_timed(operation: str, tmp_path: Path):
    command = rankless_run(2, "collectives.py", operation, "4096", "--pairs", "1", "--calls", "2")
    run(command, folder=tmp_path)
    ((ours, peer),) = json.loads((tmp_path / "times.json").read_text())
    assert ours > 0
    assert peer > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("peer", [False, True])
def test_the_step_after_a_kill_is_timed(peer: bool, tmp_path: Path):
    command = torchrun(3, "recovery.py", "--ddp") if peer else rankless_run(3, "recovery.py")
    if peer:
        command[1:1] = ["--max-restarts", "1"]
    run(command, folder=tmp_path)
    assert 0 < float((tmp_path / "seconds").read_text()) < 200


@pytest.mark.exhaustive
def test_steps_of_a_run_that_may_lose_workers_are_timed(tmp_path: Path):
    run(rankless_run(2, "recovery.py", "--steps", "4"), folder=tmp_path)
    assert float((tmp_path / "step_seconds").read_text()) > 0
