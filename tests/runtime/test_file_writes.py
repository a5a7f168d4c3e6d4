"""The agent warns, with the line, if several ranks write the same file; it never warns about correct scripts."""

import os
from pathlib import Path

import pytest
from support.warm_runs import run_script

from rankless.config.process_configs import WorkerConfig
from rankless.launch.agent import SharedFiles
from rankless.records.events import FileOpened
from rankless.runtime.hooks.watch_written_files_and_silence_tensorboard import FileWriteMonitor
from rankless.user_code import display_name

WRITES = """
import os, pathlib, shutil, numpy, torch, rankless
rank = rankless.rank()
open("plain.txt", "w").close()
pathlib.Path("text.txt").write_text("a")
torch.save({"a": 1}, "model.pt")
numpy.save(f"own{rank}.npy", numpy.zeros(2))
rankless.once(lambda: open("once.txt", "w").close())
torch.save(1, pathlib.Path(f"own{rank}.pt"))
open("plain.txt").close()
"""


def warnings_in(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if " both write " in line]


@pytest.mark.ci_sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("size", ["2", "3"])
def test_files_that_several_ranks_write_are_warned_about_once_with_the_line(size: str, tmp_path: Path) -> None:
    job = run_script(WRITES, "-n", size, folder=tmp_path)
    assert job.returncode == 0, job.stderr
    warnings = warnings_in(job.stderr)
    assert sorted(line.partition(" both write ")[2].partition(":")[0] for line in warnings) == [
        "model.pt (script.py",
        "plain.txt (script.py",
        "text.txt (script.py",
    ]
    assert any("model.pt (script.py:6): let one do it with rankless.once" in line for line in warnings)


OTHERS = """
import os, tempfile, numpy, torch, rankless
from torch.utils.data import TensorDataset
rank = rankless.rank()
with open("append.log", "a") as file:
    file.write("line")
numpy.save("array.npy", numpy.zeros(2))
with open(f"new{rank}", "w") as file:
    file.write("x")
os.replace(f"new{rank}", "moved.txt")
"""


@pytest.mark.slow
def test_appending_saving_arrays_and_replacing_count_as_writes(tmp_path: Path) -> None:
    warnings = warnings_in(run_script(OTHERS, "-n", "2", folder=tmp_path).stderr)
    assert len(warnings) == 3
    for name in ("append.log (script.py:5)", "array.npy (script.py:7)", "moved.txt (script.py:10)"):
        assert any(name in line for line in warnings), name


RIGHT = """
import os, tempfile, torch, rankless
model = torch.nn.Linear(2, 2)
rankless.save("saved", model=model)
rankless.load("saved", model=model)
with tempfile.NamedTemporaryFile() as file, tempfile.TemporaryDirectory() as folder:
    file.write(b"x")
    open(os.path.join(folder, "inside"), "w").close()
with open(os.devnull, "w") as file:
    file.write("x")
if rankless.rank() == 0:
    open("first.txt", "w").close()
open("data.lock", "w").close()
open(__file__).close()
"""


@pytest.mark.slow
def test_files_that_one_rank_or_rankless_writes_are_not_warned_about(tmp_path: Path) -> None:
    job = run_script(RIGHT, "-n", "2", folder=tmp_path)
    assert job.returncode == 0, job.stderr
    assert warnings_in(job.stderr) == []


def opened(rank: int, path: str) -> FileOpened:
    return FileOpened(rank=rank, time_ns=0, path=os.path.abspath(path), line="")


def test_at_most_three_files_are_warned_about() -> None:
    files = SharedFiles()
    warnings = [files.check(opened(rank, f"file{number}")) for number in range(9) for rank in (1, 0, 2)]
    texts = [text for text in warnings if text is not None]
    assert [text[:28] for text in texts] == ["ranks 0 and 1 both write fil"] * 3
    assert "further files are not named" in texts[2]


def make_monitor(folder: Path) -> tuple[FileWriteMonitor, list[FileOpened]]:
    sent: list[FileOpened] = []
    config = WorkerConfig(
        rank=1, world_size=2, local_rank=1, local_world_size=2, device="cpu", threads=1, backend="gloo",
        master_address="", master_port=0, run_id="", seed=0, log_file=str(folder / "log/rank1.log"),
        process_id=os.getpid(),
    )  # fmt: skip
    return FileWriteMonitor(config, send=sent.append), sent


def test_a_file_is_reported_once_and_odd_paths_are_not(tmp_path: Path) -> None:
    files, sent = make_monitor(tmp_path)
    for path in ("a", b"a", Path("a"), 3, None, "/dev/null", tmp_path / "log/x", "x/__pycache__/y", "a\0b", "b.pyc"):
        files.report_write(path)
    assert [record.path for record in sent] == [os.path.abspath("a"), os.path.abspath("a\0b")]
    assert sent[0].line.startswith(f"{display_name(__file__)}:")
