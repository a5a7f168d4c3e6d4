"""`import horovod…` in workers, and in everything that workers start, imports Rankless's package, not a copy."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.jobs import rankless
from support.warm_runs import rankless as rankless_here
from support.warm_runs import run_script

import rankless as package
from rankless.config import extensions
from rankless.config.environment import AT_START, python_path_at_start
from rankless.runtime.hooks.at_start import sitecustomize
from rankless.runtime.hooks.import_aliases import AliasFinder

pytestmark = pytest.mark.slow

SAME = """
import horovod, horovod.common.exceptions as there
import rankless.extensions.horovod as own
import rankless.extensions.horovod.common.exceptions as here
from horovod.common.exceptions import HorovodInternalError
assert horovod is own and there is here and horovod.common is own.common
assert HorovodInternalError is here.HorovodInternalError
assert there.__spec__.name == here.__name__ == "rankless.extensions.horovod.common.exceptions"
"""
SPAWNING = (
    """
import torch.multiprocessing as torch_multiprocessing, multiprocessing, sys

def check(rank, queue=None):
"""
    + "".join(f"    {line}\n" for line in SAME.strip().splitlines())
    + """
    if queue is not None:
        queue.put(rank)

if __name__ == "__main__":
    torch_multiprocessing.spawn(check, nprocs=1)
    for method in ("spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        child = context.Process(target=check, args=(7, queue))
        child.start()
        assert queue.get(timeout=30) == 7
        child.join()
        assert child.exitcode == 0
    assert "horovod" not in sys.modules
    print("all the same")
"""
)
REAL = "where = 'the real one'\n"


def output_of(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_python(code: str, *options: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python like a worker's child: with the folder of `sitecustomize` on its path."""
    path = {"PYTHONPATH": python_path_at_start()}
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        cwd=folder,
        env={**os.environ, **path, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def install_real_horovod(folder: Path) -> Path:
    """Return a folder for PYTHONPATH in which a real Horovod is installed."""
    (folder / "horovod/torch").mkdir(parents=True)
    (folder / "horovod/__init__.py").write_text(REAL)
    (folder / "horovod/torch/__init__.py").write_text("")
    return folder


@pytest.mark.parametrize(
    "command",
    ["torchrun", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("run", "launch", "fleetrun"))],
)
def test_a_script_gets_the_same_objects_under_every_command(command: str, tmp_path: Path):
    (tmp_path / "script.py").write_text(SAME + "print('same')")
    assert "same" in output_of(rankless(command, "script.py", folder=tmp_path))


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", [(), pytest.param(("--no-warm",), marks=pytest.mark.exhaustive)])
def test_code_modules_and_spawned_processes_get_the_same_objects(how: tuple[str, ...], tmp_path: Path):
    assert output_of(rankless_here("run", *how, "-c", SAME + "print('same')", folder=tmp_path)) == "same\n"
    (tmp_path / "mine.py").write_text(SAME + "print('same')")
    assert output_of(rankless_here("run", *how, "-m", "mine", folder=tmp_path)) == "same\n"
    assert output_of(run_script(SPAWNING, *how, folder=tmp_path)) == "all the same\n"


def test_a_command_and_python_below_its_shell_get_the_same_objects(tmp_path: Path):
    (tmp_path / "same.py").write_text(SAME + "print('same')")
    words = ("-np", "1", "sh", "-c", f"cd / && exec {sys.executable} {tmp_path}/same.py")
    assert "same" in output_of(rankless("horovodrun", *words, folder=tmp_path))


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize(
    ("choice", "wins"),
    [
        ("", "the real one"),
        pytest.param("0", "the real one", marks=pytest.mark.exhaustive),
        ("1", "ours"),
    ],
)
def test_a_real_horovod_is_imported_unless_the_user_chooses_ours(choice: str, wins: str, tmp_path: Path):
    path = os.pathsep.join([str(install_real_horovod(tmp_path / "site")), os.environ.get("PYTHONPATH", "")])
    code = "import horovod.torch; print(getattr(horovod, 'where', 'ours'), flush=True)"
    environment = {"PYTHONPATH": path, "RANKLESS_HOROVOD": choice}
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}], check=True)"
    assert output_of(rankless("run", "-c", f"{code}\n{child}", folder=tmp_path, **environment)) == f"{wins}\n" * 2


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("run", "-n", "2"), id="run"),
        pytest.param(("torchrun", "--nproc-per-node", "2"), id="torchrun", marks=pytest.mark.exhaustive),
    ],
)
def test_a_real_horovod_that_is_alone_in_each_worker_is_warned_about_once(command: tuple[str, ...], tmp_path: Path):
    site = install_real_horovod(tmp_path / "site")
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    warning = (
        f"`import horovod.torch` is the one installed, {site}/horovod/__init__.py: here it is alone in each of the 2"
    )

    def count_warnings(words: tuple[str, ...], code: str, **environment: str) -> int:
        (tmp_path / "train.py").write_text(code)
        done = rankless(*words, "train.py", folder=tmp_path, PYTHONPATH=path, **environment)
        assert done.returncode == 0, done.stderr
        return done.stderr.count(warning)

    assert count_warnings(command, "import horovod.torch, horovod.torch as hvd") == 1
    assert count_warnings(command, "import horovod.torch", RANKLESS_HOROVOD="1") == 0
    assert count_warnings(command, "import horovod") == 0


@pytest.mark.exhaustive
def test_a_real_horovod_that_horovodrun_serves_is_not_warned_about(tmp_path: Path):
    path = os.pathsep.join([str(install_real_horovod(tmp_path / "site")), os.environ.get("PYTHONPATH", "")])
    (tmp_path / "train.py").write_text("import horovod.torch")
    elastic = ("horovodrun", "-np", "2", "--min-np", "1", "python")  # which warns itself, in other words
    for words in (("horovodrun", "-np", "2", "python"), elastic, ("run", "-n", "1")):
        done = rankless(*words, "train.py", folder=tmp_path, PYTHONPATH=path)
        assert done.returncode == 0, done.stderr
        assert "alone in each" not in done.stderr


@pytest.mark.exhaustive
def test_workers_get_the_same_objects_with_rankless_horovod_installed(tmp_path: Path):
    """Its `.pth` file runs before all of a worker. So does a `sitecustomize`, which needs no installation."""
    pth = Path(__file__).parents[2] / "packages/rankless-horovod/source/rankless_horovod.pth"
    (tmp_path / "sitecustomize.py").write_text(pth.read_text())
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    (tmp_path / "none").mkdir()
    (tmp_path / "none/train.py").write_text(
        "import sys\nprint('rankless.extensions.horovod.torch' in sys.modules)\n" + SAME
    )
    done = rankless("run", "-n", "2", "none/train.py", folder=tmp_path, PYTHONPATH=path)
    assert output_of(done) == "True\n", "imported once, for all workers"

    beside = install_real_horovod(tmp_path / "beside")
    (beside / "train.py").write_text("import horovod.torch; print(horovod.where)")
    done = rankless("run", "-n", "2", "beside/train.py", folder=tmp_path, PYTHONPATH=path)
    assert output_of(done) == "the real one\n"
    assert done.stderr.count("here it is alone in each of the 2 processes") == 1


@pytest.mark.exhaustive
def test_choice_0_disables_the_alias_and_a_users_folder_is_no_real_horovod(tmp_path: Path):
    (tmp_path / "horovod").mkdir()
    done = rankless("run", "-c", "import horovod.torch", folder=tmp_path, RANKLESS_HOROVOD="0")
    assert "ModuleNotFoundError: No module named 'horovod.torch'" in done.stderr
    assert "Rankless has" not in done.stderr
    assert output_of(rankless_here("run", "-c", SAME + "print('same')", folder=tmp_path)) == "same\n"


@pytest.mark.exhaustive
def test_a_missing_part_raises_with_the_parts_that_exist(tmp_path: Path):
    for name in ("horovod.tensorflow", "horovod.spark.common", "horovod.torch.nonsense"):
        done = rankless_here("run", "-c", f"import {name}", folder=tmp_path)
        assert done.returncode == 1
        missing = name if name.count(".") == 1 or "torch" in name else "horovod.spark"
        assert (
            f"ModuleNotFoundError: No module named '{missing}': Rankless has Horovod's API for PyTorch" in done.stderr
        )
    asked = "import importlib.util as u; print(u.find_spec('horovod.torch') is not None, end='')"
    assert output_of(rankless_here("run", "-c", asked, folder=tmp_path)) == "True"


def test_python_m_runs_a_module_by_its_alias(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "horovod.runner.launch", "--version"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": python_path_at_start()},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert output_of(done).startswith("0.28")


def test_a_child_is_otherwise_unchanged_and_runs_the_next_sitecustomize(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.next_file = __file__\n")
    code = "import json, sys, builtins; print(json.dumps([sys.path, sorted(sys.modules), builtins.next_file]))"
    before = os.pathsep.join([AT_START, str(tmp_path), os.environ.get("PYTHONPATH", "")])
    path, modules, there = json.loads(output_of(run_python(code, folder=tmp_path, PYTHONPATH=before)))
    assert there == str(tmp_path / "sitecustomize.py")
    assert AT_START not in path
    assert not [name for name in modules if name.startswith("rankless")]
    alone = json.loads(output_of(run_python("import json, sys; print(json.dumps(sys.path))", folder=tmp_path)))
    assert AT_START not in alone


def test_a_worker_imports_no_aliased_package_that_its_script_does_not_name(tmp_path: Path):
    code = "import sys; print([name for name in sys.modules if 'horo' + 'vod' in name and 'compat' in name], end='')"
    assert output_of(rankless("run", "-c", code, folder=tmp_path)) == "[]"


def test_the_finder_answers_no_other_names():
    finder = AliasFinder()
    for name in ("horovodx", "torch", "rankless.extensions.horovod", "mine.horovod"):
        assert finder.find_spec(name) is None


def test_sitecustomize_looks_for_extensions_in_this_package():
    assert Path(sitecustomize.ROOT) == Path(package.__file__).parents[1]
    assert Path(sitecustomize.EXTENSIONS) == extensions.FOLDER


def test_the_finder_answers_the_name_of_an_installed_extension_that_asks_for_it(tmp_path: Path):
    """An extension of another package asks in its `.pth` file. Without that no import searches other packages."""
    (tmp_path / "own_flow").mkdir()
    (tmp_path / "own_flow/__init__.py").write_text("where = 'our own'\n")
    (tmp_path / "own_flow/extension.toml").write_text(
        "[import_alias]\ntarget = 'own_flow'\nvariable = 'OWN_FLOW'\nmissing_text = 'it has nn only'\n"
        "reported_part = 'otherflow'\nwarning = ''\n"
    )
    information = tmp_path / "own_flow-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: own_flow\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[rankless.extensions]\notherflow = own_flow\n")
    code = (
        "from rankless.runtime.hooks.import_aliases import install; install(); "
        "import importlib.util; assert importlib.util.find_spec('otherflow') is None; "
        "install(other='otherflow'); import otherflow, own_flow; assert otherflow is own_flow; print(otherflow.where)\n"
        "try:\n    import otherflow.layers\nexcept ModuleNotFoundError as error:\n    print(error)"
    )
    done = run_python(code, folder=tmp_path)
    assert output_of(done) == "our own\nNo module named 'otherflow.layers': it has nn only\n"
    assert "No module named 'otherflow'" in run_python(code, folder=tmp_path, OWN_FLOW="0").stderr
