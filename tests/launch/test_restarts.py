"""`rankless run --restarts`: the script starts again, and continues from its newest checkpoint."""

import json
from pathlib import Path

import pytest
from support.warm_runs import rankless

from rankless.launch.recovery.run_restarts import repeat_failed
from rankless.records.run_json_format import Outcome, RunFailure, RunSummary


def make_summary(outcome: Outcome, steps: int | None = None, error: str = "raised OSError: no data") -> RunSummary:
    failure = RunFailure(rank=1, host="", error=error, line="a.py:3") if outcome == "failed" else None
    return RunSummary(
        command_line=(),
        workers=2,
        torch=None,
        python="3.11",
        log_folder="log",
        started="",
        outcome=outcome,
        failure=failure,
        steps=steps,
    )


FAILED = "failed"
CASES = [
    ([make_summary("succeeded")], 1, []),
    ([make_summary("interrupted")], 1, []),
    ([None], 1, []),
    (
        [make_summary(FAILED, 3), make_summary("succeeded")],
        2,
        ["rank 1 raised OSError: no data after 3 steps; started again, restart 1 of 3"],
    ),
    (
        [make_summary(FAILED, 3), make_summary(FAILED, 3)],
        2,
        [
            "rank 1 raised OSError: no data after 3 steps; started again, restart 1 of 3",
            "not started again: it has failed twice in the same way, after 3 steps",
        ],
    ),
    (
        [make_summary(FAILED, 1), make_summary(FAILED, None), make_summary(FAILED, 1), make_summary(FAILED, 4)],
        4,
        [
            "rank 1 raised OSError: no data after 1 step; started again, restart 1 of 3",
            "rank 1 raised OSError: no data after no step; started again, restart 2 of 3",
            "rank 1 raised OSError: no data after 1 step; started again, restart 3 of 3",
        ],
    ),
    (
        [make_summary(FAILED, 3), make_summary(FAILED, 3, "left with exit code 3"), make_summary("interrupted")],
        3,
        [
            "rank 1 raised OSError: no data after 3 steps; started again, restart 1 of 3",
            "rank 1 left with exit code 3 after 3 steps; started again, restart 2 of 3",
        ],
    ),
]


@pytest.mark.parametrize(("attempts", "count", "notices"), CASES)
def test_a_run_starts_again_until_it_does_not_fail_or_fails_as_before(attempts, count, notices):
    left, shown = list(attempts), []
    repeat_failed(lambda: left.pop(0), restarts=3, notify=shown.append)
    assert len(attempts) - len(left) == count
    assert shown == notices


TRAINING = """
import os, torch, rankless

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = rankless.loader(torch.utils.data.TensorDataset(torch.randn(64, 4)), batch_size=8, shuffle=True)
checkpoints = rankless.checkpoints("kept", keep_last=2)

@rankless.job(model=model, optimizer=optimizer)
def train(inputs):
    return model(inputs).square().mean()

found = checkpoints.load(model=model, optimizer=optimizer, loader=loader)
step = 0 if found is None else found.step
print("begins at", step)
for epoch in range(step // 8, 3):
    for (inputs,) in loader:
        loss = train(inputs)
        step += 1
        if step % 5 == 0:
            checkpoints.save(step, model=model, optimizer=optimizer, loader=loader)
        fails = os.environ.get("FAILS")
        if step == 12 and rankless.rank() == 1 and (fails == "always" or fails and not os.path.exists("failed")):
            open("failed", "w").close()
            raise OSError("no data")
print(step, float(loss), [float(item.detach().sum()) for item in model.parameters()])
"""


@pytest.mark.slow
def test_a_script_continues_from_its_newest_checkpoint_as_if_nothing_had_been(tmp_path: Path):
    (tmp_path / "train.py").write_text(TRAINING)
    words = ("run", "-n", "2", "--devices", "cpu", "--seed", "1", "--restarts", "1", "--json", "run.json", "train.py")
    failed = rankless(*words, folder=tmp_path, FAILS="1")
    assert failed.returncode == 0, failed.stderr
    assert "rank 1 raised OSError: no data after 12 steps; started again, restart 1 of 1\n" in failed.stderr
    assert json.loads((tmp_path / "run.json").read_text())["outcome"] == "succeeded"
    begun, continued, last = failed.stdout.splitlines()
    assert (begun, continued) == ("begins at 0", "begins at 10")
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    (undisturbed / "train.py").write_text(TRAINING)
    done = rankless(*words, folder=undisturbed)
    assert done.stdout.splitlines() == ["begins at 0", last]


@pytest.mark.slow
def test_the_same_step_is_known_although_the_second_attempt_began_at_a_checkpoint(tmp_path: Path):
    (tmp_path / "train.py").write_text(TRAINING)
    words = ("run", "-n", "2", "--devices", "cpu", "--restarts", "5", "--json", "run.json", "train.py")
    failed = rankless(*words, folder=tmp_path, FAILS="always")
    assert failed.returncode == 1
    assert failed.stdout.splitlines() == ["begins at 0", "begins at 10"]
    assert "rank 1 raised OSError: no data after 12 steps; started again, restart 1 of 5\n" in failed.stderr
    assert "not started again: it has failed twice in the same way, after 12 steps\n" in failed.stderr
    summary = json.loads((tmp_path / "run.json").read_text())
    assert (summary["steps"], summary["resumed_step"]) == (2, 10)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (("--restarts", "-1"), "expected: --restarts from 0 up"),
        (("--restarts", "1", "--hosts", "127.0.0.1,198.51.100.7", "--no-ssh"), "--restarts 1 with a command on each"),
    ],
)
def test_restarts_that_no_run_can_have_are_refused(tmp_path: Path, options, found: str):
    (tmp_path / "train.py").write_text(TRAINING)
    done = rankless("run", *options, "train.py", folder=tmp_path)
    assert done.returncode == 2
    assert found in done.stderr
