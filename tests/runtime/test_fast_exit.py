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
