"""Extensions of other packages use each seam.

`clocks` has options, a role, a step participant and a check of the doctor. It starts processes that count the steps of
all workers. `hours` has a joint participant, an operator with lookups, a module with states and a view, and no option.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.jobs import job_environment, wait_until

SCRIPT = """
import torch
import rankless as rk

torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


@rk.job(model=model, optimizer=optimizer)
def train(x, y):
    return torch.nn.functional.mse_loss(model(x), y)


for step in range(STEPS):
    train(torch.ones(4, 2), torch.ones(4, 1))
"""


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which `clocks` and `hours` are installed extensions."""
    information = tmp_path / "packages/clocks-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: clocks\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[rankless.extensions]\nclocks = clocks\nhours = hours\n")
    variables = job_environment({})
    path = [str(Path(__file__).parent), str(information.parent), variables.get("PYTHONPATH", "")]
    return {**variables, "PYTHONPATH": os.pathsep.join(path)}


def start(installed: dict[str, str], folder: Path, *words: str, steps: int = 3) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(SCRIPT.replace("STEPS", str(steps)))
    return subprocess.Popen(
        [sys.executable, "-m", "rankless", "run", *words, "script.py"],
        cwd=folder, env=installed, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_its_processes_start_before_workers_hear_of_steps_and_end_after_them(installed, tmp_path):
    job = start(installed, tmp_path, "--clocked-workers", "1", "--clocks", "2")
    output, errors = job.communicate()
    assert job.returncode == 0, errors
    heard = "heard, " + ", ".join(["call of train", "step of train"] * 3)
    assert heard in output.splitlines()
    logs = sorted((tmp_path / "log/latest").glob("clock*.log"))
    assert [log.read_text() for log in logs] == ["counted 6\n"] * 2  # 3 steps of 2 workers
    table = errors.splitlines()
    assert re.match(r"rankless: 2 workers, \d+ threads? each, 2 clocks, seed ", table[0]), errors
    assert re.match(r" +clock +pid +address +log file", table[1]), errors
    assert [line.split()[0] for line in table[2:4]] == ["0", "1"]


def test_its_death_is_the_root_cause(installed, tmp_path):
    job = start(installed, tmp_path, "-n", "2", "--clocks", "1", "--clock-lifetime", "20", steps=10**6)
    errors = job.communicate()[1]
    assert job.returncode == 7, errors
    assert "rankless: clock 0 ended with exit code 7 while workers ran\n" in errors
    assert re.search(r"its log file is log/\S+/clock0.log; the job was ended, exit code 7", errors)


@pytest.mark.slow
def test_the_status_of_a_run_shows_it(installed, tmp_path):
    job = start(installed, tmp_path, "--clocks", "1", steps=10**6)
    try:

        def status() -> str:
            command = [sys.executable, "-m", "rankless", "status", "log/latest"]
            return subprocess.run(command, cwd=tmp_path, env=installed, capture_output=True, text=True).stdout

        wait_until(lambda: re.search(r"^ +clock +pid.*\n +0 +\d+ +serves", status(), re.MULTILINE) is not None)
    finally:
        job.send_signal(signal.SIGINT)
        errors = job.communicate()[1]
    assert job.returncode == 130, errors


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("--clocks", "0"), "expected: --clocks from 1 up"),
        (("--clocks", "one"), "invalid int value: 'one'"),
        (("--clock", "1"), "unknown option --clock; did you mean --clocks?"),
    ],
)
def test_its_options_are_checked_before_any_process_starts(words, found, installed, tmp_path):
    job = start(installed, tmp_path, *words)
    errors = job.communicate()[1]
    assert (job.returncode, found in errors) == (2, True), errors
    assert not (tmp_path / "log").exists()


@pytest.mark.exhaustive
def test_verify_and_plan_take_its_options_too(installed, tmp_path):
    start(installed, tmp_path, "--help").communicate()  # writes the script
    for words, shown in ((["verify"], "same training: 3 steps"), (["plan", "--steps", "2"], "each worker sends")):
        command = [sys.executable, "-m", "rankless", *words, "-n", "2", "--clocks", "1", "script.py"]
        done = subprocess.run(command, cwd=tmp_path, env=installed, capture_output=True, text=True)
        assert (done.returncode, shown in done.stdout) == (0, True), done.stdout + done.stderr
    assert [log.read_text() for log in tmp_path.glob("log/*/clock0.log")].count("counted 6\n") >= 1


def test_a_declared_module_that_is_missing_is_an_error_with_a_fix(installed, tmp_path):
    folder = tmp_path / "packages/seeds"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "extension.toml").write_text(
        "options_module = 'seeds.missing'\n[options.seeds]\nhelp = 'More.'\n"
        "[commands.sow]\nhelp = 'Sow.'\nmodule = 'seeds.sow'\n"
    )
    (tmp_path / "packages/clocks-1.0.dist-info/entry_points.txt").write_text("[rankless.extensions]\nseeds = seeds\n")
    errors = start(installed, tmp_path, "--seeds", "2").communicate()[1]
    assert "expected: the module seeds.missing with make_options, which extension.toml of the extension" in errors
    assert "found:    No module named 'seeds.missing'\nfix:" in errors
    sow = [sys.executable, "-m", "rankless", "sow"]
    done = subprocess.run(sow, cwd=tmp_path, env=installed, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("rankless sow: ConfigError\nexpected: the module seeds.sow, which ext"), done.stderr


@pytest.mark.exhaustive
def test_two_roles_of_a_run_have_the_same_numbers(installed, tmp_path):
    """The processes are `server 0` and `clock 0`; a clock's end is not taken for a server's."""
    pytest.importorskip("zmq")
    job = start(
        installed, tmp_path, "-n", "2", "--servers", "1", "--clocks", "1", "--clock-lifetime", "20", steps=10**6
    )
    errors = job.communicate()[1]
    assert job.returncode == 7, errors
    assert re.search(r"^ +process +pid.*\n +server 0 .*\n +clock 0 ", errors, re.MULTILINE), errors
    assert "rankless: clock 0 ended with exit code 7 while workers ran\n" in errors


def test_an_option_that_exists_already_is_left_out(installed, tmp_path):
    folder = tmp_path / "packages/seeds"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "extension.toml").write_text("[options.seed]\nhelp = 'A seed.'\n[options.seeds]\nhelp = 'More.'\n")
    (tmp_path / "packages/clocks-1.0.dist-info/entry_points.txt").write_text("[rankless.extensions]\nseeds = seeds\n")
    job = start(installed, tmp_path, "--seed", "1", "--seeds", "2", steps=1)
    errors = job.communicate()[1]
    assert job.returncode == 0, errors
    assert errors.startswith("rankless: the extension seeds has no --seed: it exists already\n")


def test_the_help_shows_its_options_without_an_import(installed, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, sys\natexit.register(lambda: print('clocks' in sys.modules))\n"
    )
    installed["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{installed['PYTHONPATH']}"
    command = [sys.executable, "-m", "rankless", "run", "--help"]
    shown = subprocess.run(command, cwd=tmp_path, env=installed, capture_output=True, text=True, check=True).stdout
    assert re.search(r"^clocks:\n  --clocks N +Clock processes", shown, re.MULTILINE)
    assert shown.splitlines()[-1] == "False"


@pytest.mark.slow
def test_the_doctor_makes_its_check(installed, tmp_path):
    command = [sys.executable, "-m", "rankless", "doctor"]
    done = subprocess.run(command, cwd=tmp_path, env=installed, capture_output=True, text=True)
    assert re.search(r"clocks +a clock ticks", done.stdout), done.stdout + done.stderr


HOURS_SCRIPT = """
import torch
import hours
import rankless as rk

face = hours.Face()
layer = torch.nn.Linear(2, 1, dtype=torch.float64)
torch.nn.init.ones_(layer.weight)
optimizer = torch.optim.SGD([*face.parameters(), *layer.parameters()], lr=0.1)


@rk.job(model=[face, layer], optimizer=optimizer)
def train(ids):
    return layer(face(ids)).square().mean()


@rk.job(model=face)
def tell(ids):
    raise AssertionError("the extension has a view of its own")


loader = rk.loader(torch.utils.data.TensorDataset(torch.arange(12)), batch_size=6)
for (ids,) in loader:
    loss = train(ids)
print(tell(ids), f"{loss:.12f} {face.weight.item():.12f}", rk.check_synchronized(layer), flush=True)
"""
STEP = ["count_call", "end_call", "step", "end_step", "prepare_next_call"]
AROUND = (["meet the end of a pass over a loader", "meet rankless.check_synchronized"], ["finish", "close"])


def test_a_module_of_a_script_brings_its_participant_operators_and_view(installed, tmp_path):
    """No option asks for the extension `hours`. Its participant hears the joint events in the stated order."""
    (tmp_path / "script.py").write_text(HOURS_SCRIPT)
    shown = []
    for workers in (1, 2):
        command = [sys.executable, "-m", "rankless", "run", "-n", str(workers), "--seed", "1", "-q", "script.py"]
        done = subprocess.run(command, cwd=tmp_path, env=installed, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        first, rest = done.stdout.split("\nheard\n")
        shown.append(first)
        if workers == 1:
            eager = [each for each in STEP if each not in ("end_call", "prepare_next_call")]
            call = ["begin_call", *eager]
        else:
            programs = ["begin_program", "begin_program", "end_program that looks up 3 of this rank's hours"]
            call = ["begin_call", *programs, *STEP]
        assert rest.splitlines() == [*call, *call, *AROUND[0], *AROUND[1]]
    assert shown[0] == shown[1]
    assert shown[0].startswith("twelve o'clock 2.58")
