"""The first line of a failure: the cause in the user's words, with the line of the user's script."""

import re
from pathlib import Path

import pytest
from support.warm_runs import run_script

pytestmark = pytest.mark.slow

HEAD = """
import concurrent.futures, errno, multiprocessing, os, pathlib, signal
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        fail(index)

def fail(index):
    pass

def run():
    for _ in DataLoader(Data(), batch_size=2, num_workers=WORKERS):
        pass
"""
CASES = {
    "in a library": ("def run():\n    torch.load('missing.pt')  # here", "FileNotFoundError: [Errno 2] No such file"),
    "in a DataLoader worker": (
        "def fail(index):\n    raise ValueError('a bad sample')  # here",
        "ValueError: a bad sample (in DataLoader worker process 0)",
    ),
    "in a DataLoader worker, with a key": (
        "def fail(index):\n    {}['label']  # here",
        "KeyError: 'label' (in DataLoader worker process 0)",
    ),
    "from another one": (
        "def fail(index):\n    try:\n        open('missing.bin')\n    except OSError as error:\n"
        "        raise ValueError('sample 5 is bad') from error  # here",
        "ValueError: sample 5 is bad (in DataLoader worker process 0)",
    ),
    "in a pool": (
        "def run():\n    with multiprocessing.get_context('fork').Pool(1) as pool:\n        pool.map(work, [1])\n"
        "def work(index):\n    raise OSError('no disk')  # here",
        "OSError: no disk",
    ),
    "in an executor": (
        "def run():\n    context = multiprocessing.get_context('fork')\n"
        "    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:\n"
        "        list(pool.map(work, [1]))\n"
        "def work(index):\n    raise OSError('no disk')  # here",
        "OSError: no disk",
    ),
    "in a group": (
        "def run():\n    try:\n        raise TypeError('one')  # here\n"
        "    except TypeError as error:\n        first = error\n"
        "    raise ExceptionGroup('two tasks', [first, ValueError('two')])",
        "TypeError: one (the first of 2 errors of ExceptionGroup: two tasks)",
    ),
    "in a backend of torch.compile": (
        "def run():\n    torch.compile(lambda x: x + 1, backend=broken)(torch.ones(2))\n"
        "def broken(graph, inputs):\n    raise ValueError('no such backend')  # here",
        "ValueError: no such backend",
    ),
    "with a bad syntax": ("def run():\n    exec(compile('x = = 1', 'bad.py', 'exec'))", "SyntaxError: invalid syntax"),
    "deep down": (
        "def run():\n    descend(90)\ndef descend(n):\n    return descend(n - 1) if n else len(5)  # here",
        "TypeError: object of type 'int' has no len()",
    ),
    "with full shared memory": (
        "def run():\n"
        "    raise RuntimeError('unable to write to file </torch_1_2_3>: No space left on device (28)')  # here",
        "No space left on device (28); /dev/shm, through which DataLoader workers send batches, has",
    ),
    "with a bus error": (
        "def fail(index):\n    os.kill(os.getpid(), signal.SIGBUS)\n"
        "def run():\n    for _ in DataLoader(Data(), batch_size=2, num_workers=1):  # here\n        pass",
        "is killed by signal: Bus error.",
    ),
    "with a full disk": (
        "def run():\n    raise OSError(errno.ENOSPC, 'No space left on device')  # here",
        "OSError: [Errno 28] No space left on device at",
    ),
}
SAMPLE = ("in a library", "from another one")


def first_failure(script: str, folder: Path) -> tuple[str, str]:
    done = run_script(script, "-n", "2", folder=folder)
    assert done.returncode == 1, done.stderr
    lines = [line for line in done.stderr.splitlines() if re.match(r"rankless: rank \d raised ", line)]
    return lines[0], done.stderr


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SAMPLE else [pytest.mark.exhaustive]) for name in CASES]
)
def test_the_first_line_is_the_cause_with_the_scripts_line(name: str, tmp_path: Path):
    change, shown = CASES[name]
    text = HEAD.replace("WORKERS", "1") + change + '\nif __name__ == "__main__":\n    run()\n'
    line, report = first_failure(text, tmp_path)
    assert shown in line, report
    number = next((index for index, each in enumerate(text.splitlines(), 1) if "# here" in each), None)
    assert line.endswith("at bad.py:1" if number is None else f"at script.py:{number}"), report


def test_the_traceback_shows_the_scripts_frame_before_the_librarys(tmp_path: Path):
    script = "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n" + (
        "if dist.get_rank() == 1:\n    torch.load('missing.pt')\ndist.barrier()\n"
    )
    line, report = first_failure(script, tmp_path)
    assert line.startswith("rankless: rank 1 raised FileNotFoundError")
    assert line.endswith("at script.py:4")
    script_frame = report.index(f'File "{tmp_path}/script.py", line 4')
    assert report.index(line) < script_frame < report.index("torch/serialization.py")
