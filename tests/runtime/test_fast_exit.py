"""What a worker does at its exit, beside what plain Python does."""

from pathlib import Path

import pytest
from support.warm_runs import run_script

pytestmark = pytest.mark.slow

LAZY = """
import importlib.util, pathlib, sys

pathlib.Path("broken.py").write_text("raise ImportError('imported at exit')")
spec = importlib.util.spec_from_file_location("broken", "broken.py")
spec.loader = importlib.util.LazyLoader(spec.loader)
module = importlib.util.module_from_spec(spec)
sys.modules["broken"] = module
spec.loader.exec_module(module)

class Answering:
    def __getattr__(self, name):
        raise ImportError(f"asked for {name} at exit")

class Slotted:
    __slots__ = ()

sys.modules["answering"] = Answering()
sys.modules["slotted"] = Slotted()
sys.modules["none"] = None

class Last:
    def __del__(self):
        print("the script's objects end", flush=True)

last = Last()
"""


def test_modules_that_are_loaded_lazily_stay_unloaded_at_exit(tmp_path: Path):
    done = run_script(LAZY, "-n", "1", "--show", "all", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the script's objects end" in done.stdout
    assert "at exit" not in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


LAST_CALL = """
import atexit, threading
import torch, rankless as rk

model = torch.nn.Linear(2, 1)
job = rk.job(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))(lambda x: model(x).mean())
job(torch.ones(4, 2))
print([each.name for each in threading.enumerate()][1:], flush=True)

class Torn:
    def __del__(self):
        print("torn down", flush=True)

torch.kept_until_the_interpreter_empties_torch = Torn()
"""


def test_a_worker_that_may_be_lost_ends_fast_too(tmp_path: Path):
    """The thread that listens to the agent does not keep it: a full teardown also prints what PyTorch 2.15 leaks."""
    pytest.importorskip("zmq")
    done = run_script(LAST_CALL, "-n", "2", "--servers", "1", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "rankless elastic rounds" in done.stdout
    assert "torn down" not in done.stdout
