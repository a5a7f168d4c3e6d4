"""Runs with parameter servers continue without killed workers, and train what plain PyTorch does on one device."""

import json
import random
import re
from pathlib import Path

import pytest
from collectives.backends.shared_groups import NEEDS_SHARED_GROUPS
from support.example_runs import EXAMPLES, report_of
from support.lost_workers import STEPS, require_same_training, run_killed, run_plain
from support.server_jobs import summary_of
from support.warm_runs import rankless, run_script

pytestmark = [pytest.mark.slow, NEEDS_SHARED_GROUPS]  # with Gloo a killed worker ends the run
pytest.importorskip("zmq")
pytest.importorskip("numba")


@pytest.fixture(scope="session")
def plain(tmp_path_factory) -> dict:
    return run_plain(tmp_path_factory.mktemp("plain"))


def draw_kills(seed: int) -> str:
    """Return kills of one or two workers at random moments of calls, and between them."""
    drawn = random.Random(seed)
    named = [f"{name}{epoch}" for name in ("predict", "once", "save") for epoch in range(3)]
    kills = []
    for worker in drawn.sample(range(3), drawn.choice((1, 1, 2))):
        moment = drawn.choice([*map(str, range(30)), *named])
        kills.append(f"{worker}:{moment}:{drawn.choice((0, drawn.uniform(0, 5), drawn.uniform(0, 100)))}")
    return ",".join(kills)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(50))
def test_kills_at_random_moments_change_no_number(tmp_path, plain, seed):
    options = {"gathers": seed % 3 == 0, "workers": "num_workers=2" if seed % 4 == 1 else ""}
    done = run_killed(tmp_path, draw_kills(seed), **options)
    assert done.returncode == 0, done.stderr
    require_same_training(tmp_path, plain)


def test_the_output_and_the_summary_of_a_run_whose_first_worker_is_killed(tmp_path, plain):
    done = run_killed(tmp_path, "0:12:0")
    assert done.returncode == 0, done.stderr
    assert re.search(r"rankless: worker 0 \(pid \d+\) was killed by SIGKILL; 2 workers continue\n", done.stderr)
    assert [line[:8] for line in done.stdout.splitlines()] == ["epoch 0:", "epoch 1:", "epoch 2:"]
    summary = summary_of(tmp_path)
    assert (summary.lost_workers, summary.exit_code, summary.outcome, summary.steps) == (1, 0, "succeeded", 30)
    assert summary.verdict == "all workers ended but 1, which was killed before"
    assert [each.exit_code for each in summary.ranks] == [-9, 0, 0]
    assert require_same_training(tmp_path, plain)["size"] == 2


@pytest.mark.exhaustive
def test_workers_are_killed_until_one_is_left(tmp_path, plain):
    done = run_killed(tmp_path, "0:0:0,1:once1:0")  # in its first call, which captures the job
    assert done.returncode == 0, done.stderr
    assert "; 1 worker continues" in done.stderr
    assert summary_of(tmp_path).lost_workers == 2
    assert require_same_training(tmp_path, plain)["size"] == 1


@pytest.mark.exhaustive
def test_no_more_workers_are_lost_than_the_option_allows(tmp_path):
    done = run_killed(tmp_path, "0:3:0,1:9:0", "--min-workers", "2")
    assert done.returncode == 137
    assert "was killed by SIGKILL; 2 workers continue" in done.stderr
    assert "rankless: rank 1 was killed by signal 9 (SIGKILL)\n" in done.stderr


@pytest.mark.exhaustive
def test_an_error_of_the_script_ends_the_run_after_a_worker_was_lost(tmp_path):
    text = "for step in range(9):\n    die_at(step, 3)\n    if step == 6:\n        raise ValueError('no')\n"
    done = run_script(
        STEPS + text + "    train(torch.arange(6))\n", "--servers", "1", "--workers", "3", folder=tmp_path
    )
    assert done.returncode == 1
    assert "2 workers continue" in done.stderr
    assert re.search(r"rankless: rank [02] raised ValueError: no at script.py:\d+\n", done.stderr)


REPORTED_LATE = """
whole = rankless.job(model=layer, capture=False)(lambda x: layer(x).sum())
def die_at(step, now):  # the process that reports the death is slow
    if step == now and os.environ["RANK"] == "1":
        import subprocess
        subprocess.Popen(["sh", "-c", f"sleep 2; kill -CONT {os.getppid()}"], start_new_session=True)
        os.kill(os.getppid(), 19)
        os.kill(os.getpid(), 9)
"""


NOT_CAPTURED = "whole = rankless.job(model=layer, capture=False)(lambda x: layer(x).sum())"
READ_BY_FIRST = "loader = rankless.loader(range(90), batch_size=9, reading='first')"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(REPORTED_LATE, id="not captured, reported late"),
        pytest.param(NOT_CAPTURED, id="not captured", marks=pytest.mark.exhaustive),
        pytest.param(READ_BY_FIRST, id="read by rank 0", marks=pytest.mark.exhaustive),
    ],
)
def test_a_run_that_cannot_go_on_names_the_killed_worker(tmp_path, text):
    loop = "for step in range(9):\n    die_at(step, 3)\n    whole(torch.ones(3, 4))\n    train(torch.arange(6))\n"
    if "loader" in text:
        loop = "for step, ids in enumerate(loader):\n    die_at(step, 3)\n    train(ids)\n"
    done = run_script(STEPS + text + "\n" + loop, "--servers", "1", "--workers", "3", folder=tmp_path)
    assert done.returncode == 137, done.stderr
    assert re.search(
        r"rank 1 was killed by signal 9 \(SIGKILL\), and rank [02] could not continue without it", done.stderr
    )


@pytest.mark.exhaustive
def test_a_worker_is_killed_while_a_server_starts_again(tmp_path, plain):
    done = run_killed(tmp_path, "server:5:0,2:5:0")
    assert "was killed by SIGKILL; started again" in done.stderr
    if done.returncode == 0:  # the worker had not sent its part to the server that died
        require_same_training(tmp_path, plain)
    else:
        assert "was lost before they arrived" in done.stderr


KILLED_EXAMPLE = f"""
import io, os, runpy, signal, sys
import rankless


class Watched(io.TextIOWrapper):
    def write(self, text):
        if text.startswith("epoch 1") and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write(text)


sys.stdout = Watched(sys.stdout.buffer, write_through=True)
sys.argv[0] = {str(EXAMPLES / "recommend.py")!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.exhaustive
def test_the_example_with_a_killed_worker_gives_the_numbers_of_one_device(tmp_path):
    options = ("--epochs", "2", "--batch-size", "300", "--dtype", "float64", "--report", "report.json")
    wanted = report_of("recommend", tmp_path, *options[:4])
    (tmp_path / "killed.py").write_text(KILLED_EXAMPLE)
    command = ("run", "--servers", "2", "--workers", "3", "killed.py")
    done = rankless(*command, *options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "worker 1 (pid" in done.stderr
    found = json.loads(Path(tmp_path / "report.json").read_text())
    assert found.pop("losses") == pytest.approx(wanted["losses"], rel=0, abs=1e-10)
    assert found == pytest.approx({name: wanted[name] for name in found}, rel=0, abs=1e-10)
