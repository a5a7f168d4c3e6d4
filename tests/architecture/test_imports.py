"""Folder order is import order, the surface is what it says, and the launcher's side never loads torch."""

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from architecture.sources import PACKAGE, ROOT, nodes_of, python_files, short

import rankless

WITHOUT_TORCH = ("cli", "launch", "terminal", "plan_picture", "config", "records", "errors")

# Each exception has its reason; this list only shrinks.
LATE_IMPORTS: dict[str, str] = {}


def modules_without_torch() -> list[str]:
    files = [*PACKAGE.glob("errors.py"), *(f for part in WITHOUT_TORCH[:-1] for f in (PACKAGE / part).rglob("*.py"))]
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in sorted(files)]
    return [name.removesuffix(".__init__") for name in names]


@pytest.mark.slow
def test_import_linter_finds_every_contract_kept():
    tool = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([tool], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.mark.slow
def test_the_launchers_side_loads_without_torch():
    names = modules_without_torch()
    assert {"rankless.cli", "rankless.errors"} <= set(names)
    code = (
        f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\nsys.exit('torch' in sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "COVERAGE_PROCESS_START"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr or "torch was loaded"


MOST_MODULES_OF_AN_AGENT = 72
"""Each module costs the start of every run about a millisecond. This number only shrinks."""


def list_modules_of_agent(folder: Path, prepare: str = "") -> list[str]:
    """Return the modules of Rankless that the agent of a run has imported in the end."""
    (folder / "plain.py").write_text("import time; time.sleep(0.5); print('trained')")
    code = (
        f"import sys; from rankless.cli import main; {prepare}\ncode = main(['run', '-n', '2', 'plain.py'])\n"
        "print(*sorted(name for name in sys.modules if name.startswith('rankless')), sep='\\n'); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    trained, *modules = done.stdout.splitlines()
    assert trained == "trained"
    assert "rankless.launch.agent" in modules
    return modules


@pytest.mark.slow
def test_the_agent_of_a_longer_run_has_loaded_what_a_failure_needs(tmp_path: Path):
    """The installation may be another version by then."""
    from_start = "from rankless.launch.supervisor import supervisor; supervisor.LOADED_AFTER_SECONDS = 0"
    sources = [file.read_text() for file in (PACKAGE / "launch").rglob("*.py")]
    parts = {f"watchdog.{name}" for text in sources for name in re.findall(r'load_part\("(\w+)"\)', text)}
    parts |= {name for text in sources for name in re.findall(r'"rankless\.launch\.(supervisor\.\w+)"\)', text)}
    assert {"watchdog.report", "supervisor.failure_attribution", "supervisor.failure_report"} <= parts
    assert {f"rankless.launch.{name}" for name in parts} <= set(list_modules_of_agent(tmp_path, from_start))


@pytest.mark.slow
def test_the_agent_of_a_plain_run_loads_few_modules_and_none_of_an_extension(tmp_path: Path):
    modules = list_modules_of_agent(tmp_path)
    assert not [name for name in modules if name.startswith("rankless.extensions")]
    assert len(modules) <= MOST_MODULES_OF_AN_AGENT, modules


def test_every_name_of_the_public_surface_is_there():
    assert len(rankless.__all__) <= 28
    assert sorted(rankless.__all__) == rankless.__all__
    for name in rankless.__all__:
        assert getattr(rankless, name) is not None
    assert dir(rankless) == sorted(rankless.__all__)


def test_a_name_that_is_not_offered_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        rankless.nonsense  # noqa: B018


def test_no_import_stands_inside_a_function():
    late = {
        short(file)
        for file in python_files("rankless")
        for function in nodes_of(file)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert late == set(LATE_IMPORTS)


def test_every_module_can_be_imported_by_itself():
    for file in python_files("rankless"):
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if not name.endswith("__main__"):
            assert importlib.import_module(name)


UNREACHABLE_ERRORS = {
    "rankless.checkpoint.raise_on_all_ranks.OtherRankFailed": "a CheckpointError; only saves tell it from others",
    "rankless.collectives.backends.hosts.gloo_exchange.ExchangeTimeout": "the collective raises a CollectiveError",
    "rankless.collectives.backends.message_transfers.LengthMismatch": "the receive raises a CollectiveError",
    "rankless.context.all_or_nothing_operations._WorkerLost": "all that are left repeat the operation",
    "rankless.compiler.capture.value_reads.LateQuestion": "the job is traced again, and asks within its function",
    "rankless.compiler.tracing.replaced_functions.TakesNestedTensor": "the encoder's replaced forward pass catches it",
    "rankless.compiler.capture.value_reads.ValueNeeded": "the job captures the program again with the value",
    "rankless.compiler.lowering.value_check.OtherValueRead": "the job runs the program of the value found",
    "rankless.plain_script.effects_on_first_rank.EffectWhileReading": "all ranks read the batch whole",
    "rankless.data.sample_reader.ReaderProcessError": "the __cause__ of a DataError, with a traceback",
    "rankless.extensions.servers.service.server_connection.ReadInterruptedError": "the read is made again",
    "rankless.logical_view.call_plan.CannotDivide": "the call runs on whole values",
    "rankless.logical_view.trace_call_to_program.ChangesArguments": "the call is traced again, with copies of these",
    "rankless.launch.rendezvous.tcp_connect_and_reachability.HostUnreachableError": "it becomes a JoinError",
    "rankless.launch.rendezvous.control_connection.LeaderUnreachableError": "the launcher turns it into a JoinError",
    "rankless.launch.rendezvous.control_connection.ConnectionBrokenError": "the launcher turns it into a JoinError",
    "rankless.launch.rendezvous.control_connection.TokenRejectedError": "the launcher turns it into a JoinError",
    "rankless.launch.signal_reader.RendezvousInterrupted": "the launcher turns it into exit code 130",
    "rankless.extensions.servers.service.wire.messages.MessageRefusedError": "the receiver counts and drops it",
    "rankless.extensions.servers.service.server_connection.TransferLostError": "the worker reads or restores again",
    "rankless.launch.rendezvous.control_connection.DifferentTokenError": "host 0 counts it as a rejected client",
    "rankless.launch.authenticated_tcp_store.IncompleteQuery": "the store waits for the rest of the query",
    "rankless.launch.authenticated_tcp_store.InvalidQuery": "the store closes the connection",
    "rankless.records.framing.FrameTooLongError": "the receiver of a message closes the connection",
    "rankless.verify.runs.RunFailed": "`rankless verify` prints it and ends with its exit code",
}
"""Exceptions of the package that no user's script can catch, with what becomes of them."""


def test_every_exception_that_a_user_may_catch_is_in_errors():
    found = {}
    for file in python_files("rankless"):
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if name.startswith("rankless.extensions.horovod") or name.endswith("__main__"):
            continue  # Horovod's exceptions are where Horovod has them
        members = vars(importlib.import_module(name)).values()
        classes = [item for item in members if isinstance(item, type) and issubclass(item, BaseException)]
        found |= {f"{name}.{item.__name__}": item for item in classes if item.__module__ == name}
    elsewhere = {name for name in found if not name.startswith("rankless.errors.")}
    assert elsewhere == set(UNREACHABLE_ERRORS)


def test_jobs_and_loaders_are_of_the_public_classes():
    model = torch.nn.Linear(2, 1)
    for options in ({}, {"view": "mirrored"}, {"optimizer": torch.optim.SGD(model.parameters())}):
        assert isinstance(rankless.job(model=model, **options)(model.forward), rankless.Job)
    for reading in ("split", "replicated", "first"):
        assert isinstance(rankless.loader([1, 2], reading=reading), rankless.Loader)
    assert rankless.Job[[torch.Tensor], torch.Tensor] is not None
    assert rankless.Loader[torch.Tensor] is not None


FIRST_USE = """
import random
import numpy, torch, rankless
def states():
    return random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()
random.seed(0)
before = states()
rankless.loader
rankless.loader(torch.arange(4))
assert states() == before
"""


def test_the_first_use_of_rankless_does_not_move_the_random_generators():
    """A library that it imports draws a number from Python's `random` while it is imported."""
    done = subprocess.run([sys.executable, "-c", FIRST_USE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


IMPORT_IN_TEXT = re.compile(r"^\s*from (rankless(?:\.\w+)+) import (\w+(?:, \w+)*)$", re.M)


def test_scripts_within_tests_import_what_there_is():
    """Tests of the soak hold scripts as text. No type checker reads them, and CI does not run them all."""
    found = [
        (file, *match.groups())
        for file in sorted((ROOT / "tests").rglob("*.py"))
        for match in IMPORT_IN_TEXT.finditer(file.read_text())
    ]
    assert len(found) > 1000
    for file, module, names in found:
        package = ROOT.joinpath(*module.split("."))
        text = next(
            (each.read_text() for each in (package.with_suffix(".py"), package / "__init__.py") if each.exists()), None
        )
        assert text is not None, f"{file} imports {module}"
        for name in names.split(", "):
            there = (package / f"{name}.py").exists() or (package / name).is_dir()
            assert there or re.search(rf"\b{name}\b", text), f"{file} imports {name} from {module}"


PATH_FROM_TEST = re.compile(r'Path\(__file__\)(?:\.resolve\(\))?\.parents\[(\d)\]((?: / "[^"]+")*)')


def test_paths_from_test_files_lead_to_what_there_is():
    """A test that has moved to another folder counts its parents anew. Those of the soak would fail there alone."""
    found = [
        (file, file.parents[int(level)].joinpath(*re.findall('"([^"]+)"', rest)))
        for file in sorted((ROOT / "tests").rglob("*.py"))
        for level, rest in PATH_FROM_TEST.findall(file.read_text())
    ]
    assert len(found) > 15
    for file, path in found:
        assert path.exists(), f"{file} names {path}"
        assert path != ROOT / "tests" or file.parent.parent == path, f"{file} names tests as the root"
