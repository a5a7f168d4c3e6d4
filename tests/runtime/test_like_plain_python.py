"""A script in a worker runs as it does under plain Python."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.warm_runs import rankless, run_script

pytestmark = pytest.mark.slow

PROBE = """
import sys, os
print(sys.argv, sys.path[0], globals().get("__file__"), __name__, __package__, type(__loader__).__name__)
print(__spec__ and __spec__.name, sorted(globals()), sys.modules["__main__"].__dict__ is globals())
print(__builtins__, sys.flags, sys.warnoptions, sys._xoptions, sorted(sys.meta_path[1:], key=str) == [])
print(sys.stdout.encoding, sys.stdout.fileno(), sys.stderr.errors, sys.stdin.read(), "torch" in sys.modules)
print(os.getcwd(), __debug__, sys.executable)
"""


def run_plain(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONHASHSEED": "5"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
    )


def run_in_worker(*arguments: str, folder: Path, warm: bool = True) -> subprocess.CompletedProcess[str]:
    options = [] if warm else ["--no-warm"]
    return rankless("run", "-n", "1", *options, *arguments, folder=folder, PYTHONHASHSEED="5")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "package").mkdir()
    (tmp_path / "sub" / "probe.py").write_text(PROBE)
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "__main__.py").write_text(PROBE)
    (tmp_path / "package" / "part.py").write_text(PROBE)
    return tmp_path


@pytest.mark.ci_sample(4)
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "plain"])
@pytest.mark.parametrize(
    "program",
    [
        ("sub/probe.py", "-n", "3", "--show", "x", "-m"),
        ("-m", "package", "-c", "--help"),
        ("-m", "package.part"),
        ("-c", PROBE, "-x", "--version"),
    ],
    ids=["script", "package", "module", "code"],
)
def test_main_arguments_path_and_streams_are_those_of_plain_python(
    program: tuple[str, ...], warm: bool, project: Path
) -> None:
    expected = run_plain(*program, folder=project)
    found = run_in_worker(*program, folder=project, warm=warm)
    assert found.stdout == expected.stdout
    assert found.returncode == 0


@pytest.mark.exhaustive
def test_interpreter_flags_reach_the_workers(project: Path) -> None:
    command = [sys.executable, "-O", "-W", "error", "-X", "dev", "-m", "rankless", "run", "-n", "1", "-c"]
    code = "import sys; print(sys.flags.optimize, sys.warnoptions, sys._xoptions, __debug__)"
    found = subprocess.run([*command, code], cwd=project, capture_output=True, text=True, timeout=60)
    assert found.stdout == "1 ['error'] {'dev': True} False\n" or "'error'" in found.stdout.split("{")[0], found
    assert found.stdout.startswith("1 ")
    assert "'dev': True" in found.stdout


@pytest.mark.ci_sample(3)
@pytest.mark.parametrize(
    "program",
    [
        "def f():\n    return 1 / 0\nf()\n",
        "try:\n    {}['a']\nexcept KeyError as e:\n    raise ValueError('b') from e\n",
        "x = (\n",
        "raise SystemExit('over')\n",
        "import sys\nsys.excepthook = lambda *a: print('hooked', a[0].__name__)\n1/0\n",
        "import atexit, threading\natexit.register(print, 'at exit')\n"
        "threading.Timer(0.1, print, ['thread']).start()\n",
        "import sys\nsys.exit(300)\n",
        "import sys\nsys.stdout.write('no end of line')\n",
        "class A:\n    def __del__(self): print('gone')\na = A()\nb = [A()]\nb.append(b)\n",
        "kept = open('kept', 'w')\nkept.write('buffered')\nimport atexit\natexit.register(print, 'at exit')\n",
        "import threading, time\nthreading.Thread(target=time.sleep, args=[600], daemon=True).start()\n"
        "class A:\n    def __del__(self): print('gone')\na = A()\nraise SystemExit(4)\n",
        "import ctypes\nctypes.CDLL(None).puts(b'from C')\n",
        "import logging, logging.handlers, sys\n"
        "target = logging.StreamHandler(sys.stdout)\n"
        "logging.getLogger().addHandler(logging.handlers.MemoryHandler(9, target=target))\n"
        "logging.getLogger().warning('remembered')\n",
        "import os\nos.write(1, b'raw\\n')\nos.system('echo child')\n",
    ],
    ids=[
        "raise",
        "chain",
        "syntax",
        "message",
        "hook",
        "atexit",
        "code",
        "no newline",
        "del",
        "file",
        "daemon",
        "C",
        "logging",
        "raw",
    ],
)
def test_output_and_exit_code_are_those_of_plain_python(program: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(program)
    expected = run_plain("script.py", folder=tmp_path)
    found = run_in_worker("script.py", folder=tmp_path)
    assert found.stdout == expected.stdout
    assert found.returncode == expected.returncode
    if (tmp_path / "kept").exists():
        assert (tmp_path / "kept").read_text() == "buffered"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options", [pytest.param((), id="warm"), pytest.param(("--no-warm",), id="plain", marks=pytest.mark.exhaustive)]
)
def test_a_main_class_pickles_and_multiprocessing_children_find_it(options: tuple[str, ...], tmp_path: Path) -> None:
    script = """
import multiprocessing, pickle, threading, torch
class Point:
    def __init__(self, x): self.x = x
def double(p): return Point(2 * p.x)
class Data(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): return torch.tensor(i)
if __name__ == "__main__":
    print(pickle.loads(pickle.dumps(Point(3))).x)
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, pool.map(double, [Point(4)])[0].x)
    for method in ("fork", "spawn"):
        loader = torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context=method)
        print([int(x) for x in loader])
    # The threads that feed the loader's queues are daemons, and remove those queues' semaphores as they end. A process
    # that exits before them is told of leaked semaphores, with plain Python too.
    for thread in set(threading.enumerate()) - {threading.main_thread()}: thread.join()
"""
    job = run_script(script, "-n", "1", *options, folder=tmp_path)
    expected = "3\nfork 8\nspawn 8\nforkserver 8\n[0, 1, 2, 3]\n[0, 1, 2, 3]\n"
    assert (job.stdout, job.returncode) == (expected, 0)


def test_a_module_beside_the_script_shadows_one_that_the_fork_server_imported(tmp_path: Path) -> None:
    (tmp_path / "statistics.py").write_text("whose = 'mine'\n")
    (tmp_path / "filelock").mkdir()
    (tmp_path / "filelock" / "__init__.py").write_text("whose = 'mine too'\n")
    script = """
import statistics, filelock
print(statistics.whose, filelock.whose)
import torch
print(torch.ones(2).sum())
"""
    job = run_script(script, "-n", "1", folder=tmp_path)
    assert (job.stdout, job.returncode) == ("mine mine too\ntensor(2.)\n", 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "plain"])
def test_find_spec_of_torch_before_its_import_works_as_in_plain_python(warm: bool, tmp_path: Path) -> None:
    """Libraries call it to see whether torch is installed. A second import of torch would raise a SystemError."""
    (tmp_path / "script.py").write_text(
        "import importlib.util\n"
        "found = [importlib.util.find_spec(name) for name in ('torch', 'torch', 'numpy')]\n"
        "print([(spec.origin, list(spec.submodule_search_locations)) for spec in found])\n"
        "import sys\nprint('torch' in sys.modules)\n"
        "import torch, torch.nn\nprint(torch.__spec__.origin, torch.ones(2).sum().item(), torch.initial_seed())\n"
    )
    expected = run_plain("script.py", folder=tmp_path).stdout.splitlines()
    found = rankless(
        "run", "-n", "1", "--seed", "5", *([] if warm else ["--no-warm"]), "script.py", folder=tmp_path
    ).stdout.splitlines()
    assert found[:2] == expected[:2]
    assert found[2].split()[:2] == expected[2].split()[:2]
    assert found[2].endswith(" 5")
