"""How a run ends: a line on the terminal, `run.json` in the log folder, and the file of `--json`."""

import platform
import re
from importlib.metadata import version
from pathlib import Path

import pytest
from support.json_schema import check_result
from support.warm_runs import run_script

from rankless.records.run_json_format import decode_run_summary
from rankless.version import VERSION

pytestmark = pytest.mark.slow

TRAINING = """
import torch, rankless
data = torch.utils.data.TensorDataset(torch.randn(48, 4))
model = torch.nn.Linear(4, 1)
@rankless.job(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
def train(x):
    return model(x).square().mean()
for _ in range(2):
    for (x,) in rankless.loader(data, batch_size=8):
        train(x)
"""


def test_the_summary_of_a_training_says_what_ran_and_how_it_went(tmp_path: Path) -> None:
    job = run_script(TRAINING, "-n", "2", "--seed", "5", "--json", "out.json", "--hang-timeout", "0", folder=tmp_path)
    assert job.returncode == 0, job.stderr
    last = job.stderr.splitlines()[-1]
    facts = r"12 steps, [\d,.]+ samples/s, peak memory \d+ MiB \(rank [01]\)"
    line = rf"rankless: done in [\d.,]+ m?s: {facts}, logs in log/\S+"
    assert re.fullmatch(line, last), last
    data = (tmp_path / "out.json").read_bytes()
    assert (tmp_path / "log" / "latest" / "run.json").read_bytes() == data
    summary = decode_run_summary(data)
    result = check_result(data.decode(), "run")
    assert (result["version"], result["rankless"], result["command"]) == (1, VERSION, "run")
    assert (result["script"], result["arguments"], result["seed"]) == ("script.py", [], 5)
    assert summary.command_line[:4] == ("rankless", "run", "-n", "2")
    assert (summary.workers, summary.outcome, summary.exit_code, summary.failure) == (2, "succeeded", 0, None)
    assert (summary.torch, summary.python) == (version("torch"), platform.python_version())
    assert summary.steps == 12
    assert summary.samples_per_second is not None
    assert summary.seconds is not None
    assert summary.seconds > 80 / summary.samples_per_second  # the other 16 samples' steps captured
    assert [(rank.rank, rank.device, rank.exit_code) for rank in summary.ranks] == [(0, "cpu", 0), (1, "cpu", 0)]
    assert all((rank.peak_memory_bytes or 0) > 50 * 2**20 for rank in summary.ranks)
    assert all(Path(rank.log_file).is_file() for rank in summary.ranks)
    assert Path(summary.log_folder).samefile(tmp_path / "log" / "latest")


def test_a_quiet_run_prints_nothing_of_its_own(tmp_path: Path) -> None:
    job = run_script(TRAINING, "-n", "1", "--quiet", "--no-progress", folder=tmp_path)
    assert (job.stdout, job.stderr, job.returncode) == ("", "", 0)
    summary = decode_run_summary((tmp_path / "log" / "latest" / "run.json").read_bytes())
    assert (summary.steps, summary.workers) == (12, 1)


def test_the_summary_of_a_failure_names_rank_error_and_line(tmp_path: Path) -> None:
    script = "import os, time\nwhile os.environ['RANK'] != '1':\n    time.sleep(0.1)\nraise ValueError('no data')\n"
    job = run_script(script, "-n", "2", "-q", "--json", "out.json", folder=tmp_path)
    assert job.stderr.startswith("rankless: rank 1 raised ValueError: no data at script.py:")
    summary = decode_run_summary((tmp_path / "out.json").read_bytes())
    assert (summary.outcome, summary.exit_code, summary.verdict) == ("failed", 1, "rank 1 raised ValueError: no data")
    assert summary.failure is not None
    assert (summary.failure.rank, summary.failure.error) == (1, "raised ValueError: no data")
    assert summary.failure.line == "script.py:4"
    assert summary.ranks[0].exit_code in (-15, -9)  # SIGKILL if it has not ended a second after SIGTERM
    assert summary.ranks[1].exit_code in (1, -15)  # the same if it takes longer than a second to end


@pytest.mark.exhaustive
def test_the_log_folder_has_the_summary_from_the_start_and_a_variable_names_the_folder(tmp_path: Path) -> None:
    script = "print(open('elsewhere/latest/run.json').read())"
    job = run_script(script, folder=tmp_path, RANKLESS_LOG_DIR="elsewhere")
    summary = decode_run_summary(job.stdout.encode())
    assert (summary.outcome, summary.seconds, summary.exit_code) == ("running", None, None)
    assert not (tmp_path / "log").exists()
    given = run_script("", "--log-dir", "given", folder=tmp_path, RANKLESS_LOG_DIR="elsewhere")
    assert "logs in given/" in given.stderr


def test_a_dash_prints_the_summary_alone(tmp_path: Path) -> None:
    job = run_script("print('done')", "--json", "-", folder=tmp_path)
    assert check_result(job.stdout, "run")["steps"] == 0
    assert "done\n" in job.stderr
