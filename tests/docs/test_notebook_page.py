"""The cells of docs/guides/notebooks.md run in a real Jupyter kernel, and the trained model comes back."""

import re
from pathlib import Path

import psutil
import pytest
from support.notebooks import Notebook

PAGE = Path(__file__).parents[2] / "docs/guides/notebooks.md"
CELLS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)

FAILS = """\
def fails(rank):
    print("before", rank)
    train(inputs[:, :3], targets)


rankless.spawn(fails, nprocs=2)
"""

WAITS = """\
def waits(rank):
    import os, signal
    print(os.getpid(), "waits")
    signal.pause()


rankless.spawn(waits, nprocs=2)
"""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_cells_of_the_page_train_and_bring_the_model_back(tmp_path: Path):
    with Notebook(tmp_path) as notebook:
        define, train, load, evaluate = CELLS
        # The notebook has used everything before it spawns, which users do.
        before = notebook.run(f"{define}\nrankless.configure(devices_per_host=1)\ntrain(inputs, targets).item()")
        assert not before.traceback
        untrained = float(notebook.run(evaluate).result)
        shown = notebook.run(train)
        assert not shown.traceback, shown.traceback
        assert re.findall(r"epoch \d: loss", shown.output) == ["epoch 0: loss", "epoch 1: loss", "epoch 2: loss"]
        assert "different seeds" not in shown.errors
        assert float(notebook.run(evaluate).result) == untrained
        assert not notebook.run(load).traceback
        assert float(notebook.run(evaluate).result) < untrained / 2
        check_errors(notebook)
        check_stop(notebook)
        check_configure(notebook, tmp_path)


def check_errors(notebook: Notebook) -> None:
    failed = notebook.run(FAILS)
    number = re.findall(r"Cell In\[(\d+)\], line 6", failed.traceback)[0]
    assert f'File "Cell In[{number}]", line 3, in fails\n    train(inputs[:, :3], targets)' in failed.traceback
    assert re.search(r'File "Cell In\[1\]", line 15, in train', failed.traceback)
    assert failed.output == "before 0\n"
    assert failed.traceback.count("rankless/") <= 1, failed.traceback


def check_stop(notebook: Notebook) -> None:
    cell = notebook.start(WAITS)
    started = notebook.wait_for_output(cell, "waits")
    workers = [psutil.Process(int(number)) for number in re.findall(r"\d+", started)]
    notebook.interrupt()
    assert "KeyboardInterrupt" in notebook.wait(cell).traceback
    assert len(workers) == 1
    assert not any(worker.is_running() for worker in workers)


def check_configure(notebook: Notebook, folder: Path) -> None:
    (folder / "train.py").write_text("import rankless\nrankless.configure(devices_per_host=2)\n")
    for cell in ("rankless.configure(devices_per_host=2)", f"%run {folder}/train.py"):
        refused = notebook.run(cell)
        assert not refused.died, cell
        assert "found:    a notebook, which would end with all that is defined in it" in refused.traceback
    assert notebook.run("train.definition.line").result == "'Cell In[1]:13'"
