"""A plain `python train.py` becomes the launcher of its own script, and says where it cannot."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.warm_runs import rankless

from rankless.config.run_config import Program
from rankless.errors import ConfigError
from rankless.launch.self_launch import relaunch, running_program

SCRIPT = """
import os, sys
import torch, rankless

torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

@rankless.job(model=model, optimizer=optimizer)
def train(inputs):
    return model(inputs).square().mean()

def main():
    if "chdir" in sys.argv:
        os.chdir("/")
    rankless.configure(devices_per_host=int(sys.argv[1]))
    for step in range(3):
        loss = train(torch.arange(12.0).reshape(4, 3) / 12)
    print(f"loss {loss.item():.6f} on {rankless.world_size()}, {sys.argv[1:]}, quiet {sys.flags.quiet}")
    if "late" in sys.argv:
        rankless.configure(devices_per_host=2)
    if "fail" in sys.argv:
        sys.exit(7)

if __name__ == "__main__":
    main()
"""


def plain(folder: Path, *command: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=60, input=given
    )


@pytest.mark.slow
@pytest.mark.exhaustive  # tests/docs/test_from_oneflow.py shows it with two scripts
def test_the_same_script_trains_alike_on_one_device_and_on_those_configured(tmp_path: Path):
    alone = plain(tmp_path, "train.py", "1")
    assert (alone.returncode, "workers" in alone.stderr) == (0, False)
    wanted = alone.stdout.split(" on ")[0]
    two = plain(tmp_path, "-q", "train.py", "2", "--and", "-x")
    assert (two.returncode, two.stdout) == (0, f"{wanted} on 2, ['2', '--and', '-x'], quiet 1\n")
    assert "2 workers" in two.stderr
    module = plain(tmp_path, "-m", "train", "2")
    assert (module.returncode, module.stdout) == (0, f"{wanted} on 2, ['2'], quiet 0\n")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_script_that_changed_its_folder_is_found_and_returns_its_exit_code(tmp_path: Path):
    done = plain(tmp_path, "train.py", "2", "fail", "chdir")
    assert done.returncode == 7, done.stderr
    assert "on 2" in done.stdout


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("devices", [pytest.param("1", marks=pytest.mark.exhaustive), "2"])
def test_a_late_configure_is_rejected_with_the_line_that_was_first(devices: str, tmp_path: Path):
    late = plain(tmp_path, "train.py", devices, "late")
    assert late.returncode == 1
    assert f"a process that has begun to train: {tmp_path}/train.py:18 was the first call" in late.stderr


@pytest.mark.slow
def test_a_command_line_overrides_configure(tmp_path: Path):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = rankless("run", "-n", "1", "train.py", "2", folder=tmp_path)
    assert (done.returncode, " on 1," in done.stdout) == (0, True)
    assert "configure(devices_per_host=2) is overridden by the command line's -n 1" in done.stdout + done.stderr
    verdict = rankless("verify", "-n", "2", "train.py", "3", folder=tmp_path)
    assert (verdict.returncode, "same training" in verdict.stdout) == (0, True), verdict.stderr
    assert "gives way" not in verdict.stdout + verdict.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
def test_configure_without_a_script_is_rejected(tmp_path: Path):
    done = plain(tmp_path, given="import rankless\nrankless.configure(devices_per_host=2)\n")
    assert done.returncode == 1
    assert "rankless.spawn" in done.stderr


IPYTHON = """
kept = "kept"
import rankless
rankless.configure(devices_per_host=1)
rankless.configure(devices_per_host=2)
%run train.py 2
rankless.configure(devices_per_host=2, hosts=["127.0.0.1"])
print("the session has", kept)
"""


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("start", [pytest.param(("-m", "IPython"), id="module"), pytest.param((), id="function")])
def test_ipython_keeps_its_session_where_configure_would_end_it(start: tuple[str, ...], tmp_path: Path):
    (tmp_path / "shell.py").write_text("import IPython\nIPython.start_ipython(argv=['--simple-prompt'])\n")
    command = (*start, "--simple-prompt") if start else ("shell.py",)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(tmp_path))
        done = plain(tmp_path, *command, given=IPYTHON)
    assert "the session has kept" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("an IPython session, which would end with all that is defined in it") == 3
    assert "In[5]:7" not in done.stdout  # the first reason is the session, not a call that comes too late


SESSIONS = {
    "inspected script": (("-i", "train.py", "2"), "print('kept')", "the interactive interpreter"),
    "inspected module": (("-i", "-m", "train", "2"), "print('kept')", "the interactive interpreter"),
    "interpreter": (("-i",), "import rankless\nrankless.configure(devices_per_host=2)\nprint('kept')", "interactive"),
    "console": (
        ("-c", "import code; code.interact()"),
        "import rankless\nrankless.configure(devices_per_host=2)\nprint('kept')",
        "interactive",
    ),
    "other console": (
        ("-c", "import code; shell = code.InteractiveConsole()\nfor line in open(0): shell.push(line)"),
        "import rankless\nrankless.configure(devices_per_host=2)\nprint('kept')\n",
        "a console (<console>)",
    ),
}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "inspected module",
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in SESSIONS if name != "inspected module"),
    ],
)
def test_a_session_of_python_is_kept_where_configure_would_end_it(case: str, tmp_path: Path):
    command, given, found = SESSIONS[case]
    done = plain(tmp_path, *command, given=given)
    assert "kept" in done.stdout, done.stderr
    assert found in done.stderr
    assert "rankless.spawn" in done.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_script_that_imports_ipython_is_no_session_of_it(tmp_path: Path):
    (tmp_path / "shows.py").write_text(
        "import IPython.display, runpy\nrunpy.run_path('train.py', run_name='__main__')\n"
    )
    done = plain(tmp_path, "shows.py", "2")
    assert (done.returncode, " on 2," in done.stdout) == (0, True), done.stderr


COMMANDS = {
    ("train.py", "a", "-b"): Program(kind="script", target=__file__, arguments=("a", "-b")),
    ("-u", "-W", "ignore", "-Xdev", "-X", "utf8", "train.py"): Program(kind="script", target=__file__),
    ("--check-hash-based-pycs", "always", "train.py", "-m"): Program(kind="script", target=__file__, arguments=("-m",)),
    ("-m", "train", "-c"): Program(kind="module", target="train", arguments=("-c",)),
    ("-Wignore", "-um", "train"): Program(kind="module", target="train"),
    ("-mtrain", "1"): Program(kind="module", target="train", arguments=("1",)),
    ("-Bc", "print()", "x"): Program(kind="code", target="print()", arguments=("x",)),
}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_program_is_read_from_pythons_command_line(command: tuple[str, ...]):
    assert running_program(("python", *command), __file__) == COMMANDS[command]


@pytest.mark.parametrize("command", [(), ("-",), ("-i",), ("-q", "-")])
def test_a_command_without_a_program_is_rejected(command: tuple[str, ...]):
    with pytest.raises(ConfigError, match=r"rankless\.spawn"):
        running_program(("python", *command), None)


@pytest.mark.parametrize("count", [0, -1, 2.0, True, "2"])
def test_an_invalid_number_is_rejected(count: object):
    with pytest.raises(ConfigError, match="devices_per_host"):
        relaunch(count)  # type: ignore[arg-type]
