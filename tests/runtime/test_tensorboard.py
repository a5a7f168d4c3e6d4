"""TensorBoard in a script that all ranks run: one event file, rank 0's."""

import re
from pathlib import Path

import pytest
from support.warm_runs import run_script

from rankless.launch.agent import SharedFiles
from rankless.records.events import FileOpened
from rankless.runtime.hooks.watch_written_files_and_silence_tensorboard import names_rank

SCRIPT = """
import torch, rankless
from torch.utils.tensorboard import SummaryWriter
with SummaryWriter("runs/one") as writer:
    for step in range(3):
        writer.add_scalar("loss", 1 / (step + 1), step)
    writer.add_hparams({"lr": 0.1}, {"accuracy": 0.5}, run_name="best")
    assert writer.get_logdir() == "runs/one"
own = SummaryWriter(log_dir=f"runs/rank{rankless.rank()}")
own.add_scalar("loss", 1.0)
own.close()
"""


def event_files(folder: Path) -> list[str]:
    return sorted(str(path.parent.relative_to(folder)) for path in folder.rglob("events.out.tfevents.*"))


@pytest.mark.slow
def test_only_rank_0_writes_events_unless_the_folder_has_the_rank(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="torch.utils.tensorboard needs it, and Rankless does not")
    job = run_script(SCRIPT, "-n", "2", folder=tmp_path)
    assert job.returncode == 0, job.stderr + job.stdout
    assert event_files(tmp_path) == ["runs/one", "runs/one/best", "runs/rank0", "runs/rank1"]
    assert job.stderr.count("script.py:4: only rank 0 writes TensorBoard events") == 1
    assert " both write " not in job.stderr


@pytest.mark.slow
def test_writers_of_a_script_without_rankless_are_left_alone_and_named(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="torch.utils.tensorboard needs it, and Rankless does not")
    script = "from torch.utils.tensorboard import SummaryWriter\nSummaryWriter('runs/one').add_scalar('loss', 1.0)\n"
    job = run_script(script, "-n", "2", folder=tmp_path)
    assert event_files(tmp_path) == ["runs/one", "runs/one"]
    assert job.stderr.count("ranks 0 and 1 both write runs/one/events.out.tfevents.*") == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("runs/rank1 ", True),
        ("runs/1 ", True),
        ("runs _gpu1", True),
        ("runs/exp-1/a ", True),
        ("runs/Rank_1 ", True),
        ("runs/one ", False),
        ("runs/v10 ", False),
        ("runs/lr0.001 ", False),
        ("runs/seed11 ", False),
        (" ", False),
    ],
)
def test_a_folder_that_names_the_rank_is_the_ranks_own(text: str, expected: bool) -> None:
    assert names_rank(text, 1) is expected


def test_event_files_of_two_ranks_in_one_folder_count_as_one_file() -> None:
    files = SharedFiles()
    records = [
        FileOpened(rank=rank, time_ns=0, path=f"/{folder}/events.out.tfevents.17.host.{rank}.0", line="")
        for folder in ("a", "b")
        for rank in range(2)
    ]
    texts = [files.check(record) for record in records]
    assert [text is None for text in texts] == [True, False, True, False]
    assert re.match(r"ranks 0 and 1 both write /a/events.out.tfevents.\*: ", texts[1] or "")


@pytest.mark.slow
def test_once_refuses_a_writer_in_a_few_lines(tmp_path: Path) -> None:
    script = (
        "import rankless\nclass Writer:\n    def __init__(self, folder): pass\nwriter = rankless.once(Writer, 'runs')\n"
    )
    job = run_script(script, "-n", "2", folder=tmp_path)
    assert job.returncode == 1
    assert job.stdout.count("Traceback") + job.stderr.count("Traceback") <= 2
    log = (tmp_path / "log" / "latest" / "rank0.log").read_text()
    assert len(log.splitlines()) <= 20
    assert "fix:      call it on every rank, without once" in log
