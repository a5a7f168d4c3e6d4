"""Commands in the tests' own process share one fork server pool, and behave like processes of their own."""

import os
import re
from pathlib import Path

import pytest
from support import jobs, warm_runs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="a fork server pool needs Linux"),
]

PRINT_PARENT = """
import os, psutil, sys
parent = psutil.Process(os.getppid())
print("served" if any("from a pool" in word for word in parent.cmdline()) else "alone", parent.ppid())
"""


def test_the_pool_serves_all_runs_whatever_pytest_writes_to_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one test", "another"):
        monkeypatch.setenv("PYTEST_CURRENT_TEST", name)
        done = warm_runs.run_script(PRINT_PARENT, folder=tmp_path)
        assert (done.stdout, done.returncode) == (f"served {os.getpid()}\n", 0), done.stderr


def test_a_run_with_other_variables_gets_a_fork_server_of_its_own(tmp_path: Path) -> None:
    done = warm_runs.run_script(PRINT_PARENT + "print(os.environ['MINE'])", folder=tmp_path, MINE="yes")
    assert done.stdout == f"alone {os.getpid()}\nyes\n", done.stderr
    assert "MINE" not in os.environ


@pytest.mark.parametrize("options", [("-n", "2", "--seed", "3"), ("-n", "0"), ("--no-such-option",)])
def test_a_command_has_the_output_and_exit_code_of_a_process(options: tuple[str, ...], tmp_path: Path) -> None:
    script = "import os, sys, time\nif os.environ['RANK'] == '1':\n    time.sleep(60)\nprint('out')\nsys.exit(5)"
    here, there = (module.run_script(script, *options, folder=tmp_path) for module in (warm_runs, jobs))
    assert (here.stdout, here.returncode) == (there.stdout, there.returncode)
    different = re.compile(r"\d{8}-\d{6}-\w{6}|(?<=\d  ) *\d+(?=  cpu)|(?<=after )[\d.]+ \w+|\d+ MiB")
    assert different.sub("", here.stderr) == different.sub("", there.stderr)
    assert there.returncode == (5 if "2" in options else 2)
