"""Rankless in a notebook: a real Jupyter kernel, whose session must live and whose cells must be named."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.notebooks import Notebook

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with Notebook(tmp_path_factory.mktemp("notebook")) as started:
        yield started


def test_configure_leaves_the_kernel_alive_and_refuses_with_what_works_there(notebook: Notebook, tmp_path: Path):
    (tmp_path / "train.py").write_text("import rankless\nrankless.configure(devices_per_host=2)\n")
    notebook.run("kept = 'kept'\nimport rankless, torch\nrankless.configure(devices_per_host=1)")
    for cell in (
        "rankless.configure(devices_per_host=2)",
        "rankless.configure(devices_per_host=1, hosts=['127.0.0.1'])",
        f"%run {tmp_path}/train.py",
        "rankless.rank()\nrankless.configure(devices_per_host=2)",
    ):
        shown = notebook.run(cell)
        assert not shown.died, cell
        assert "found:    a notebook, which would end with all that is defined in it" in shown.traceback
        assert "fix:      start workers from there by rankless.spawn" in shown.traceback
    assert notebook.run("kept").result == "'kept'"


def test_a_line_of_a_cell_is_called_as_the_notebook_calls_it(notebook: Notebook):
    notebook.run("model = torch.nn.Linear(3, 1)")
    shown = notebook.run(
        "number = get_ipython().execution_count\n"
        "@rankless.job(model=model)\n"
        "def predict(inputs: 'torch.Tensor'):\n"
        "    return model(inputs)\n"
        "predict.definition.line == f'Cell In[{number}]:2'"
    )
    assert shown.result == "True"
