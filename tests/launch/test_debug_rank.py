"""`--debug-rank` gives one rank the terminal; elsewhere a breakpoint is an error that names the option."""

from pathlib import Path

import pytest
from support.jobs import run_script, wait_until
from support.terminals import on_terminal

pytestmark = pytest.mark.slow

STOPS = """
import datetime, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=4))
answer = 40 + dist.get_rank()
if dist.get_rank() == 1:
    {breakpoint}
total = torch.ones(1)
dist.all_reduce(total)
print("rank", dist.get_rank(), "goes on with", total.item(), flush=True)
"""
BREAKPOINTS = {
    "breakpoint": "breakpoint()",
    "pdb": "import pdb; pdb.set_trace()",
    "torch": "pass\ndist.breakpoint(1)",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", BREAKPOINTS)
@pytest.mark.parametrize("options", [[], ["--no-warm"]], ids=["warm", "plain"])
def test_a_rank_with_the_terminal_is_debugged_while_the_others_wait(kind: str, options: list[str], tmp_path: Path):
    (tmp_path / "script.py").write_text(STOPS.format(breakpoint=BREAKPOINTS[kind]))
    with on_terminal("run", "-n", "2", "--debug-rank", "1", *options, "script.py", folder=tmp_path) as terminal:
        prompts = 1
        if kind == "torch":  # which stops in its own function, and tells its user so
            wait_until(lambda: "Type 'up'" in terminal.text or terminal.job.poll() is not None)
            terminal.type("up\n")
            prompts = 2
        wait_until(lambda: terminal.text.count("(Pdb) ") == prompts or terminal.job.poll() is not None)
        terminal.type("answer + 1\n")
        wait_until(lambda: "42" in terminal.text or terminal.job.poll() is not None)
        terminal.type("import time; time.sleep(6)\n")  # longer than the script lets collectives wait
        wait_until(lambda: terminal.text.count("(Pdb) ") == prompts + 2 or terminal.job.poll() is not None)
        terminal.type("continue\n")
        text = terminal.wait()
    assert terminal.job.returncode == 0, text
    assert "rank 0 goes on with 2.0" in text
    assert "rank 1 goes on with 2.0" in text
    assert "this rank has the terminal" in (tmp_path / "log" / "latest" / "rank1.log").read_text()


@pytest.mark.exhaustive
def test_a_single_worker_has_the_input(tmp_path: Path):
    (tmp_path / "script.py").write_text("print('you typed', input('name? '))")
    with on_terminal("run", "script.py", folder=tmp_path) as terminal:
        wait_until(lambda: "name? " in terminal.text)
        terminal.type("Ada\n")
        text = terminal.wait()
    assert terminal.job.returncode == 0, text
    assert "you typed Ada" in text


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("kind", BREAKPOINTS)
def test_a_breakpoint_without_a_terminal_names_its_line_and_the_option(kind: str, tmp_path: Path):
    job = run_script(STOPS.format(breakpoint=BREAKPOINTS[kind]), "-n", "2", folder=tmp_path)
    assert job.returncode == 1
    assert "rank 1 raised ConfigError" in job.stderr
    assert "script.py:6 on rank 1, which has none" in job.stderr.replace("script.py:7", "script.py:6")
    assert "--debug-rank 1" in job.stderr


def test_a_rank_that_is_not_there_is_refused(tmp_path: Path):
    job = run_script("", "-n", "2", "--debug-rank", "2", folder=tmp_path)
    assert job.returncode == 2
    assert "found:    2" in job.stderr
