"""`rankless run --preload`: modules that the fork server imports once for all workers."""

import json
import os
import sys
from pathlib import Path

import pytest
from support.jobs import rankless

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="fork safety is read from /proc")]

SCRIPT = """
import json, os, sys
loaded = "heavy" in sys.modules
import heavy
import random, torch
print(json.dumps({"loaded": loaded, "imported by": heavy.process, "me": os.getpid(), "parent": os.getppid(),
                  "drawn": torch.rand(()).item(), "path": sys.path.count(sys.path[0]), "argv": sys.argv}))
"""
HEAVY = "import os, torch\nprocess = os.getpid()\n"
UNSAFE = {
    "thread": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
        "thread",
    ),
    "process": ("import subprocess\nchild = subprocess.Popen(['sleep', '600'])", "starts a process"),
    "socket": ("import socket\nlistening = socket.create_server(('127.0.0.1', 0))", "opens a socket"),
}
FAILING = {
    "raises": ("raise RuntimeError('no licence\\non this host')", "found RuntimeError: no licence on this host"),
    "exits": ("import sys\nsys.exit(3)", "found that it exits with 3"),
    "is wrong": ("def (:", "found SyntaxError"),
}


def run_two(folder: Path, *options: str, heavy: str = HEAVY, **environment: str):
    """Run the script on two workers; return the reports of both ranks, and the terminal's text."""
    (folder / "script.py").write_text(SCRIPT)
    (folder / "heavy.py").write_text(heavy + ("" if "process = os" in heavy else "\nimport os\nprocess = os.getpid()"))
    done = rankless(
        "run", "-n", "2", "--separate", "--show", "all", *options, "script.py", folder=folder, **environment
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("["))
    return [json.loads(line.partition(" ")[2]) for line in lines], done.stderr


@pytest.mark.exhaustive
def test_a_module_to_preload_is_imported_once_and_workers_are_seeded_as_without(tmp_path: Path):
    options = ("--seed", "5")
    reports, text = run_two(tmp_path, "--preload", "heavy,json", *options, RANKLESS_PRELOAD="colorsys")
    assert "--preload" not in text
    for report in reports:
        assert (report["loaded"], report["imported by"]) == (True, report["parent"])
        assert (report["path"], report["argv"]) == (1, ["script.py"])
    plain, _ = run_two(tmp_path, *options)
    assert [report["imported by"] for report in plain] == [report["me"] for report in plain]
    assert [report["drawn"] for report in reports] == [report["drawn"] for report in plain]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["thread", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in list(UNSAFE)[1:])])
def test_a_module_that_makes_a_fork_unsafe_is_named_and_the_workers_are_plain_processes(name: str, tmp_path: Path):
    code, sign = UNSAFE[name]
    # Only the fork server runs the unsafe part, as a module might that looks at how it is started.
    heavy = f"import os\nif 'RANK' not in os.environ:\n    {code.replace(chr(10), chr(10) + '    ')}\n"
    reports, text = run_two(tmp_path, heavy=heavy, RANKLESS_PRELOAD="heavy")
    assert f"found that it {sign}" in text or f"found that it starts a {sign}" in text
    assert "The workers start as plain processes" in text
    assert [report["imported by"] for report in reports] == [report["me"] for report in reports]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FAILING)
def test_a_module_that_cannot_be_imported_is_named_and_the_run_goes_on(name: str, tmp_path: Path):
    code, sign = FAILING[name]
    (tmp_path / "other.py").write_text(code)
    reports, text = run_two(tmp_path, "--preload", "other", "--preload", "heavy")
    assert "--preload other: expected a module that can be imported" in text
    assert sign in text
    assert [report["imported by"] for report in reports] == [report["parent"] for report in reports]


@pytest.mark.parametrize(
    ("options", "environment", "found"),
    [
        (("--preload", "no_such_module"), {}, "no module no_such_module beside the program"),
        (("--preload", "json, ../heavy"), {}, "no module ../heavy"),
        ((), {"RANKLESS_PRELOAD": "transformer s"}, "no module transformer s"),
        (("--preload", "json", "--no-warm"), {}, "plain processes"),
    ],
)
def test_what_the_fork_server_cannot_import_is_refused_before_the_start(
    options, environment, found: str, tmp_path: Path
):
    (tmp_path / "script.py").write_text("print('started')")
    done = rankless("run", *options, "script.py", folder=tmp_path, **environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert found in done.stderr
    assert os.listdir(tmp_path) == ["script.py"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("imports", ["from torch import optim", "import torch"])
def test_what_optimizers_import_is_imported_once_for_programs_that_name_them(imports: str, tmp_path: Path):
    line = "print('torch._dynamo' in sys.modules, 'torch' in before)"
    (tmp_path / "script.py").write_text(f"import sys\nbefore = set(sys.modules)\n{imports}\n{line}\n")
    done = rankless("run", "-n", "2", "--separate", "script.py", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{'optim' in imports} False\n"), done.stderr
